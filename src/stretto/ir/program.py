"""Ops and programs: the captured training step as plain data, free of any device, process or framework.

Values are in single assignment: a name is defined once in the full step, so the same name means the same
value in every stage. Names of things that no op defines carry a prefix:

    param/<name>     a parameter of the model, as ops read it
    shard/<name>     what a rank keeps of a tied group, where that is something else: some rows of the
                     parameter, or another dtype (`Parameter.is_made`)
    grad/<name>      the gradient of a parameter, as this rank has it so far; of tied ones each has its own
    step/loss        this rank's share of the step's loss; zero where it makes none
    step/norm        the norm of all gradients, where they are clipped
    buffer/<name>    a buffer of the model, as it is when the microbatch begins
    batch/<leaf>     a leaf of the microbatch
    const/<name>     a small constant tensor found in the model's code
    tangent          d(step's loss) / d(this microbatch's loss): 1 / (microbatches * dp) where it is a mean,
                     1 / (the step's count) where it is a sum

An op is one call of the framework's dispatcher, or one of these, which communicate or give the rank's
coordinate on an axis of the mesh (`axis` and its `size` are the last arguments of each):

    comm.all_reduce(x, "sum" | "max", axis, size)        start; of the shape of x
    comm.all_gather(x, axis, size)                       start; gathered along dim 0
    comm.reduce_scatter(x, "sum", axis, size)            start; scattered along dim 0
    comm.all_to_all(x, axis, size)                       start; equal part k of dim 0 goes to rank k
    comm.permute_next(x, axis, size)                     start; all of x goes to the next rank of the axis
    comm.permute_previous(x, axis, size)                 start; the same to the previous rank
    comm.wait(started)                                   the result, when it is there
    axis.index(axis, size)                               this rank's coordinate, a 0-d int64 tensor
    axis.chunk(x, dim, axis, size)                       this rank's part of x along a dim, a view
    state.free()                                         what it `writes` is there no longer
    state.update(...), state.squares(...)                an optimizer's step (`stretto.ir.updates`)

Some programs run once a step (`stretto.ir.action.ONCE_PHASES`): UNSHARD, which makes what ops read of
parameters, and REDUCE_GRAD, which reduces gradients and updates parameters where that is part of the step.
Their ops read what lives over the step (`param/`, `grad/`, `step/`), and those that name it in `writes`
change it: it is then what the op makes. The lane of their communications is an axis, the communicator of the
ranks that have a tied parameter, or that of the loss or the norm.

A communication is always a start and a wait, so that an order of ops can put work between them; it runs
on the lane of its axis. Shapes are those of one rank. Text forms are short and readable, because plans are
read by users: `["mm_3", "aten.mm.default", ["%view_8", "%t_3"], {}, "float32[16,32]"]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from stretto.errors import UsageError
from stretto.files.codec import UNWRITTEN, WHERE_SET, Fits, Keyword, Natural
from stretto.ir.action import Phase, Schedule
from stretto.ir.arguments import Arg as Arg
from stretto.ir.arguments import Const as Const
from stretto.ir.arguments import Ref as Ref
from stretto.ir.arguments import refs as refs
from stretto.ir.axes import BY_NAME, PIPELINE, OtherAxis, Sums, sums_of
from stretto.ir.collectives import BY_TARGET, Collective, Kind
from stretto.ir.mesh import Mesh
from stretto.ir.metrics import Metric
from stretto.ir.parameters import DTYPE_BYTES as DTYPE_BYTES
from stretto.ir.parameters import Buffer as Buffer
from stretto.ir.parameters import Constant as Constant
from stretto.ir.parameters import OptimizerKind as OptimizerKind
from stretto.ir.parameters import Parameter as Parameter
from stretto.ir.parameters import Shard as Shard
from stretto.ir.parameters import TensorSpec as TensorSpec
from stretto.ir.parameters import Zero as Zero
from stretto.ir.recipe import PlannedJob, Recipe, Watched
from stretto.ir.shown import Shown

STARTS = tuple(BY_TARGET)
"""Targets that start a communication (`stretto.ir.collectives`)."""

WAIT = "comm.wait"
GETITEM = "getitem"
"""The target that takes one result of an op with several."""

FREE = "state.free"
"""The target that frees what it `writes`, and makes nothing."""

INDEX = "axis.index"
CHUNK = "axis.chunk"

PARAM = "param/"
SHARD = "shard/"
GRAD = "grad/"
STEP_LOSS, STEP_NORM = "step/loss", "step/norm"

VIEW = "aten.view.default"
VIEWS = (VIEW, "aten._unsafe_view.default")
"""Targets that give the same elements in the same order another shape, without a copy."""


Flops = Annotated[int, Fits(lambda count: 0 <= count <= 10**30, "a count from 0 to 1e+30")]
"""No op has more: a year of a million devices of 10**16 flops a second is less."""


@dataclass(frozen=True, slots=True)
class Op:
    """One call: `name = target(*args, **kwargs)`.

    outputs: one spec for a single tensor; a tuple's specs in order for an op that returns several, of
        which `getitem` ops take the parts (None for a part that is no tensor).
    alias: the value whose storage the result shares (a view), or None when the op allocates.
    random: the op draws from the generator; its draw depends on (seed, step, microbatch, name) alone.
    repeats: the op of F that this one computes again for the backward; it draws the same numbers.
    flops: floating-point operations, 0 for ops that only move memory.
    module: the module whose code made the op; for users, and for splitting.
    writes: what the op changes besides (`grad/a`), of all that lives over the step: it becomes the op's
        result. An op that makes nothing may change several things, where they are. A collective that has an
        `alias` works in place, on the memory of that.
    """

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[Keyword, Arg], ...] = ()
    outputs: tuple[TensorSpec | None, ...] = ()
    alias: str | None = None
    random: bool = False
    flops: Flops = 0
    module: str = ""
    repeats: str = ""
    writes: tuple[str, ...] = ()
    _uses: tuple[str, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of the values that the op reads, each once, in order of first use."""
        if self._uses is None:  # every pass asks, several times
            names: dict[str, None] = dict.fromkeys(refs(self.args))
            names.update(dict.fromkeys(refs(tuple(value for _, value in self.kwargs))))
            object.__setattr__(self, "_uses", tuple(names))
        return self._uses or ()

    @property
    def collective(self) -> Collective | None:
        """The communication that the op starts, or None."""
        kind = self.kind
        if kind is None:
            return None
        axis, size = str(self.args[-2]), int(self.args[-1])
        return Collective(kind.cost, axis, kind.full_nbytes(self.made.nbytes, size))

    @property
    def kind(self) -> Kind | None:
        """The kind of communication that the op starts, or None."""
        return BY_TARGET.get(self.target)

    @property
    def how(self) -> str:
        """The reduction of the communication that it starts, or ""."""
        return str(self.args[1]) if self.kind is not None and self.kind.reductions else ""

    @property
    def lane(self) -> str:
        """Where the op takes time: a start on the lane of its axis, all else on the compute lane."""
        return str(self.args[-2]) if self.target in STARTS else "compute"

    @property
    def label(self) -> str:
        """What timelines call the communication that the op starts; begins with the axis. Where a program
        runs once a step, the op's name does."""
        axis, dot, rest = self.name.partition(".")
        if dot and axis in BY_NAME:
            return f"{axis} {rest}"
        assert self.collective is not None
        return f"{self.lane} {self.collective.kind} {self.name}"

    @property
    def spec(self) -> TensorSpec | None:
        """Of a result that is one tensor."""
        return self.outputs[0] if len(self.outputs) == 1 else None

    @property
    def written(self) -> Iterator[tuple[str, TensorSpec]]:
        """What becomes the op's result, with the shape that it has then."""
        for name, spec in zip(self.writes, self.outputs, strict=False):
            if spec is not None:
                yield name, spec

    @property
    def made(self) -> TensorSpec:
        """Of the first result of an op that makes tensors."""
        (first, *_) = self.outputs
        assert first is not None
        return first

    @property
    def nbytes(self) -> int:
        """Bytes that the result owns: 0 for a view, and for a tuple, whose `getitem` parts own theirs."""
        return 0 if self.alias is not None or self.spec is None else self.spec.nbytes


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage's ops by phase: F forward, I input gradient, W weight gradient; each in order. In a plan, the
    first stage of each pipeline rank has the programs as well that run once a step there.

    Which values are received, sent and saved follows from the names alone; `stretto.ir.flow` says.
    """

    index: int
    ops: Mapping[Phase, tuple[Op, ...]]

    @property
    def all_ops(self) -> Iterator[Op]:
        """Those of all its programs."""
        return (op for ops in self.ops.values() for op in ops)


@dataclass(frozen=True, slots=True)
class Edge:
    """A value made in one stage and used in another; a message for every microbatch.

    phase: the phase of `source` that makes it; user_phase: the earliest phase of `target` that reads it.
    """

    index: int
    value: str
    source: int
    phase: Phase
    target: int
    user_phase: Phase
    spec: TensorSpec

    def __str__(self) -> str:
        return f"e{self.index} {self.value} {self.source}{self.phase}>{self.target}{self.user_phase}"


@dataclass(frozen=True, slots=True)
class Count:
    """How many a microbatch's loss counts, known from its leaves alone, so that all ranks know it of all
    microbatches before the step begins.

    value: what one of `ops` makes, one number; or the number itself, when it is the same for all. ops: in
    order; they read `batch/` and `const/` only, and their names are their own.
    """

    value: str | float
    ops: tuple[Op, ...] = ()


OverlapMode = Literal["off", "local", "window"]
"""What may hide communication: nothing, the ops of its own action, or those of another microbatch as well."""

OVERLAP_MODES: tuple[OverlapMode, ...] = ("off", "local", "window")


@dataclass(frozen=True, slots=True, repr=False)
class Job(Shown):
    """A captured training step, cut into stages: what one microbatch computes, and where.

    batch: leaf name -> spec of one microbatch's leaf.
    replicated: leaves of the batch that every microbatch takes in full. batch_dims: (leaf, dim) of those
        whose rows are given along another dim than the first; None where they are none. All else here has
        rows first.
    loss: (stage, value) of the microbatch's loss: a mean, or with a `count` a sum.
    count: what the step's sum of losses is divided by, summed over microbatches; None where it is a mean.
    mean_over: of a loss that is a mean, over how many labels, where the ops show; for a note to the user.
    param_dtype: the dtype in which parameters are computed with, when it is not their own.
    schedule, max_live, pp, recompute: as asked for: a family, a CSV file or a schedule; a limit of live
        microbatches; pipeline ranks, None for as many as the schedule has; what the backward computes again.
    microbatch_group: microbatches that go through one of a rank's stages before its next begins, if named.
    split_ops: whether planning may cut products and their collectives (`stretto.passes.split_ops`).
    message_parts: whether it may cut messages that all tensor-parallel ranks have in full.
    device: the kind that ops were captured for. fixed: leaf path -> text of leaves that are no tensors.
    chunks: in how many the sequence is cut within blocks. forms: the same step in other numbers of chunks or
        of stages, of which planning may take one (`stretto.ir.forms`).
    metrics: what the model's code lets users see of its forward.
    read: path -> text of Python values below the model that its code has read: constants of the step.
    watch: looks at all others that model and loss have read, in the process that has captured.
    recipe: captures another batch; has the model, so that no plan has it.
    optimizer: whose state counts in a rank's memory.
    zero: how long what is gathered or not yet scattered of `Parameter.kept` may stay; 0 where nothing is
        kept in parts.
    updates, clip_norm: whether the optimizer's step is part of it, and the largest norm of gradients that
        it leaves as it is (`stretto.ir.updates`).
    axes: (axis, size) of the mesh's axes other than pp, outermost first (`stretto.ir.mesh`). Programs and
        `batch` are those of one rank. The step's loss is the mean over microbatches and over dp; with a
        `count`, the sum over both, over the count.
    """

    name: str
    microbatches: int
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    constants: tuple[Constant, ...]
    batch: tuple[tuple[str, TensorSpec], ...]
    loss: tuple[int, str]
    param_dtype: str | None = None
    schedule: str | Schedule = "1f1b"
    max_live: int | None = None
    pp: int | None = None
    device: str = "cpu"
    fixed: tuple[tuple[str, str], ...] = ()
    axes: tuple[tuple[OtherAxis, Natural], ...] = ()
    recompute: str | int = "none"
    overlap: OverlapMode = "window"
    split_ops: bool = False
    message_parts: bool = True
    replicated: tuple[str, ...] = ()
    count: Count | None = None
    mean_over: Count | None = None
    chunks: Natural = 1
    microbatch_group: Natural | None = None
    metrics: tuple[Metric, ...] = ()
    read: tuple[tuple[tuple[str, ...], str], ...] = ()
    optimizer: OptimizerKind = "adamw"
    zero: Zero = field(default=0, metadata=WHERE_SET)
    updates: bool = field(default=False, metadata=WHERE_SET)
    clip_norm: float | None = field(default=None, metadata=WHERE_SET)
    batch_dims: tuple[tuple[str, int | None], ...] = field(default=(), metadata=WHERE_SET)
    forms: tuple[Job, ...] = field(default=(), compare=False, repr=False, metadata=UNWRITTEN)
    watch: Watched | None = field(default=None, compare=False, repr=False, metadata=UNWRITTEN)
    recipe: Recipe | None = field(default=None, compare=False, repr=False, metadata=UNWRITTEN)

    def with_batch(
        self, batch: Any, *, microbatches: int | None = None, like: PlannedJob | None = None
    ) -> Job:
        """The job of the same model, loss and settings for a batch of another shape, for the same Runner.

        microbatches: as many as were captured, by default, or the most below that by which rows divide.
        like: the plan of the first shape, where its planning was left a choice. Raises as `stretto.capture`,
        and UsageError for a job that was read from a file.
        """
        if self.recipe is None:
            raise UsageError(
                "the job was read from a file, or is that of a plan, and neither has the model: keep what "
                "stretto.capture returned, or capture the other batch with it"
            )
        result: Job = self.recipe(self, batch, microbatches, like)
        return result

    @property
    def all_ops(self) -> Iterator[tuple[int, Op]]:
        """Those of all stages, each with its stage."""
        return ((stage.index, op) for stage in self.stages for op in stage.all_ops)

    @property
    def line(self) -> str:
        """Its name, stages and layout, as `repr` has them."""
        layout = "".join(f", {axis} = {size}" for axis, size in self.axes)
        return f"{self.name}: {len(self.stages)} stages, {self.microbatches} microbatches{layout}"

    def size(self, axis: str) -> int:
        """The size of an axis other than pp."""
        return dict(self.axes).get(axis, 1)

    def mesh(self, places: int) -> Mesh:
        """How ranks are laid out with so many pipeline ranks."""
        return Mesh(((PIPELINE, places), *self.axes))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which the loss is summed, and all gradients but those of what is sharded over
        them."""
        return tuple(axis for axis, size in self.axes if size > 1 and sums_of(axis) is Sums.ALL)

    @property
    def copies(self) -> int:
        """Data-parallel copies of the model, each with microbatches of its own."""
        return math.prod(self.size(axis) for axis in self.data_axes)

    def copy_of(self, coordinates: Mapping[str, int]) -> int:
        """Which of them the rank at these coordinates belongs to."""
        return Mesh(tuple((axis, self.size(axis)) for axis in self.data_axes)).rank(coordinates)

    @property
    def pieces(self) -> int:
        """Microbatches of the full batch, of all data-parallel copies."""
        return self.microbatches * self.copies

    @property
    def tangent(self) -> float:
        """d(step's loss) / d(one microbatch's loss); as if each counted one, where that is of the batch."""
        count = self.count.value if self.count is not None else 1.0
        return 1.0 / (self.pieces * (1.0 if isinstance(count, str) else count))

    @property
    def trains(self) -> bool:
        """Whether there is a backward; a job of forwards alone evaluates (`stretto.ir.forms`)."""
        return any(stage.ops[phase] for stage in self.stages for phase in (Phase.I, Phase.W))

    @property
    def loss_spec(self) -> TensorSpec:
        """Shape and dtype of the microbatch's loss; the tangent and the step's loss have the same."""
        stage, name = self.loss
        return next(op.made for op in self.stages[stage].ops[Phase.F] if op.name == name)
