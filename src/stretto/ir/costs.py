"""Costs: what ops, messages and collectives take; and what a simulation with them says of a plan.

Numbers with their units and their sources; `stretto.price` and `stretto.measure` find them. The section on
processors that others share is absent on accelerators; `stretto.processor` says what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from stretto.files.codec import Amount, Fits, Share
from stretto.ir.curve import Curve


@dataclass(frozen=True, slots=True)
class Processor:
    """A control group's quota on each rank: in every `period_us` a rank may compute for `share` of it, and is
    stopped for the rest. Op times are those of a rank that never waits for anything else.

    speed: what it has of a processor while that lasts, from `share` to 1: other ranks may compute on the same
        cores.
    skew: like `Costs.skew`, and besides it: how much longer the slowest of the ranks that share a pipeline
        rank takes than they do on average because they are stopped at different times. Of ranks that never
        wait; one that has waited is stopped less.
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


BYTES_PER_MB = 10**6
"""The megabyte of all that is reported for each of them."""

LEAST_RATE = 1e-6
"""Bytes a microsecond. A link that is slower is none, and what it takes is no finite time."""

Rate = Annotated[
    float, Fits(lambda rate: rate >= LEAST_RATE, f"a rate of at least {LEAST_RATE} bytes a microsecond")
]


Speed = Annotated[float, Fits(lambda rate: rate > 0, "a rate above 0")]


@dataclass(frozen=True, slots=True)
class Link:
    """What a message between two ranks costs: latency, gap, gap a byte and overhead of LogGP.

    Source of the model: Alexandrov et al., "LogGP: incorporating long messages into the LogP model" (1995).

    latency_us: from the start of the transfer to the first byte usable at the receiver; keeps no link busy.
    bytes_per_us: payload rate while the message has the link for itself.
    processor_us_per_mb: processor time that each end loses to the transfer, per 10**6 bytes (a CPU
        transport copies on the cores that compute; 0 on accelerators with their own engines).
    start_us: how long a message keeps its link before its bytes, however few (a kernel's start, headers);
        the next one on the link begins after it.
    processor_us: what each end loses whatever the size (calls, threads that wake up).
    """

    latency_us: Amount
    bytes_per_us: Rate
    processor_us_per_mb: Amount = 0.0
    source: str = "assumed"
    start_us: Amount = 0.0
    processor_us: Amount = 0.0


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What a collective of one kind takes on one communicator, when nothing else uses its links.

    curve: time by bytes of the full tensor (see `ir.program.Collective`), from the call that starts it.
    processor_us_per_mb: processor time that every member loses, per 10**6 bytes of the full tensor (a CPU
        transport copies and adds on the cores that compute).
    processor_us: what it loses besides that, whatever the size (threads that wake up, headers).
    slowdown: share of the compute lane's speed that is lost while it is in flight, whatever its size (an
        accelerator gives multiprocessors to it).
    """

    curve: Curve
    processor_us_per_mb: Amount = 0.0
    slowdown: Share = 0.0
    source: str = "assumed"
    processor_us: Amount = 0.0

    def lost_us(self, nbytes: float) -> float:
        """Processor time that every member loses to one of `nbytes`, in microseconds."""
        return self.processor_us + self.processor_us_per_mb * nbytes / BYTES_PER_MB


NO_LINK = Link(0.0, math.inf, 0.0, "no messages")
"""Of ranks that send each other nothing."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a device computes of a job's arithmetic, in FLOP a microsecond. source: of that rate."""

    flops_per_us: Speed
    source: str


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted times. op_us[(stage, op name)] on the compute lane: for the start of a communication that is
    what starting costs. links[(sender rank, receiver rank)]; `default_link` serves pairs that are not named.
    action_us is what a window costs besides its ops (launch, loop).

    collectives[(axis, kind)], of axes other than pp.
    shared: axes whose collectives use one network card, as do pipeline messages, and so slow each other down
        (tensor-parallel peers on different hosts); others have links of their own.
    skew: how much longer the slowest of the ranks that share a pipeline rank computes than they do on
    average, as a
        share: the others wait for it in their next collective.
    processor: what only processors do that others share (`Processor`); None on accelerators.
    op_how[(stage, op name)]: how an op's time is known, in a word, where `source` does not say it for all
        (`stretto.price.priced`).
    peak: of one device; None where no sheet says, as of processors. Predictions do not use it.
    """

    op_us: Mapping[tuple[int, str], Amount] = field(repr=False)
    links: Mapping[tuple[int, int], Link]
    default_link: Link
    action_us: Amount
    source: str
    collectives: Mapping[tuple[str, str], CollectiveCost] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    skew: Amount = 0.0
    processor: Processor | None = None
    op_how: Mapping[tuple[int, str], str] = field(default_factory=dict, repr=False)
    peak: Peak | None = None

    def how(self, stage: int, name: str) -> str:
        """How an op's time is known."""
        return self.op_how.get((stage, name), self.source)

    def link(self, sender: int, receiver: int) -> Link:
        return self.links.get((sender, receiver), self.default_link)


MEMORY_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer's state",
    "activations": "activations",
}
"""Of what a rank's memory consists, in words: parameters with buffers, activations with all else."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulation says of the plan, in microseconds and bytes; lists are by rank.

    exposed_us: compute-lane time spent waiting for communication; bubble_us: idle for want of work.
    exposed_axis_us, comm_axis_us: axis -> by rank, exposed time and total time of its communications; their
        quotient shows what was hidden.
    peak_bytes: with the optimizer's state (`Job.optimizer`). memory: of what they consist (`MEMORY_PARTS`) ->
        by rank.
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
    memory: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def fullest(self) -> tuple[int, dict[str, int]]:
        """The rank that has most, and of what its peak consists, by words."""
        rank = max(range(len(self.peak_bytes)), key=self.peak_bytes.__getitem__, default=0)
        known = {part: word for part, word in MEMORY_PARTS.items() if part in self.memory}
        return rank, {word: self.memory[part][rank] for part, word in known.items()}

    def hidden(self, axis: str) -> float | None:
        """Share of an axis's communication that is hidden, over all ranks; None when there is none."""
        total = sum(self.comm_axis_us.get(axis, ()))
        if not total:
            return None
        return 1.0 - sum(self.exposed_axis_us.get(axis, ())) / total
