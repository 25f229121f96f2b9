"""Ctrl-C, SIGTERM and a lost terminal (SIGHUP) as one exception that ends a command or a run in any place.

While a run takes steps, SIGTERM and SIGUSR1, which batch systems send before they end a job, are noted
instead: the run saves, and ends then. A later one is as any other signal.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from stretto.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTED = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to save and end."""
REPEATED_S = 3.0
"""For how long such a signal is the same one that comes again: Slurm signals each process of a job, and
launchers pass on what they get. Assumed."""
STUCK_S = 3.0
"""How long a process has to end by itself after a signal. Python handles signals between two of its own
instructions, and a rank may be inside a library, waiting for another rank."""


class Stops:
    """While it is entered, SIGTERM and a lost terminal (SIGHUP) end a command as Ctrl-C does: by
    KeyboardInterrupt, wherever it is, in the main thread. What takes the best so far, writes what it has, or
    cleans up, then does so for all three. numbers: theirs, in order: who is interrupted may take that for the
    end of a search, and print nothing. raises: False only notes them there.

    What the caller ignores stays ignored: `nohup stretto plan` outlives its terminal. A signal that a library
    swallowed while it was loaded, ends what is entered next, inside of the one that got it.
    """

    signals: tuple[signal.Signals, ...] = SIGNALS

    def __init__(self, raises: bool = True) -> None:
        self.numbers: list[int] = []
        self._raises = raises
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            outer = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
            if isinstance(outer, Stops) and outer._raises and outer.numbers:
                raise KeyboardInterrupt
            for number in self.signals:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def status(self) -> int:
        """The exit status by custom: 128 and the number of the signal that came first."""
        return 128 + self.numbers[0] if self.numbers else StoppedError.exit_status

    def ignore(self) -> None:
        """From here on there is little left to do."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)
        if self._raises:
            raise KeyboardInterrupt


class Interrupted(BaseException):
    """The run was asked to end. `status` is the exit status by custom: 128 and the signal's number."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.status = 128 + signum
        super().__init__(signal.Signals(signum).name)


class Interrupts(Stops):
    """While it is entered, the first signal raises `Interrupted` and later ones are ignored.

    Call it in the main thread. `received` stays set, because libraries turn exceptions that cross them into
    others. When the process has not left `stuck_s` after a signal, `stuck` is called, in a thread; it ends
    the process. So it does where Python handles the signal inside a callback or a destructor, which cannot
    raise. asked: the signal that was noted, 0 before.
    """

    signals = (*SIGNALS, signal.SIGUSR1)

    def __init__(self, stuck: Callable[[Interrupted], None]) -> None:
        super().__init__()
        self.received: Interrupted | None = None
        self.asked = 0
        self._asked_s = 0.0
        self._note: Callable[[int], object] | None = None
        self.stuck_s = STUCK_S
        self._ending = False
        self._stuck = stuck
        self._left = threading.Event()

    def __enter__(self) -> Interrupts:
        super().__enter__()
        self._hook_before, sys.unraisablehook = sys.unraisablehook, self._swallowed
        # The interpreter writes a signal's number here at once, even while the main thread is elsewhere.
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._watching = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        sys.unraisablehook = self._hook_before
        signal.set_wakeup_fd(self._wakeup_before)
        super().__exit__()
        self._sender.close()
        # A thread that outlived the run would free what `stuck` knows of, a model with its tensors, while the
        # interpreter ends. PyTorch cannot have that, and aborts.
        self._watching.join()

    def ending(self) -> None:
        """From here on the process ends anyway: a signal is kept in `received` and raises nothing.

        One that came before, while the process was inside a library, is raised now, as the last."""
        self._ending = True

    @contextmanager
    def noting(self, note: Callable[[int], object] = lambda _: None) -> Iterator[None]:
        """While it lasts, the first signal of `NOTED` raises nothing, and is kept in `asked`. note: called
        with it, in the main thread."""
        self._note = note
        try:
            yield
        finally:
            self._note = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._note is not None and signum in NOTED and not self.asked:
            self.asked, self._asked_s = signum, time.monotonic()
            self._note(signum)
        elif self._is_repeated(signum, self._asked_s):
            return
        elif self.received is None:
            self.received = Interrupted(signum)
            if not self._ending:
                raise self.received

    def _is_repeated(self, signum: int, since_s: float) -> bool:
        return since_s > 0 and signum in NOTED and time.monotonic() - since_s < REPEATED_S

    def _swallowed(self, unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_value is None or unraisable.exc_value is not self.received:
            self._hook_before(unraisable)

    def _watch(self) -> None:
        noted_s = 0.0
        with self._receiver:
            while True:
                numbers = self._receiver.recv(16)
                if not numbers:
                    return
                for signum in numbers:
                    if self._note is not None and signum in NOTED and not noted_s:
                        noted_s = time.monotonic()  # also where the main thread has not seen it yet
                    elif self._is_repeated(signum, noted_s):
                        continue
                    elif signum in self.signals and not self._left.wait(self.stuck_s):
                        self._stuck(self.received or Interrupted(signum))
