"""Ctrl-C and SIGTERM as one exception that ends a run cleanly, wherever it is.

Touches the process's signal handlers, in the main thread only.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The run was asked to end. `status` is the exit status by custom: 128 and the signal's number."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.status = 128 + signum
        super().__init__(signal.Signals(signum).name)


class Interrupts:
    """While it is entered, the first signal raises `Interrupted` and later ones are ignored.

    `received` stays set, because libraries turn exceptions that cross them into others of their own.
    """

    def __init__(self) -> None:
        self.received: Interrupted | None = None

    def __enter__(self) -> Interrupts:
        self._before = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = Interrupted(signum)
            raise self.received
