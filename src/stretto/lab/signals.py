"""Turns Ctrl-C, SIGTERM and SIGHUP into something to read, so that nothing is ever interrupted halfway.

While a `StopSignals` is entered, these signals raise nothing: they are noted, and `fd` becomes readable.
Making and removing namespaces then always runs to its end; only waiting for commands is cut short.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Notes the stop signals that arrive. For the main thread only, as Python's handlers are."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}
        self.fd = -1
        self._write_fd = -1

    def __enter__(self) -> StopSignals:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in STOP:
            # What the caller ignores stays ignored: `nohup stretto lab run` outlives its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write_fd)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        with contextlib.suppress(BlockingIOError):  # a full pipe is readable, which is all that it is for
            os.write(self._write_fd, b"s")

    def take(self) -> list[int]:
        """The signals that have arrived since the last call; empties the pipe."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        taken, self.received = self.received, []
        return taken


@contextlib.contextmanager
def ending_by_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program as Ctrl-C does, by an exception, so that labs are removed.

    Where the caller has handlers of its own or ignores them, and outside the main thread, nothing changes.
    """
    before: dict[int, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # as shells report it

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Hold the stop signals of this thread back until the block is done, so that cleaning up is whole."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
