"""Costs: what ops, messages and collectives take; and what a simulation with them says of a plan.

Numbers with their units and their sources; `stretto.price` and `stretto.measure` find them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.ir.curve import Curve

BYTES_PER_MB = 10**6
"""The megabyte of all that is told for each of them."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a message between two ranks costs.

    latency_us: from the start of the send to the first byte usable at the receiver.
    bytes_per_us: payload rate while the message has the link for itself.
    processor_us_per_mb: processor time that each end loses to the transfer, per 10**6 bytes (a CPU
        transport copies on the cores that compute; 0 on accelerators with their own engines).
    slower: as in `CollectiveCost`.
    buffered_bytes: what the transport takes over of messages whose receives are posted, as a socket's buffer
        does: a send is done when no more than this has still to leave. 0 where it is done with its transfer.
    """

    latency_us: float
    bytes_per_us: float
    processor_us_per_mb: float = 0.0
    source: str = "assumed"
    slower: float = 0.0
    buffered_bytes: float = 0.0

    def __post_init__(self) -> None:
        _is_part(self.slower)


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What a collective of one kind takes on one communicator, when nothing else uses its links.

    curve: time by bytes of the whole tensor (see `ir.program.Collective`), from the call that starts it.
    processor_us_per_mb: processor time that every member loses, per 10**6 bytes of the whole tensor (a CPU
        transport copies and adds on the cores that compute).
    processor_us: what it loses beside that, whatever the size (threads that wake up, headers).
    slowdown: share of the compute lane's speed that is lost while it is in flight, whatever its size (an
        accelerator gives multiprocessors to it).
    pace: share of its own speed that it has while a member computes, above 0 and at most 1 (a quota that
        computing has spent stops the transport's threads as well).
    slower: the part of what members lose, 0 to 1, that no thread of the transport takes: ops are slower, for
        they find the caches changed. Those that follow a wait find them changed anyway (`Costs.cold`).
    """

    curve: Curve
    processor_us_per_mb: float = 0.0
    slowdown: float = 0.0
    source: str = "assumed"
    pace: float = 1.0
    processor_us: float = 0.0
    slower: float = 0.0

    def lost_us(self, nbytes: float) -> float:
        """Processor time that every member loses to one of `nbytes`, in microseconds."""
        return self.processor_us + self.processor_us_per_mb * nbytes / BYTES_PER_MB

    def __post_init__(self) -> None:
        if not 0.0 < self.pace <= 1.0:
            raise ValueError(f"a collective's pace is a share above 0 and at most 1, not {self.pace}")
        _is_part(self.slower)


def _is_part(slower: float) -> None:
    if not 0.0 <= slower <= 1.0:
        raise ValueError(f"what is lost to slower ops is a part of all that is, 0 to 1, not {slower}")


NO_LINK = Link(0.0, math.inf, 0.0, "no messages")
"""Of ranks that send each other nothing."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A control group's limit on a rank: in every `period_us` it may compute for `share` of it, and stands
    for the rest. Op times are those of a rank that never stands for anything else.

    speed: what it has of a processor while that lasts, from `share` to 1: other ranks may compute on the same
    cores.
    skew: like `Costs.skew`, and beside it: how much longer the slowest of the ranks that share a place takes
    than they do on average because they are stopped at different times. Of a rank that never stands for
    anything else; one that has stood is stopped less.
    """

    period_us: float
    share: float
    speed: float = 1.0
    skew: float = 0.0

    def __post_init__(self) -> None:
        if not (self.period_us > 0.0 and 0.0 < self.share < 1.0 and self.share <= self.speed <= 1.0):
            raise ValueError(
                "a quota has a period above 0, a share above 0 and below 1, and a speed from its share to 1, "
                f"not {self.period_us} us, {self.share} and {self.speed}"
            )
        if not self.skew >= 0.0:
            raise ValueError(f"a quota's skew is a share, 0 or more, not {self.skew}")

    @property
    def fastest(self) -> float:
        """How many times as fast as its op times say a rank computes while the quota lasts."""
        return self.speed / self.share


LEAST_SPELL_US = 1.0
"""A speed that holds for less is none: ops take longer."""


@dataclass(frozen=True, slots=True)
class Unsteady:
    """How a rank's speed goes up and down while it computes: what work takes has the mean that op times say.

    spread: the standard deviation of what it takes, as a share of that.
    spell_us: how long the speed stays about the same.
    common: the part of the variance that all ranks of the step have at the same time, 0 to 1: they share a
        machine. The rest is each rank's own.
    """

    spread: float
    spell_us: float
    common: float = 0.0

    def __post_init__(self) -> None:
        shares = 0.0 <= self.spread <= 1.0 and 0.0 <= self.common <= 1.0
        if not (shares and LEAST_SPELL_US <= self.spell_us < math.inf):
            raise ValueError(
                "what is unsteady has a spread and a common part from 0 to 1, and a spell of "
                f"{LEAST_SPELL_US:g} us or more, not {self.spread}, {self.common} and {self.spell_us} us"
            )

    @property
    def own_spread(self) -> float:
        """Of what is not common."""
        return self.spread * math.sqrt(1.0 - self.common)

    @property
    def common_spread(self) -> float:
        """Of what is."""
        return self.spread * math.sqrt(self.common)


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted times. op_us[(stage, op name)] on the compute lane: for the start of a communication that is
    what starting costs. links[(sender rank, receiver rank)]; `default_link` serves pairs that are not named.
    action_us is what a window costs beside its ops (launch, loop).

    collectives[(communicator, kind)]; a communicator that is not named goes by links.
    shared: axes whose collectives use one network card, as do pipeline messages, and so slow each other down
        (tensor-parallel peers on different hosts); others have links of their own.
    skew: how much longer the slowest of the ranks that share a place computes than they do on average, as a
        share: the others wait for it in their next collective.
    quota: on every rank's processor time; None without one.
    cold: how much longer ops take on a lane that has stood for all of the last time, as a share; one that has
        stood for half of it takes half of that longer (`stretto.simulate.compute_lane`).
    unsteady: ranks' speeds; None where they are steady, or nobody knows.
    op_how[(stage, op name)]: how an op's time is known, in a word, where `source` does not say it for all
        (`stretto.price.priced`).
    """

    op_us: Mapping[tuple[int, str], float] = field(repr=False)
    links: Mapping[tuple[int, int], Link]
    default_link: Link
    action_us: float
    source: str
    collectives: Mapping[tuple[str, str], CollectiveCost] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    skew: float = 0.0
    quota: Quota | None = None
    cold: float = 0.0
    unsteady: Unsteady | None = None
    op_how: Mapping[tuple[int, str], str] = field(default_factory=dict, repr=False)

    def how(self, stage: int, name: str) -> str:
        """How an op's time is known."""
        return self.op_how.get((stage, name), self.source)

    @property
    def quota_skew(self) -> float:
        """What a quota adds to `skew` where it stops ranks; 0 without one."""
        return self.quota.skew if self.quota is not None else 0.0

    @property
    def working_skew(self) -> float:
        """`skew` of ranks that never stand, what a quota adds to it included."""
        return self.skew + self.quota_skew

    def link(self, sender: int, receiver: int) -> Link:
        return self.links.get((sender, receiver), self.default_link)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulation says of the plan, in microseconds and bytes; lists are by rank.

    exposed_us: compute-lane time spent waiting for communication; bubble_us: idle for want of work.
    exposed_axis_us, comm_axis_us: axis -> by rank, exposed time and total time of its communications; their
        quotient tells what was hidden.
    bound_us: no order of this job's actions on these ranks can be faster; `binds` says why in words.
    """

    step_us: float
    compute_us: tuple[float, ...]
    exposed_us: tuple[float, ...]
    bubble_us: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    bound_us: float
    binds: str
    exposed_axis_us: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    comm_axis_us: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def hidden(self, axis: str) -> float | None:
        """Share of an axis's communication that is hidden, over all ranks; None when there is none."""
        total = sum(self.comm_axis_us.get(axis, ()))
        if not total:
            return None
        return 1.0 - sum(self.exposed_axis_us.get(axis, ())) / total

    @property
    def gap(self) -> float:
        """How far the plan is from its bound: 0.05 is five percent above it."""
        return self.step_us / self.bound_us - 1.0 if self.bound_us else 0.0
