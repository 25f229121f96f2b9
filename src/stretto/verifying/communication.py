"""Proves the communications of a job's programs: collectives over axes of the mesh other than pp.

Ranks along an axis walk one program, so they start its collectives in one order whatever that order is; what
can be wrong is a start without its one wait, a group that is not there, or a shape that does not fit. Proved
once for each program, so the cost does not grow with microbatches.

1. The form: axis and size are the job's, the arguments are those that `stretto.ir.program` lists, and shapes
   fit (`stretto.ir.collectives`).
2. Every start has exactly one wait, in its own stage. That the wait comes after the start, in the window or
   in a later one, is proved where all reads are (`stretto.verifying.windows`, `.lifetimes`).
3. Nothing else touches a start's result, which is being filled until the wait ends: no op, no message, no
   gradient, update or loss.
4. What is sent is not written meanwhile: the program's only writes are to buffers, when a window ends. Of
   what runs once a step `stretto.verifying.over_step` proves it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from stretto.ir.action import ONCE_PHASES
from stretto.ir.collectives import Kind
from stretto.ir.flow import OVER_STEP, PHASES, given_specs, results_of
from stretto.ir.parameters import strides_of
from stretto.ir.plan import Communicator, Plan
from stretto.ir.program import CHUNK, INDEX, STARTS, WAIT, Op, Ref, Stage, TensorSpec
from stretto.verifying.fault import Fault
from stretto.verifying.shapes import strides_that_count

COORDINATE = "int64[]"
"""What `axis.index` gives."""

Found = Iterator[tuple[str, str]]
"""What is wrong with an op, and what to do about it."""


def communication_faults(plan: Plan) -> list[Fault]:
    """Every fault of the programs' communications. References must be sound."""
    given = given_specs(plan.job) | {edge.value: edge.spec for edge in plan.job.edges}
    return [fault for stage in plan.job.stages for fault in _StageProof(plan, stage, given).faults()]


class _StageProof:
    """The proof of one stage's programs."""

    def __init__(self, plan: Plan, stage: Stage, given: dict[str, TensorSpec]) -> None:
        self.job = plan.job
        self.axes = dict(plan.job.axes)
        self.lanes = {c.name: members_of(plan, c) for c in plan.communicators if c.joins_pp_ranks}
        self.rank = plan.rank_of(stage.index)
        self.stage = stage
        self.given = dict(given)
        self.ops = {op.name: op for op in stage.all_ops}
        self.phase_of = {op.name: phase for phase, ops in stage.ops.items() for op in ops}
        self.taken = self.leaving()
        self.waits: dict[str, list[str]] = defaultdict(list)
        for name, op in self.ops.items():
            for source in self.started(op) if op.target == WAIT else ():
                self.waits[source].append(name)

    def faults(self) -> Iterator[Fault]:
        for name, op in self.ops.items():
            checks = [self.form(op)]
            if op.target != WAIT:
                checks.append(self.reads(op))
            if op.target in STARTS:
                checks += [self.waited(op), self.uses(name)]
            for what, fix in (result for check in checks for result in check):
                yield Fault(self.rank, f"stage {self.stage.index}{self.phase_of[name]}, {name}", what, fix)
            self.given.update(op.written)

    def started(self, op: Op) -> list[str]:
        """The starts whose results an op reads."""
        return [name for name in op.uses if name in self.ops and self.ops[name].target in STARTS]

    def spec(self, name: str) -> TensorSpec | None:
        """The tensor with that name; None if the value is no tensor."""
        if name not in self.ops:
            return self.given.get(name)
        outputs = self.ops[name].outputs
        return outputs[0] if len(outputs) == 1 else None

    # 1. The form.

    def form(self, op: Op) -> Found:
        if op.kind is not None:
            yield from self.start(op, op.kind)
        elif op.target == WAIT:
            yield from self.wait(op)
        elif op.target in (INDEX, CHUNK):
            yield from self.part(op)
        elif op.target.startswith(("comm.", "axis.")):
            yield f"there is no op {op.target}", f"Known are {', '.join((*STARTS, WAIT, INDEX, CHUNK))}"

    def start(self, op: Op, kind: Kind) -> Found:
        """A collective's arguments and shapes."""
        reductions = kind.reductions
        if not _has_form(op, Ref, *([str] if reductions else []), str, int):
            how = '"sum", ' if reductions else ""
            yield "cannot be read", f"Write {op.target}(value, {how}axis, size) with one tensor as result"
            return
        group = list(self.group(op))
        if group:
            yield from group
            return
        name, made, size = op.args[0].name, op.outputs[0], op.args[-1]
        source, want = self.spec(name), None
        if source is not None and kind.knows(op.how):
            want = kind.shape(source.shape, size, op.how)
        assert made is not None
        place = None
        if kind.in_place and self.phase_of[op.name] in ONCE_PHASES and self._alone(op, name):
            place = self.root(name)
        if source is None or (made.shape, made.dtype, op.alias) != (want, source.dtype, place):
            gives = f"{made}{f', a view of {op.alias}' if op.alias else ''}"
            how = f" by {op.how!r}" if op.how else ""
            of = f"{kind.name}{how} of {name}, {source or 'no tensor'}, over {size} ranks"
            what = f"is {list(want)} of {source.dtype}, a buffer of its own" if source and want else "is none"
            yield f"gives {gives}; but the {of}, {what}", "Capture the job again"

    def _alone(self, op: Op, name: str) -> bool:
        """Whether nothing else reads the value, so that the result may take its place."""
        return name.startswith(OVER_STEP) or all(name not in o.uses for o in self.ops.values() if o is not op)

    def wait(self, op: Op) -> Found:
        """A wait's arguments, and that its result is the start's."""
        if not _has_form(op, Ref):
            yield "cannot be read", "Write comm.wait(value) with one tensor as result"
            return
        name, starts = op.args[0].name, self.started(op)
        if not starts:
            what = f"waits for {name}, which starts no communication in stage {self.stage.index}"
            yield what, "Wait, in the same stage, for what a start gives"
            return
        start = self.ops[starts[0]]
        if (op.outputs, op.alias) != (start.outputs, start.alias or name):
            what = f"gives {op.outputs[0]}, a view of {op.alias}; but {name} is {start.outputs[0]}"
            yield what, f"Make it a view of {name} of the same shape"

    def part(self, op: Op) -> Found:
        """`axis.index` and `axis.chunk`."""
        if not _has_form(op, *((str, int) if op.target == INDEX else (Ref, int, str, int))):
            form = "axis.index(axis, size)" if op.target == INDEX else "axis.chunk(value, dim, axis, size)"
            yield "cannot be read", f"Write {form} with one tensor as result"
            return
        yield from self.group(op)
        made, size = op.outputs[0], op.args[-1]
        assert made is not None
        if op.target == INDEX:
            if str(made) != COORDINATE:
                yield f"gives {made}", f"A coordinate is {COORDINATE}"
            return
        name, dim = op.args[0].name, op.args[1]
        source = self.spec(name)
        full = tuple(n * size if d == dim else n for d, n in enumerate(made.shape))
        if source is None or not 0 <= dim < len(full) or (full, made.dtype) != (source.shape, source.dtype):
            what = f"gives {made}, which is no part of {size} along dim {dim} of {name}, {source}"
            yield what, "Capture the job again"
        elif strides_that_count(made) != strides_that_count(replace(made, stride=strides_of(source))):
            yield f"gives {made}, and a part of {source} has the strides of that", "Capture the job again"

    def group(self, op: Op) -> Found:
        """Axis and size, the last two arguments, are the job's."""
        axis, size = op.args[-2:]
        axes = self.axes | (self.lanes if self.phase_of[op.name] in ONCE_PHASES else {})
        if axis not in axes:
            yield f"the job has no axis {axis!r} other than pp", f"It has {', '.join(self.axes) or 'none'}"
        elif size != axes[axis]:
            what = f"is for {size} ranks along {axis}, but the job has {axes[axis]}"
            yield what, f"Capture the job for {axis} = {axes[axis]}"

    # 2 to 4. What happens between start and wait.

    def reads(self, op: Op) -> Found:
        for name in self.started(op):
            what = f"reads {name}, which is being filled until its communication is done"
            yield what, f"Read the result of the `comm.wait` of {name}"

    def waited(self, op: Op) -> Found:
        waits, phase = self.waits[op.name], self.phase_of[op.name]
        if not waits:
            fix = f"Add a `comm.wait` of {op.name} to stage {self.stage.index}"
            yield "nothing waits until it is done", fix
        elif len(waits) > 1:
            yield f"is waited for {len(waits)} times, by {', '.join(waits)}", "Keep one wait"
        elif op.args and isinstance(op.args[0], Ref) and self.phase_of[waits[0]] is not phase:
            root = self.root(op.args[0].name)
            updated = (b for b in self.job.buffers if any(at == self.stage.index for at, *_ in b.updates))
            if root in {f"buffer/{buffer.name}" for buffer in updated}:
                is_updated = "which is updated when a window ends, and is waited for in another window"
                yield f"sends {root}, {is_updated}", f"Wait for it in {phase}, or send a copy"

    def root(self, name: str) -> str:
        """The value that owns the storage in which a value lies."""
        while name in self.ops and self.ops[name].alias is not None:  # to an end, as references are sound
            name = str(self.ops[name].alias)
        return name

    def uses(self, start: str) -> Found:
        for use in self.taken[start]:
            yield f"{use}, while it is being filled", f"Use the result of the `comm.wait` of {start}"

    def leaving(self) -> dict[str, list[str]]:
        """What leaves the stage or outlives the microbatch, and in words how."""
        result: dict[str, list[str]] = defaultdict(list)
        for edge in self.job.edges:
            if edge.source == self.stage.index:
                result[edge.value].append(f"edge {edge} takes it to stage {edge.target}")
        for phase in PHASES:
            for value, uses in results_of(self.job, self.stage.index, phase).items():
                result[value] += [f"it is {use}" for use in uses]
        return result


def members_of(plan: Plan, communicator: Communicator) -> int:
    """How many ranks a communicator joins."""
    return math.prod((len(communicator.ranks), *map(plan.mesh.size, communicator.axes[1:])))


def _has_form(op: Op, *kinds: type) -> bool:
    """Whether the op's arguments are of these kinds, and its result is one tensor."""
    return (
        not op.kwargs
        and len(op.args) == len(kinds)
        and all(type(arg) is kind for arg, kind in zip(op.args, kinds, strict=True))
        and len(op.outputs) == 1
        and op.outputs[0] is not None
    )
