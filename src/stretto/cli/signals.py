"""SIGTERM and a lost terminal (SIGHUP) end a command as Ctrl-C does: by KeyboardInterrupt, wherever it is.

What takes the best so far at Ctrl-C, writes what it has, or cleans up, then does so for all three. Touches
the process's signal handlers, in the main thread only.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from stretto.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stops:
    """While it is entered, each of these signals raises KeyboardInterrupt. received: their numbers, in order:
    who is interrupted may take that for the end of a search, and say nothing.

    What the caller ignores stays ignored: `nohup stretto plan` outlives its terminal.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def status(self) -> int:
        """The exit status by custom: 128 and the number of the signal that came first."""
        return 128 + self.received[0] if self.received else StoppedError.exit_status

    def ignore(self) -> None:
        """From here on there is little left to do."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        raise KeyboardInterrupt
