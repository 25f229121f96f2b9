"""Ctrl-C, SIGTERM and SIGHUP, so that nothing is ever interrupted halfway.

While a `StopSignals` is entered, these signals raise nothing: they are noted. Making and removing namespaces
then always runs to its end; only waiting for commands is cut short.
"""

from __future__ import annotations

import contextlib
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

    def __enter__(self) -> StopSignals:
        for number in STOP:
            # What the caller ignores stays ignored: `nohup stretto lab run` outlives its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda got, _: self.received.append(got))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


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
