"""The plan: everything that `verify`, `simulate` and `run` walk, for every rank.

A plan has two levels. A *window* is an ordered list of ops, receives to wait for and sends to start, for one
action (or several interleaved) of a stage and any microbatch. The last backward of a stage is a window of its
own, because a gradient's sum starts in it as soon as its last partial sum is there; what follows the last
backward is a window of its own. A rank's *order* is a list of instructions that post receives, run
windows with microbatches bound, and wait for sends, so that what repeats is written once and planning does
not grow with microbatches.

    recv e3:0        post the receive of edge 3 for microbatch 0 into a buffer of its own
    run 1B:0         run window 1B for microbatch 0
    sent e4:0        wait until the message has left; its buffer may go

Ranks start messages on a communicator in the order in which the peer posts its receives; each
communicator joins two ranks and carries one direction, so no direction can block the other.

A "rank" of a plan is a pipeline rank, a coordinate on pp. Ranks of the run that differ in other
coordinates (`Plan.mesh`) walk the same orders on other shards or other data, each with peers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from stretto.files.codec import UNWRITTEN, WHERE_SET
from stretto.ir.action import ONCE_PHASES, Phase, Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.compared import beside_bound
from stretto.ir.costs import Costs, Prediction
from stretto.ir.mesh import Mesh
from stretto.ir.program import Job, Op, OverlapMode
from stretto.ir.shown import Shown
from stretto.ir.work import Work, speed_words, work_of

VERSION = 22
"""Of the plan file; files of other versions are refused."""

BYTE_UNITS = ((2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
"""Units of a printed plan's memory, of which the fullest rank has 10 or more."""


class ItemKind(StrEnum):
    """What an item of a window is."""

    OP = "op"
    WAIT = "wait"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class Item:
    """One position of a window: an op by name, the wait for a received edge, or the start of a send.

    part: which of the window's parts the item belongs to; ref: the op's name, or the edge's index.
    """

    kind: ItemKind
    part: int
    ref: str | int

    def __str__(self) -> str:
        ref = self.ref if isinstance(self.ref, str) else f"e{self.ref}"
        text = str(ref) if self.kind is ItemKind.OP else f"{self.kind} {ref}"
        return text if self.part == 0 else f"#{self.part} {text}"

    @staticmethod
    def parse(text: str) -> Item:
        part = 0
        rest = text
        if text.startswith("#"):
            head, _, rest = text.partition(" ")
            part = int(head[1:])
        kind, _, ref = rest.partition(" ")
        if ref:
            return Item(ItemKind(kind), part, int(ref.removeprefix("e")))
        return Item(ItemKind.OP, part, rest)


def shares_of(places: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """`Window.shares` of parts of these stages and microbatches."""
    known = list(places)
    result = tuple(known.index(place) for place in known)
    return () if result == tuple(range(len(known))) else result


@dataclass(frozen=True, slots=True)
class Window:
    """The order of ops of some actions. `parts[k]` = (stage, phase); the microbatch is bound when run. A part
    of a program that runs once a step has those of its ops that run in this window, with microbatch `ONCE`.

    shares: for each part, the first part of its stage that is bound to the same microbatch (itself, where
        none is before it): B may read what F has saved in the same window. () when all are bound apart.
    """

    name: str
    parts: tuple[tuple[int, Phase], ...]
    items: tuple[Item, ...] = field(repr=False)
    shares: tuple[int, ...] = ()

    @property
    def actions(self) -> tuple[int, ...]:
        """The parts that are actions of the schedule; none for a window of what runs once a step."""
        return tuple(k for k, (_, phase) in enumerate(self.parts) if phase not in ONCE_PHASES)

    def mates(self, part: int) -> tuple[int, ...]:
        """The other parts of a part's stage and microbatch."""
        if not self.shares:
            return ()
        return tuple(k for k, first in enumerate(self.shares) if first == self.shares[part] and k != part)

    def bound(self, microbatches: Sequence[int]) -> tuple[int, ...]:
        """What `shares` has to be for a run with these microbatches."""
        return shares_of((stage, m) for (stage, _), m in zip(self.parts, microbatches, strict=True))


class InstructionKind(StrEnum):
    """What a rank's instruction does; see this module's table."""

    RECV = "recv"
    RUN = "run"
    SENT = "sent"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a rank. ref: edge (recv, sent), window (run)."""

    kind: InstructionKind
    ref: str | int
    microbatches: tuple[int, ...]

    def __str__(self) -> str:
        ref = self.ref if self.kind is InstructionKind.RUN else f"e{self.ref}"
        return f"{self.kind} {ref}:{','.join(map(str, self.microbatches))}"

    @staticmethod
    def parse(text: str) -> Instruction:
        word, _, rest = text.partition(" ")
        kind = InstructionKind(word)
        ref, _, tail = rest.rpartition(":")
        microbatches = tuple(int(m) for m in tail.split(","))
        return Instruction(
            kind, ref if kind is InstructionKind.RUN else int(ref.removeprefix("e")), microbatches
        )


LOSS, NORM = "loss", "norm"
"""The communicators of the step's loss, and of pipeline ranks' parts of the norm of gradients."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """A lane, and a process group for each set of ranks that use it together.

    `name` is free of any process: `pp 0>1` carries rank 0's messages to rank 1, `loss` the step's loss,
    `norm` that of gradients, `tied <name>` a tied gradient, `tp` the collectives of that axis.
    ranks: coordinates of the members on the first of `axes`; on the other axes all are members, and on axes
        that are not named members share theirs (`Mesh.group`).
    """

    name: str
    ranks: tuple[int, ...]
    axes: tuple[str, ...] = (PIPELINE,)

    @property
    def joins_pp_ranks(self) -> bool:
        """Whether pipeline ranks are its members; else ranks of one pipeline rank are."""
        return self.axes[0] == PIPELINE


_writers: list[Callable[[Plan, Path], None]] = []


def written_by(write: Callable[[Plan, Path], None]) -> None:
    """Say how plans are written to a file. `stretto.ir.serialize` does, which reads this module."""
    _writers[:] = [write]


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Shown):
    """Schedule, windows, orders, communicators, costs and prediction: what all three executors walk.

    overlap: what hides communication in this plan; overlap_why: in words, when that is less than the job
        wishes, or "". schedule_why: in words, what "auto" has chosen the schedule from, or "". zero_why: in
        words, how long of sharded state what is full stays so, and what else was tried, or "".
    edited: whether it was read from a file whose job was edited after it was written.
    """

    job: Job
    schedule: Schedule
    windows: Mapping[str, Window]
    orders: tuple[tuple[Instruction, ...], ...] = field(repr=False)
    communicators: tuple[Communicator, ...]
    costs: Costs
    prediction: Prediction | None = None
    overlap: OverlapMode = "local"
    overlap_why: str = ""
    schedule_why: str = ""
    zero_why: str = field(default="", metadata=WHERE_SET)
    edited: bool = field(default=False, metadata=UNWRITTEN)

    @property
    def ranks(self) -> int:
        """Pipeline ranks; `world` counts the ranks of a run."""
        return len(self.orders)

    @property
    def mesh(self) -> Mesh:
        """How the ranks of a run are laid out."""
        return self.job.mesh(self.ranks)

    def everyone(self, name: str) -> Communicator:
        """A communicator of all ranks."""
        return Communicator(name, tuple(range(self.ranks)), tuple(axis for axis, _ in self.mesh.sizes))

    @property
    def world(self) -> int:
        """Ranks of a run of this plan."""
        return self.mesh.world

    @property
    def members(self) -> int:
        """Ranks of one pipeline rank."""
        return self.world // self.ranks

    @property
    def where(self) -> str:
        """On what it runs, in words: `2 ranks`, or `2 pipeline ranks of dp=2 tp=2 (8 ranks)`."""
        ranks = f"{self.world} rank{'s' if self.world > 1 else ''}"
        if self.members == 1:
            return ranks
        each = " ".join(f"{axis}={size}" for axis, size in self.job.axes)
        return f"{self.ranks} pipeline rank{'s' if self.ranks > 1 else ''} of {each} ({ranks})"

    @property
    def counted(self) -> str:
        """What its lists by rank count, in a word: `pipeline rank`, where one is of several ranks."""
        return "rank" if self.members == 1 else "pipeline rank"

    def runs(self, rank: int) -> Iterator[tuple[int, Instruction, Window]]:
        """The rank's runs of actions, one a slot of the schedule, with their places in its order."""
        for at, instruction in enumerate(self.orders[rank]):
            if instruction.kind is InstructionKind.RUN and self.windows[str(instruction.ref)].actions:
                yield at, instruction, self.windows[str(instruction.ref)]

    def once(self, rank: int, *phases: Phase) -> tuple[Op, ...]:
        """The ops that the rank runs once a step, in the order of programs: of all these, or of some."""
        stages = self.schedule.stages_of(rank)
        programs = self.job.stages[stages[0]].ops if stages else {}
        return tuple(op for phase in phases or ONCE_PHASES for op in programs.get(phase, ()))

    def communicator(self, name: str) -> Communicator:
        """The communicator of that name. Raises KeyError."""
        return {communicator.name: communicator for communicator in self.communicators}[name]

    def rank_of(self, stage: int) -> int:
        return self.schedule.stage_ranks[stage]

    def lane_of(self, edge_index: int) -> str:
        """The communicator that carries an edge's messages."""
        edge = self.job.edges[edge_index]
        return f"pp {self.rank_of(edge.source)}>{self.rank_of(edge.target)}"

    @property
    def again_us(self) -> tuple[float, ...]:
        """By rank: time of a step's ops that compute again what the forward made."""
        result = [0.0] * self.ranks
        for stage, op in self.job.all_ops:
            if op.repeats:
                # A view or a wait costs nothing, and need not be named.
                us = self.costs.op_us.get((stage, op.name), 0.0)
                result[self.rank_of(stage)] += us * self.job.microbatches
        return tuple(result)

    def _recompute(self) -> str:
        """What was asked for, and what it costs."""
        asked = self.job.recompute
        wish = asked if isinstance(asked, str) else f"to keep at most {asked:,} bytes"
        if not any(self.again_us):
            return f"{wish}: nothing needs to be computed again"
        times = ", ".join(f"{us / 1000:.1f}" for us in self.again_us)
        return f"{wish}: {times} ms of the compute by {self.counted}"

    def save(self, path: str | Path) -> None:
        """Write the plan file: readable, versioned; equal plans give equal bytes. Raises StrettoError."""
        (write,) = _writers
        write(self, Path(path))

    @property
    def work(self) -> Work:
        """How much a rank computes in a step, and of which peak."""
        return work_of(self.job, self.ranks, self.costs.peak)

    @property
    def line(self) -> str:
        """Its schedule, where it runs and how long a step takes, as `repr` has them."""
        step = (
            "not simulated" if self.prediction is None else f"{self.prediction.step_us / 1000:.1f} ms a step"
        )
        return f"{self._runs}, {step}"

    @property
    def _runs(self) -> str:
        return (
            f"{self.job.name}: {self.schedule.family}, {len(self.job.stages)} stages on {self.where}, "
            f"{self.job.microbatches} microbatches"
        )

    def __str__(self) -> str:
        head = f"{self._runs} (costs {self.costs.source})"
        result = self.prediction
        if result is None:
            return f"{head}\nnot simulated"

        def ms(values: tuple[float, ...]) -> str:
            return ", ".join(f"{us / 1000:.1f}" for us in values)

        fullest, parts = result.fullest()
        most = max(result.peak_bytes)
        size, unit = next(one for one in BYTE_UNITS if most >= 10 * one[0] or one[0] == 1)
        each = ", ".join(f"{part} {nbytes / size:.0f}" for part, nbytes in parts.items())
        peaks = ", ".join(f"{nbytes / size:.0f}" for nbytes in result.peak_bytes)
        axes = {axis: us for axis, us in result.exposed_axis_us.items() if sum(us) or result.hidden(axis)}
        exposed = [f"{ms(of_axis)} ms ({axis})" for axis, of_axis in axes.items()]
        shares = [(axis, result.hidden(axis)) for axis in result.comm_axis_us]
        hidden = ", ".join(f"{100 * share:.1f} % of {axis}" for axis, share in shares if share is not None)
        rows = [
            ("schedule", f"{self.schedule.family}: {self.schedule_why}" if self.schedule_why else ""),
            ("predicted step", f"{result.step_us / 1000:.1f} ms"),
            ("speed", speed_words(self.job, self.work, self.world, result.step_us)),
            (f"compute by {self.counted}", f"{ms(result.compute_us)} ms"),
            ("recompute", self._recompute() if self.job.recompute != "none" else ""),
            *((f"exposed by {self.counted}", text) for text in exposed or [f"{ms(result.exposed_us)} ms"]),
            ("hidden", hidden or "nothing is communicated"),
            ("zero", f"{self.job.zero}: {self.zero_why}" if self.zero_why else ""),
            ("overlap", self.overlap + (f": {self.overlap_why}" if self.overlap_why else "")),
            (f"bubble by {self.counted}", f"{ms(result.bubble_us)} ms"),
            (f"peak by {self.counted}", f"{peaks} {unit}"),
            (f"of rank {fullest}", f"{each} {unit} (optimizer: {self.job.optimizer})" if parts else ""),
            ("lower bound", f"{result.bound_us / 1000:.1f} ms: {result.binds}"),
            ("gap", beside_bound(result.step_us, result.bound_us)),
        ]
        return "\n".join((head, *(f"  {name:16} {text}" for name, text in rows if text)))
