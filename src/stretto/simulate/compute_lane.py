"""A compute lane: one piece of work at a time, at the speed that transfers leave it.

While transfers take shares of its rank's processor, it goes slower by these shares (at least 0 is left); a
lane that stands loses nothing. Knows the clock; nothing of ops or windows.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.simulate.clock import Clock

DONE_US = 1e-6
"""Work of which no more than this is left is done: what sums of times in double precision may be off by."""


class ComputeLane:
    """One rank's. `working`: whether there is work that has not ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.working = False
        self._left_us = self._since_us = 0.0
        self._speed = 1.0
        self._shares: list[float] = []
        self._version = 0
        self._then: Callable[[], None] = lambda: None

    def work(self, work_us: float, then: Callable[[], None]) -> None:
        """Work from now on; `then` is called at its end. The lane must not be working."""
        assert not self.working
        self.working, self._left_us, self._since_us, self._then = True, work_us, self._clock.now_us, then
        self._aim()

    def change_load(self, was: float, share: float) -> None:
        """A transfer that took the share `was` of the processor takes `share` from now on."""
        if was:
            self._shares.remove(was)
        if share:
            self._shares.append(share)
        now_us = self._clock.now_us
        self._left_us -= (now_us - self._since_us) * self._speed
        self._since_us = now_us
        self._speed = max(0.0, 1.0 - sum(self._shares))
        if self.working:
            self._aim()

    def _aim(self) -> None:
        """Put the end of the work into the clock; an earlier aim no longer counts."""
        self._version += 1
        version = self._version
        # Work that ends as a transfer begins has ended, whichever of the two the clock tells first.
        left_us = self._left_us if self._left_us > DONE_US else 0.0
        if not left_us or self._speed > 0:
            after_us = left_us / self._speed if left_us else 0.0
            self._clock.at(self._clock.now_us + after_us, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version == self._version and self.working:
            self.working = False
            self._then()
