"""Pauses in a round of ops, as long as a step's waits; and what the ops of such a round take.

On a processor what follows a wait takes longer: others have used the caches meanwhile, or its clock has gone
down. Ops are counted in time of the computing thread, because under a quota a rank that stood computes
faster by the clock. Touches nothing but clocks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from stretto.measure.core_share import part_of

PAUSE = 1.0
"""Length of a pause, as a multiple of the time since the one before. Assumed: as in a step that hides nothing
where communication takes as long as compute. A pause as long as its step's would be, 21 ms instead of 12,
made products of a GPT of hidden 1024 slower by 14 % where all-reduces that were waited for did so by 14, and
21 ms of spinning by 11."""

TOGETHER_US = 10_000.0
"""Where ranks share a core. Assumed: more than two turns of 4 ms, by which ranks with equal work come
apart."""


@dataclass(frozen=True, slots=True)
class Paused:
    """A round with pauses. us: what its ops took of the computing thread; stood: the share of its time that
    the pauses were."""

    us: float
    stood: float


class Pauses:
    """Of one round, from now on. together_us: pauses end at multiples of so much of the machine's clock, so
    that ranks with equal work on one core compute together and leave it idle together, as in a step; 0 for
    each in its own time."""

    def __init__(self, together_us: float = 0.0) -> None:
        self._together_ns = round(together_us * 1e3)
        self._paused_ns = self._awake_ns = self._computed_ns = 0
        self._woke_ns, self._woke_thread_ns = time.perf_counter_ns(), time.thread_time_ns()

    def pause(self) -> None:
        """Do nothing, for `PAUSE` of the time since the last call."""
        self._computed_ns += time.thread_time_ns() - self._woke_thread_ns
        begin_ns = time.perf_counter_ns()
        awake_ns = begin_ns - self._woke_ns
        end_ns = begin_ns + round(PAUSE * awake_ns)
        if self._together_ns:
            end_ns = -(-end_ns // self._together_ns) * self._together_ns
        time.sleep(max(0, end_ns - time.perf_counter_ns()) / 1e9)
        self._awake_ns += awake_ns
        self._woke_ns, self._woke_thread_ns = time.perf_counter_ns(), time.thread_time_ns()
        self._paused_ns += self._woke_ns - begin_ns

    @property
    def part(self) -> float:
        """Of a processor that the thread had between pauses."""
        return part_of(self._computed_ns, self._awake_ns)

    def end(self) -> Paused:
        """The round ended with the last pause."""
        return Paused(self._computed_ns / 1000.0, self._paused_ns / max(1, self._paused_ns + self._awake_ns))
