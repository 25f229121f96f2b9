"""Who waits for a plan: sees how far planning is, and may end the search for a better one.

A caller that gives no `say` sees nothing, and an interrupt (KeyboardInterrupt, Ctrl-C) goes to it as any
other does. One that gives `say` is there to see it: the first interrupt ends the search, and what there is
becomes the plan; where there is nothing yet, and at the second interrupt, it goes to the caller as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stretto.files.say import Say

STILL_S = 0.5
"""Seconds between two lines of the same search. Assumed: users read no faster."""


class Watch:
    """Of one plan. stopped: whether an interrupt has ended the search; nothing is printed from then on."""

    def __init__(self, say: Say | None = None) -> None:
        self.stopped = False
        self._say = say
        self._told_s = -STILL_S

    @property
    def shown(self) -> bool:
        """Whether somebody sees progress."""
        return self._say is not None and not self.stopped

    def tell(self, line: str) -> None:
        """What has been done, or begins."""
        if self._say is not None and not self.stopped:
            self._told_s = time.monotonic()
            self._say(line)

    def still(self, line: Callable[[], str]) -> None:
        """How far something is that takes long, where the last line is old."""
        if self.shown and time.monotonic() - self._told_s >= STILL_S:
            self.tell(line())

    def stop(self, error: KeyboardInterrupt) -> None:
        """Where something is there in spite of an interrupt. Raises it where it is not for the search."""
        if not self.shown:
            raise error
        self.stopped = True
