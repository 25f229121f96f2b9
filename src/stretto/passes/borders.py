"""What tensor-parallel ranks reduce or gather at the end of a stage crosses the border in parts.

`scatter_borders`: a reduction that leaves its stage is scattered before the border and gathered behind it: an
all-reduce is a reduce-scatter and an all-gather, and the message goes in between, where it is smallest.
(Megatron-LM cuts the full sum before the border: arXiv 2104.04473, section 4.1.)

    1. Of the values that other stages read and their own does not, take those that may cross in parts
       (`stretto.passes.messages_in_parts.divisible`).
    2. Follow one back through views that keep rows, and through additions (of a bias, too): what is added may
       be cut by rows, as no rank needs more of it. So may what a layer norm's backward reads. Somewhere there
       must be an all-reduce, which no one else reads: it becomes a reduce-scatter. Without one the value
       stays unsharded, for planning to cut (`stretto.passes.messages_in_parts`).
    3. Each stage that reads the value gathers the parts.
    4. Such a norm's own gradients are then partial, each of a rank's rows, and reduced once a step.

`gather_behind`: what a rank has a part of is gathered by those who read it, not before the border.

    1. Take the values that other stages read and their own does not, and that are no results.
    2. Follow one back through what puts a gathered value in order, views and copies, as long as nothing else
       reads what is between, to an all-gather over the tensor-parallel axis of what the stage itself made.
    3. That is sent instead; each stage that reads the value gathers, by the same ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from stretto.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from stretto.ir.flow import PHASES, results_of
from stretto.ir.prices import specs_within
from stretto.ir.program import GETITEM, VIEW, VIEWS, WAIT, Edge, Job, Op, Ref, Stage, TensorSpec
from stretto.parallelize.tensor import AXIS
from stretto.passes.messages_in_parts import cut_rows, divisible, in_parts, part_of, rows_of
from stretto.passes.rewrite import changed, read_as, stage_of, users_of, with_uses

ADD = "aten.add.Tensor"
NORM = "aten.native_layer_norm_backward.default"

SHAPED = (*VIEWS, "aten.reshape.default")


def scatter_borders(job: Job) -> Job:
    """See the module. The job itself when no sum crosses a border."""
    if job.size(AXIS) == 1:
        return job
    for value in divisible(job, job.edges):
        edges = [edge for edge in job.edges if edge.value == value]
        border = _Border(job, job.stages[edges[0].source], value)
        if border.cut(edges[0].spec):
            job = in_parts(border.job(), edges, {value: border.part})
    return job


class _Border:
    """One value that leaves a stage.

    part: the name of a rank's rows of it. made: ops in the place of the value's; gone: ops that are no more;
    moved: ops that give gradients of a norm's parameters, by name, as they are now.
    """

    def __init__(self, job: Job, stage: Stage, value: str) -> None:
        self._job = job
        self._stage = stage
        self._size = job.size(AXIS)
        self._specs: Mapping[str, TensorSpec] = specs_within(job, stage)
        self._ops = {op.name: op for op in stage.all_ops}
        self._users: Mapping[str, list[Op]] = users_of(self._ops.values())
        self._kept = {edge.value for edge in job.edges if edge.source == stage.index}
        self._kept |= {name for phase in PHASES for name in results_of(job, stage.index, phase)}
        self._value = value
        self.part = ""
        self.made: list[Op] = []
        self.gone: set[str] = set()
        self.moved: dict[str, Op] = {}

    def cut(self, spec: TensorSpec) -> bool:
        """Step 2; False where the value stays unsharded."""
        if self._users.get(self._value) or not self._sum(self._value, spec):
            return False
        self.part = self._rows(self._value, spec)
        return True

    def job(self) -> Job:
        """The job in which the sender makes its part, with step 4."""

        def news(op: Op) -> list[Op]:
            kept = [] if op.name in self.gone else [self.moved.get(op.name, op)]
            return [*self.made, *kept] if op.name == self._value else kept

        stages = (changed(s, news) if s is self._stage else s for s in self._job.stages)
        parameters = (
            replace(p, partial=(*p.partial, AXIS))
            if any(value in self.moved for _, _, value in p.grads)
            else p
            for p in self._job.parameters
        )
        return replace(self._job, stages=tuple(stages), parameters=tuple(parameters))

    def _alone(self, name: str) -> bool:
        """Whether one op of the stage reads a value, and nothing else needs it."""
        return len(self._users.get(name, ())) == 1 and name not in self._kept

    def _sum(self, name: str, spec: TensorSpec) -> bool:
        """Whether an all-reduce that no one else reads is behind a value."""
        op = self._ops.get(name)
        if op is None or (name != self._value and not self._alone(name)):
            return False
        if op.target == WAIT:
            start = self._ops.get(op.uses[0])
            if start is None or start.target != ALL_REDUCE.target or start.args[1:3] != ("sum", AXIS):
                return False
            return self._alone(start.name)
        return any(self._sum(name, spec) for name in self._operands(op, spec))

    def _operands(self, op: Op, spec: TensorSpec) -> tuple[str, ...]:
        """The values of these rows that an op puts together; none for an op that does something else."""
        if not _is_rows(op.outputs[0], spec) or op.kwargs:
            return ()
        rows = [name for name in op.uses if _is_rows(self._specs.get(name), spec)]
        if op.target in SHAPED:
            return tuple(rows)
        if op.target == GETITEM:
            norm = self._norm(op, spec)
            return () if norm is None else (norm.args[0].name,)
        others = [self._specs.get(name) for name in op.uses if name not in rows]
        every = all(isinstance(arg, Ref) for arg in op.args) and len(op.uses) == len(op.args) == 2
        # A bias is added to every row.
        biases = all(s is not None and s.shape == spec.shape[-1:] and s.dtype == spec.dtype for s in others)
        return tuple(rows) if op.target == ADD and every and biases else ()

    def _norm(self, op: Op, spec: TensorSpec) -> Op | None:
        """The layer norm's backward from which `op` takes the gradient of the input, if its rows can be had
        one without another: what else it gives are gradients of parameters."""
        norm = self._ops.get(op.uses[0])
        if norm is None or norm.target != NORM or op.args[1] != 0:
            return None
        gradient, x, dims, mean, rstd = norm.args[:5]
        if tuple(dims) != spec.shape[-1:]:
            return None
        if not all(_is_rows(self._specs.get(of.name), spec) for of in (gradient, x)):
            return None
        count = rows_of(spec).shape[0]
        stats = [self._specs.get(of.name) for of in (mean, rstd)]
        if any(of is None or of.stride is not None or of.numel != count for of in stats):
            return None
        others = [user for user in self._users[norm.name] if user is not op]
        own = self._own_grads()
        parts = all(o.target == GETITEM and o.args[1] != 0 and o.name in own for o in others)
        return norm if parts and not any(self._users.get(other.name) for other in others) else None

    def _own_grads(self) -> set[str]:
        """Gradients that are of one parameter alone, which all ranks have replicated."""
        ties = Counter(parameter.tied_to for parameter in self._job.parameters)
        return {
            p.grads[0][2]
            for p in self._job.parameters
            if len(p.grads) == ties[p.tied_to] == 1 and all(shard.axis != AXIS for shard in p.shards)
        }

    def _rows(self, name: str, spec: TensorSpec) -> str:
        """Make this rank's rows of a value; their name."""
        op = self._ops.get(name)
        full, part = rows_of(spec), part_of(spec, self._size)
        if op is None or not self._sum(name, spec):
            return self._cut(name, full)
        self.gone.add(name)
        if op.target == WAIT:
            start = self._ops[op.uses[0]]
            self.gone.add(start.name)
            source = start.args[0]
            rows = self._add(f"{start.name}_rows", VIEW, (source, full.shape), full, source.name)
            args = (Ref(rows), "sum", AXIS, self._size)
            scattered = self._add(f"{start.name}_part", REDUCE_SCATTER.target, args, part, None)
            return self._add(f"{name}_part", WAIT, (Ref(scattered),), part, scattered)
        parts = {operand: self._rows(operand, spec) for operand in self._operands(op, spec)}
        if op.target == GETITEM:
            return self._norm_rows(op, spec, *parts.values())
        if op.target in SHAPED:
            return next(iter(parts.values()))
        operands = tuple(Ref(parts.get(used, used)) for used in op.uses)
        return self._add(f"{name}_part", ADD, operands, part, None)

    def _norm_rows(self, op: Op, spec: TensorSpec, gradient: str) -> str:
        """The norm's backward on this rank's rows; the name of its input's gradient."""
        norm = self._norm(op, spec)
        assert norm is not None
        _, x, dims, mean, rstd, *rest = norm.args
        own_x = self._cut(x.name, rows_of(spec))
        stats = []
        for of in (mean, rstd):
            column = TensorSpec((rows_of(spec).shape[0], 1), self._specs[of.name].dtype)
            stats.append(Ref(self._cut(of.name, column)))
        part = part_of(spec, self._size)
        args = (Ref(gradient), Ref(own_x), dims, *stats, *rest)
        made = replace(norm, name=f"{norm.name}_part", args=args, outputs=(part, *norm.outputs[1:]))
        self.made.append(made)
        self.gone.add(norm.name)
        for user in self._users[norm.name]:
            if user is not op:
                self.moved[user.name] = replace(user, args=(Ref(made.name), *user.args[1:]))
        return self._add(f"{op.name}_part", GETITEM, (Ref(made.name), 0), part, None)

    def _cut(self, name: str, rows: TensorSpec) -> str:
        """This rank's part of the rows of a full value."""
        part = f"{self._value}_of_{name.replace('/', '_')}_part"
        module = self._ops[self._value].module
        self.made += cut_rows(name, part, self._specs[name], rows, self._size, module)
        return part

    def _add(
        self, name: str, target: str, args: tuple[object, ...], spec: TensorSpec, alias: str | None
    ) -> str:
        module = self._ops[self._value].module
        self.made.append(Op(name, target, args, (), (spec,), alias, module=module))
        return name


def _is_rows(found: TensorSpec | None, spec: TensorSpec) -> bool:
    """Whether a tensor has the same rows in the same order."""
    if found is None or found.stride is not None or found.dtype != spec.dtype or not found.shape:
        return False
    return found.shape[-1] == spec.shape[-1] and found.numel == spec.numel


ORDERING = frozenset(
    (*VIEWS, *(f"aten.{name}.default" for name in ("clone", "_to_copy", "contiguous", "reshape", "permute")))
)
"""Ops of one tensor that a gathered value is put in order by."""


def gather_behind(job: Job) -> Job:
    """See the module. The job itself when nothing that crosses was gathered for others alone."""
    if job.size(AXIS) == 1:
        return job
    for value in dict.fromkeys(edge.value for edge in job.edges):
        edges = [edge for edge in job.edges if edge.value == value]
        chain = _chain(job, job.stages[edges[0].source], value)
        if chain:
            job = _behind(job, edges, chain)
    return job


def _chain(job: Job, stage: Stage, value: str) -> Sequence[Op]:
    """Step 2: the ops from the gather to the value, in order; none where it cannot be."""
    ops = {op.name: op for op in stage.all_ops}
    readers = users_of(ops.values())
    kept = {edge.value for edge in job.edges if edge.source == stage.index and edge.value != value}
    kept |= {name for phase in PHASES for name in results_of(job, stage.index, phase)}
    chain: list[Op] = []
    name = value
    while name in ops and name not in kept and len(readers[name]) == (1 if chain else 0):
        op = ops[name]
        chain.append(op)
        if op.kind is not None:
            gathers = op.target == ALL_GATHER.target and op.lane == AXIS
            return chain[::-1] if gathers and op.args[0].name in ops else ()
        if len(op.uses) != 1 or op.target not in (*ORDERING, WAIT):
            return ()
        [name] = op.uses
    return ()


def _behind(job: Job, edges: Sequence[Edge], chain: Sequence[Op]) -> Job:
    """Step 3."""
    source = edges[0].source
    programs = {s.index: dict(s.ops) for s in job.stages if s.index in {source, *(e.target for e in edges)}}
    gone = {op.name for op in chain}
    part = chain[0].args[0].name
    phase, spec = next(
        (phase, op.made) for phase in PHASES for op in programs[source][phase] if op.name == part
    )
    for made in PHASES:
        programs[source][made] = tuple(op for op in programs[source][made] if op.name not in gone)
    for edge in edges:
        names = {name: f"{name}_at_{edge.target}" for name in gone}
        read_as(programs[edge.target], edge, names[edge.value], partial(_renamed, chain, names))
    carried: list[Edge] = []
    for edge in job.edges:
        if edge.value == edges[0].value:
            edge = replace(edge, value=part, phase=phase, spec=spec)
        before = next((one for one in carried if (one.value, one.target) == (edge.value, edge.target)), None)
        if before is None:
            carried.append(edge)
        else:
            # It is sent there for others as well.
            first = min((before.user_phase, edge.user_phase), key=PHASES.index)
            carried[carried.index(before)] = replace(before, user_phase=first)
    kept = tuple(replace(edge, index=index) for index, edge in enumerate(carried))
    stages = tuple(stage_of(s.index, programs[s.index]) if s.index in programs else s for s in job.stages)
    return replace(job, stages=stages, edges=kept)


def _renamed(chain: Sequence[Op], names: Mapping[str, str], module: str) -> list[Op]:
    return [
        replace(with_uses(op, lambda name: names.get(name, name)), name=names[op.name], module=module)
        for op in chain
    ]
