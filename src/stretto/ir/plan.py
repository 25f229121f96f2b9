"""The plan: everything that `verify`, `simulate` and `run` walk, for every rank.

A plan has two levels. A *window* is an ordered list of ops, receives to wait for and sends to start, for
one action (or several interleaved) of a stage and any microbatch. A rank's *order* is a list of
instructions that post receives, run windows with microbatches bound, and wait for sends, so that what
repeats is written once and planning does not grow with microbatches.

    recv e3:0        post the receive of edge 3 for microbatch 0 into a buffer of its own
    run 1B:0         run window 1B for microbatch 0
    sent e4:0        wait until the message has left; its buffer may go
    loss             the rank that has the loss starts to tell it to all, the others start to hear it
    heard            wait for the loss
    reduce <name>    start to sum a tied parameter's gradient of this step over the ranks that hold it
    reduced <name>   wait for that sum

Ranks start messages on a communicator in the order in which the peer posts its receives; each
communicator joins two ranks and carries one direction, so no direction can block the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from stretto.ir.action import Phase, Schedule
from stretto.ir.program import Job

VERSION = 1


class ItemKind(StrEnum):
    """What an item of a window is."""

    OP = "op"
    WAIT = "wait"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class Item:
    """One place of a window: an op by name, the wait for a received edge, or the start of a send.

    part: which of the window's parts the item belongs to; ref: the op's name, or the edge's index.
    """

    kind: ItemKind
    part: int
    ref: str | int

    def __str__(self) -> str:
        text = str(self.ref) if self.kind is ItemKind.OP else f"{self.kind} e{self.ref}"
        return text if self.part == 0 else f"#{self.part} {text}"

    @staticmethod
    def parse(text: str) -> Item:
        part = 0
        rest = text
        if text.startswith("#"):
            head, _, rest = text.partition(" ")
            part = int(head[1:])
        kind, _, edge = rest.partition(" ")
        if edge:
            return Item(ItemKind(kind), part, int(edge.removeprefix("e")))
        return Item(ItemKind.OP, part, rest)


@dataclass(frozen=True, slots=True)
class Window:
    """The order of ops of some actions. `parts[k]` = (stage, phase); the microbatch is bound when run."""

    name: str
    parts: tuple[tuple[int, Phase], ...]
    items: tuple[Item, ...] = field(repr=False)


class InstructionKind(StrEnum):
    """What a rank's instruction does; see this module's table."""

    RECV = "recv"
    RUN = "run"
    SENT = "sent"
    LOSS = "loss"
    HEARD = "heard"
    REDUCE = "reduce"
    REDUCED = "reduced"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a rank. ref: edge (recv, sent), window (run), tied name (reduce, reduced)."""

    kind: InstructionKind
    ref: str | int = ""
    microbatches: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind in (InstructionKind.LOSS, InstructionKind.HEARD):
            return self.kind.value
        if self.kind in (InstructionKind.REDUCE, InstructionKind.REDUCED):
            return f"{self.kind} {self.ref}"
        ref = self.ref if self.kind is InstructionKind.RUN else f"e{self.ref}"
        return f"{self.kind} {ref}:{','.join(map(str, self.microbatches))}"

    @staticmethod
    def parse(text: str) -> Instruction:
        word, _, rest = text.partition(" ")
        kind = InstructionKind(word)
        if kind in (InstructionKind.LOSS, InstructionKind.HEARD):
            return Instruction(kind)
        if kind in (InstructionKind.REDUCE, InstructionKind.REDUCED):
            return Instruction(kind, rest)
        ref, _, tail = rest.rpartition(":")
        microbatches = tuple(int(m) for m in tail.split(","))
        return Instruction(
            kind, ref if kind is InstructionKind.RUN else int(ref.removeprefix("e")), microbatches
        )


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group with one lane. `name` is free of any process: `pp 0>1` carries rank 0's messages
    to rank 1, `loss` the step's loss, `tied <name>` a tied gradient."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """What a message between two ranks costs.

    latency_us: from the start of the send to the first byte usable at the receiver.
    bytes_per_us: payload rate while the message has the link for itself.
    processor_us_per_mb: processor time that each end loses to the transfer, per 10**6 bytes (a CPU
        transport copies on the cores that compute; 0 on accelerators with their own engines).
    """

    latency_us: float
    bytes_per_us: float
    processor_us_per_mb: float = 0.0
    source: str = "assumed"


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted times. op_us[(stage, op name)]; links[(sender rank, receiver rank)]; `default_link`
    serves pairs that are not named. action_us is what a window costs beside its ops (launch, loop)."""

    op_us: Mapping[tuple[int, str], float] = field(repr=False)
    links: Mapping[tuple[int, int], Link]
    default_link: Link
    action_us: float
    source: str

    def link(self, sender: int, receiver: int) -> Link:
        return self.links.get((sender, receiver), self.default_link)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulation says of the plan, in microseconds and bytes; lists are by rank.

    exposed_us: compute-lane time spent waiting for messages; bubble_us: idle for want of work.
    bound_us: no order of this job's actions on these ranks can be faster; `binds` says why in words.
    """

    step_us: float
    compute_us: tuple[float, ...]
    exposed_us: tuple[float, ...]
    bubble_us: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    bound_us: float
    binds: str

    @property
    def gap(self) -> float:
        """How far the plan is from its bound: 0.05 is five percent above it."""
        return self.step_us / self.bound_us - 1.0 if self.bound_us else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Schedule, windows, orders, communicators, costs and prediction: what all three executors walk."""

    job: Job
    schedule: Schedule
    windows: Mapping[str, Window]
    orders: tuple[tuple[Instruction, ...], ...] = field(repr=False)
    communicators: tuple[Communicator, ...]
    costs: Costs
    prediction: Prediction | None = None

    @property
    def ranks(self) -> int:
        return len(self.orders)

    def rank_of(self, stage: int) -> int:
        return self.schedule.stage_ranks[stage]

    def lane_of(self, edge_index: int) -> str:
        """The communicator that carries an edge's messages."""
        edge = self.job.edges[edge_index]
        return f"pp {self.rank_of(edge.source)}>{self.rank_of(edge.target)}"

    def save(self, path: str | Path) -> None:
        """Write the plan file: readable, versioned; equal plans give equal bytes. Raises StrettoError."""
        from stretto.ir.serialize import save_plan  # here, because the file's text form reads this module

        save_plan(self, Path(path))

    def __str__(self) -> str:
        head = (
            f"{self.job.name}: {self.schedule.family}, {len(self.job.stages)} stages on {self.ranks} ranks, "
            f"{self.job.microbatches} microbatches (costs {self.costs.source})"
        )
        found = self.prediction
        if found is None:
            return f"{head}\nnot simulated"

        def ms(values: tuple[float, ...]) -> str:
            return ", ".join(f"{us / 1000:.1f}" for us in values)

        return "\n".join(
            (
                head,
                f"  predicted step   {found.step_us / 1000:.1f} ms",
                f"  compute by rank  {ms(found.compute_us)} ms",
                f"  exposed by rank  {ms(found.exposed_us)} ms (pp)",
                f"  bubble by rank   {ms(found.bubble_us)} ms",
                f"  peak by rank     {', '.join(f'{b / 2**20:.0f}' for b in found.peak_bytes)} MiB",
                f"  lower bound      {found.bound_us / 1000:.1f} ms: {found.binds}",
                f"  gap              {100 * found.gap:.1f} %",
            )
        )
