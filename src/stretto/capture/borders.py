"""A tensor-parallel sum that leaves its stage crosses in parts: scattered before the border, gathered behind.

The last thing that a stage of a transformer makes is a sum over tensor-parallel ranks, added to what the
stage was given; backward, there is a norm between the two. All ranks of the stage would send that whole to
their likes of the next. Instead each sums and sends its rows alone, and the next stage gathers them: an
all-reduce is a reduce-scatter and an all-gather, and the message goes in between, where it is smallest. Less
is moved on every link, and the next stage may start the gather when it likes. (Megatron-LM cuts what is whole
before the border, and gathers behind it: Narayanan et al. 2021, arXiv 2104.04473, section 4.1; here the sum
is not made whole at all.)

    1. Of the values that other stages read and their own does not, take those that are equal on all ranks of
       the axis, in one piece, of rows that the axis divides.
    2. Follow one back through views that keep rows, and through additions (of a bias, too): what is added may
       be cut by rows, as no rank needs more of it. So may what a layer norm's backward reads, through which
       a gradient goes on its way out. Somewhere there must be an all-reduce, which nobody else reads: it
       becomes a reduce-scatter. Without one the value stays whole, for planning to cut
       (`passes.messages_in_parts`).
    3. Each stage that reads the value gathers the parts, and calls the result a name of its own.
    4. Such a norm's own gradients are then parts, each of a rank's rows, and summed once a step, as under
       sequence parallelism.

Every sum has the terms that it had; with two ranks it has the same bits, with more the order of the sum is
the reduce-scatter's; a norm's gradients are summed in another order. Touches traced ops and their placement.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.capture.expand import TracedOp
from stretto.capture.placed import ADD, PlacedStep
from stretto.capture.split import Placement
from stretto.capture.trace import Traced
from stretto.ir.collectives import ALL_REDUCE, REDUCE_SCATTER
from stretto.ir.program import CHUNK, GETITEM, VIEW, VIEWS, WAIT, Op, Ref, TensorSpec
from stretto.parallelize.tensor import AXIS
from stretto.passes.rewrite import with_uses
from stretto.passes.rows import divides, gather, part_of, rows_of

SHAPED = (*VIEWS, "aten.reshape.default")
NORM = "aten.native_layer_norm_backward.default"


def scatter_borders(traced: Traced, placement: Placement, size: int) -> tuple[Traced, Placement]:
    """See the module. size: of the axis. Both as they were when no sum crosses a border."""
    if size == 1:
        return traced, placement
    step = PlacedStep(traced, placement, size)
    made = [cut for name in step.crossing() if (cut := _Border(step, name).cut()) is not None]
    if not made:
        return traced, placement
    before: dict[str, list[tuple[TracedOp, int]]] = {}
    gone: set[str] = set()
    moved: set[str] = set()
    partial = dict(traced.partial)
    renamed: dict[tuple[int, str], str] = {}
    for border in made:
        gone |= border.gone
        moved |= border.moved.keys()
        partial |= dict.fromkeys(border.moved.values(), (AXIS,))
        # Behind what the same op is the first to read: that may be gathered for this.
        before[border.value] = [*before.get(border.value, []), *border.scattered]
        for stage, (first, name, gathered) in border.gathered.items():
            before[first] = [*before.get(first, []), *((op, stage) for op in gathered)]
            renamed[stage, border.value] = name

    def in_stage(item: TracedOp, stage: int) -> TracedOp:
        return replace(item, op=with_uses(item.op, lambda used: renamed.get((stage, used), used)))

    ops: list[TracedOp] = []
    placed = dict(placement)
    for item in traced.ops:
        for new, stage in before.get(item.op.name, ()):
            ops.append(in_stage(new, stage))
            placed[new.op.name] = (stage,)
        if item.op.name in gone:
            del placed[item.op.name]
        elif item.op.name not in moved:
            ops.append(in_stage(item, placement[item.op.name][0]))
    return replace(traced, ops=tuple(ops), partial=partial), placed


class _Border:
    """One value that crosses.

    gone: ops that are no more; moved: gradients of parameters that stand elsewhere now, and are parts of sums
    -> the parameter; scattered: ops in the place of the value's, with their stage; gathered: by stage that
    reads it, its first reader, the value's name there, and the ops that gather it.
    """

    def __init__(self, step: PlacedStep, value: str) -> None:
        self._step = step
        self.value = value
        self._item = step.items[value]
        (self._stage,) = step.placement[value]
        self.gone: set[str] = set()
        self.moved: dict[str, str] = {}
        self.scattered: list[tuple[TracedOp, int]] = []
        self.gathered: dict[int, tuple[str, str, list[TracedOp]]] = {}
        self._size = 0

    def cut(self) -> _Border | None:
        """Steps 2 and 3; None where the value stays whole."""
        spec = self._item.op.outputs[0]
        assert spec is not None
        if len(spec.shape) < 2 or not self._sum(self.value, spec) or not divides(spec, self._size):
            return None
        self._gather(self._rows(self.value, spec), spec)
        return self

    # --- step 2 -------------------------------------------------------------------------------------

    def _here(self, name: str) -> Op | None:
        """The op of a value, if this stage makes it."""
        item = self._step.items.get(name)
        return item.op if item is not None and self._step.placement[name] == (self._stage,) else None

    def _sum(self, name: str, spec: TensorSpec) -> bool:
        """Whether an all-reduce that nobody else reads is behind a value; finds the size of the axis."""
        op = self._here(name)
        if op is None or (name != self.value and not self._step.only_reader(name)):
            return False
        if op.target == WAIT:
            start = self._here(op.uses[0])
            if start is None or start.target != ALL_REDUCE.target or start.args[1:3] != ("sum", AXIS):
                return False
            self._size = int(start.args[3])
            return self._step.only_reader(start.name)
        return any(self._sum(name, spec) for name in self._operands(op, spec))

    def _operands(self, op: Op, spec: TensorSpec) -> tuple[str, ...]:
        """The values of these rows that an op puts together; none for an op that does something else."""
        if not _is_rows(op.outputs[0], spec) or op.kwargs:
            return ()
        rows = [name for name in op.uses if _is_rows(self._step.specs.get(name), spec)]
        if op.target in SHAPED:
            return tuple(rows)
        if op.target == GETITEM:
            norm = self._norm(op, spec)
            return () if norm is None else (norm.args[0].name,)
        others = [self._step.specs.get(name) for name in op.uses if name not in rows]
        every = all(isinstance(arg, Ref) for arg in op.args) and len(op.uses) == len(op.args) == 2
        # A bias is added to every row.
        biases = all(s is not None and s.shape == spec.shape[-1:] and s.dtype == spec.dtype for s in others)
        return tuple(rows) if op.target == ADD and every and biases else ()

    def _norm(self, op: Op, spec: TensorSpec) -> Op | None:
        """The layer norm's backward from which `op` takes the gradient of the input, if its rows can be had
        one without another: what else it gives are gradients of parameters."""
        norm = self._here(op.uses[0])
        if norm is None or norm.target != NORM or op.args[1] != 0:
            return None
        gradient, x, dims, mean, rstd = norm.args[:5]
        if tuple(dims) != spec.shape[-1:]:
            return None
        known = self._step.specs
        if not all(_is_rows(known.get(of.name), spec) for of in (gradient, x)):
            return None
        count = rows_of(spec).shape[0]
        stats = [known.get(of.name) for of in (mean, rstd)]
        if any(of is None or of.stride is not None or of.numel != count for of in stats):
            return None
        others = [user.op for user in self._step.users[norm.name] if user.op is not op]
        whole = all(self._here(other.name) and other.target == GETITEM for other in others)
        alone = all(o.name in self._step.own_grads and not self._step.users.get(o.name) for o in others)
        return norm if whole and alone and 0 not in [other.args[1] for other in others] else None

    def _rows(self, name: str, spec: TensorSpec) -> str:
        """Make this rank's rows of a value; their name."""
        op = self._here(name)
        whole, part = rows_of(spec), part_of(spec, self._size)
        if op is None or not self._sum(name, spec):
            return self._part(name, whole)
        self.gone.add(name)
        if op.target == WAIT:
            start = self._step.items[op.uses[0]].op
            self.gone.add(start.name)
            source = start.args[0]
            rows = self._add(f"{start.name}_rows", VIEW, (source, whole.shape), whole, source.name)
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
        own_x = self._part(x.name, rows_of(spec))
        stats = []
        for of in (mean, rstd):
            column = TensorSpec((rows_of(spec).shape[0], 1), self._step.specs[of.name].dtype)
            stats.append(Ref(self._part(of.name, column)))
        part = part_of(spec, self._size)
        args = (Ref(gradient), Ref(own_x), dims, *stats, *rest)
        made = replace(norm, name=f"{norm.name}_part", args=args, outputs=(part, *norm.outputs[1:]))
        self.scattered.append((replace(self._item, op=made), self._stage))
        self.gone.add(norm.name)
        for user in self._step.users[norm.name]:
            if user.op is not op:
                moved = replace(user.op, args=(Ref(made.name), *user.op.args[1:]))
                self.scattered.append((replace(user, op=moved), self._stage))
                self.moved[moved.name] = self._step.own_grads[moved.name]
        return self._add(f"{op.name}_part", GETITEM, (Ref(made.name), 0), part, None)

    def _part(self, name: str, rows: TensorSpec) -> str:
        """This rank's part of the rows of what is whole."""
        size = self._size
        view = f"{self.value}_of_{name.replace('/', '_')}"
        self._add(view, VIEW, (Ref(name), rows.shape), rows, name)
        return self._add(f"{view}_part", CHUNK, (Ref(view), 0, AXIS, size), part_of(rows, size), view)

    def _add(
        self, name: str, target: str, args: tuple[object, ...], spec: TensorSpec, alias: str | None
    ) -> str:
        op = Op(name, target, args, (), (spec,), alias, module=self._item.op.module)
        self.scattered.append((replace(self._item, op=op), self._stage))
        return name

    # --- step 3 -------------------------------------------------------------------------------------

    def _gather(self, part: str, spec: TensorSpec) -> None:
        readers = self._step.users[self.value]
        for stage in sorted({s for user in readers for s in self._step.placement[user.op.name]}):
            first = self._step.readers(self.value, stage)[0]
            start, name = f"{self.value}_gather_{stage}", f"{self.value}_at_{stage}"
            steps = gather(start, part, name, spec, AXIS, self._size)
            items = [replace(first, op=replace(op, module=first.op.module)) for op in steps]
            self.gathered[stage] = (first.op.name, name, items)


def _is_rows(found: TensorSpec | None, spec: TensorSpec) -> bool:
    """Whether a tensor has the same rows in the same order."""
    if found is None or found.stride is not None or found.dtype != spec.dtype or not found.shape:
        return False
    return found.shape[-1] == spec.shape[-1] and found.numel == spec.numel
