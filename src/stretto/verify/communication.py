"""Proves the communications of a job's programs: collectives over axes of the mesh beside pp.

Ranks along an axis walk one program, so they start its collectives in one order whatever that order is; what
can be wrong is a start without its one wait, a group that is not there, or a shape that does not fit. Proved
once for each program, so the cost does not grow with microbatches.

1. The form: axis and size are the job's, the arguments are those that `stretto.ir.program` lists, and shapes
   fit (`stretto.ir.collectives`).
2. Every start has exactly one wait, in its own stage. That the wait comes after the start, in the window or
   in a later one, is proved where all reads are (`stretto.verify.windows`, `.lifetimes`).
3. Nothing else touches a start's result, which is being filled until the wait ends: no op, no message, no
   gradient, update or loss.
4. What is sent is not written meanwhile: the program's only writes are to buffers, when a window ends.

May touch `stretto.ir`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stretto.ir.action import Phase
from stretto.ir.collectives import Kind
from stretto.ir.flow import PHASES, given_specs, results_of
from stretto.ir.plan import Plan
from stretto.ir.program import CHUNK, INDEX, STARTS, WAIT, Op, Ref, Stage, TensorSpec
from stretto.verify.fault import Fault

COORDINATE = "int64[]"
"""What `axis.index` gives."""

Place = tuple[Phase, str]
"""(phase, name) of an op of the stage."""


def communication_faults(plan: Plan) -> list[Fault]:
    """Every fault of the programs' communications. References must be sound."""
    given = given_specs(plan.job) | {edge.value: edge.spec for edge in plan.job.edges}
    return [fault for stage in plan.job.stages for fault in _StageProof(plan, stage, given).faults()]


class _StageProof:
    """The proof of one stage's programs."""

    def __init__(self, plan: Plan, stage: Stage, given: dict[str, TensorSpec]) -> None:
        self.job = plan.job
        self.axes = dict(plan.job.axes)
        self.rank = plan.rank_of(stage.index)
        self.stage = stage
        self.given = given
        self.ops: dict[Place, Op] = {(phase, op.name): op for phase in PHASES for op in stage.ops[phase]}

    def faults(self) -> Iterator[Fault]:
        waits: dict[Place, list[Place]] = defaultdict(list)
        for (phase, _), op in self.ops.items():
            for name in op.uses:
                source = self.place(phase, name)
                if source is None or self.ops[source].target not in STARTS:
                    continue
                if op.target == WAIT:
                    waits[source].append((phase, op.name))
                else:
                    yield self.fault(
                        phase,
                        op,
                        f"reads {name}, which is being filled until its communication is done",
                        f"Read the result of the `comm.wait` of {name}",
                    )
            if op.kind is not None:
                yield from self.start(phase, op, op.kind)
            elif op.target == WAIT:
                yield from self.wait(phase, op)
            elif op.target in (INDEX, CHUNK):
                yield from self.part(phase, op)
            elif op.target.startswith(("comm.", "axis.")):
                known = ", ".join((*STARTS, WAIT, INDEX, CHUNK))
                yield self.fault(phase, op, f"there is no op {op.target}", f"Known are {known}")
        for (phase, name), op in self.ops.items():
            if op.target in STARTS:
                yield from self.waited(phase, op, waits[phase, name])
        yield from self.leaving()

    def place(self, phase: Phase, name: str) -> Place | None:
        """Where the value is made that `name` means in a phase. I and W share their names."""
        for sub in (Phase.F,) if phase is Phase.F else (Phase.I, Phase.W, Phase.F):
            if (sub, name) in self.ops:
                return sub, name
        return None

    def spec(self, phase: Phase, name: str) -> TensorSpec | None:
        """The tensor that a name stands for; None if it is none."""
        place = self.place(phase, name)
        if place is None:
            return self.given.get(name)
        outputs = self.ops[place].outputs
        return outputs[0] if len(outputs) == 1 else None

    def fault(self, phase: Phase, op: Op, what: str, fix: str) -> Fault:
        return Fault(self.rank, f"stage {self.stage.index}{phase}, {op.name}", what, fix)

    # 1. The form.

    def start(self, phase: Phase, op: Op, kind: Kind) -> Iterator[Fault]:
        """A collective's arguments and shapes."""
        reductions = kind.reductions
        if not _has_form(op, Ref, *([str] if reductions else [tuple] if kind.sized else []), str, int):
            how = '"sum", ' if reductions else "sizes, " if kind.sized else ""
            yield self.fault(
                phase,
                op,
                "cannot be read",
                f"Write {op.target}(value, {how}axis, size) with one tensor as result",
            )
            return
        if reductions and op.args[1] not in reductions:
            yield self.fault(
                phase, op, f"{op.target} knows no reduction {op.args[1]!r}", f"Use {' or '.join(reductions)}"
            )
        elif not kind.knows(op.how, op.args[-1]):
            yield self.fault(
                phase,
                op,
                f"names no sizes for {op.args[-1]} ranks",
                "Name for each rank how many rows go to each, 0 or more",
            )
            return
        group = list(self.group(phase, op))
        if group:
            yield from group
            return
        source, made, size = self.spec(phase, op.args[0].name), op.outputs[0], op.args[-1]
        assert made is not None
        if op.alias is not None:
            yield self.fault(
                phase, op, f"says that it is a view of {op.alias}", "A start makes its own buffer"
            )
        if source is None:
            yield self.fault(phase, op, f"{op.args[0].name} is no tensor", "Communicate a single tensor")
            return
        # A reduction that is not known has its own fault.
        shape = kind.shape(source.shape, size, reductions[0] if reductions else op.how)
        if shape is None or (made.shape, made.dtype) != (shape, source.dtype):
            right = f"of shape {list(shape)} and dtype {source.dtype}" if shape is not None else "none"
            yield self.fault(
                phase,
                op,
                f"gives {made}, but the {kind.name} of {op.args[0].name}, {source}, "
                f"over {size} ranks is {right}",
                "Capture the job again"
                if shape is not None
                else "Each rank must send all of its rows, and get as many as the others"
                if kind.sized
                else f"Dim 0 must be a multiple of {size}",
            )

    def wait(self, phase: Phase, op: Op) -> Iterator[Fault]:
        """A wait's arguments, and that its result is the start's."""
        if not _has_form(op, Ref):
            yield self.fault(phase, op, "cannot be read", "Write comm.wait(value) with one tensor as result")
            return
        name = op.args[0].name
        source = self.place(phase, name)
        if source is None or self.ops[source].target not in STARTS:
            yield self.fault(
                phase,
                op,
                f"waits for {name}, which starts no communication in stage {self.stage.index}",
                "Wait, in the same stage, for what a start gives",
            )
            return
        start = self.ops[source]
        if (op.outputs, op.alias) != (start.outputs, name):
            yield self.fault(
                phase,
                op,
                f"gives {op.outputs[0]}, a view of {op.alias}; but {name} is {start.outputs[0]}",
                f"Make it a view of {name} of the same shape",
            )

    def part(self, phase: Phase, op: Op) -> Iterator[Fault]:
        """`axis.index` and `axis.chunk`."""
        if not _has_form(op, *((str, int) if op.target == INDEX else (Ref, int, str, int))):
            form = "axis.index(axis, size)" if op.target == INDEX else "axis.chunk(value, dim, axis, size)"
            yield self.fault(phase, op, "cannot be read", f"Write {form} with one tensor as result")
            return
        yield from self.group(phase, op)
        made, size = op.outputs[0], op.args[-1]
        assert made is not None
        if op.target == INDEX:
            if str(made) != COORDINATE:
                yield self.fault(phase, op, f"gives {made}", f"A coordinate is {COORDINATE}")
            return
        name, dim = op.args[0].name, op.args[1]
        source = self.spec(phase, name)
        if source is None:
            yield self.fault(phase, op, f"{name} is no tensor", "Take a part of a single tensor")
        elif not 0 <= dim < len(source.shape):
            yield self.fault(phase, op, f"{name}, {source}, has no dim {dim}", "Name a dim that it has")
        else:
            whole = tuple(n * size if d == dim else n for d, n in enumerate(made.shape))
            if (whole, made.dtype) != (source.shape, source.dtype):
                yield self.fault(
                    phase,
                    op,
                    f"gives {made}, which is no part of {size} along dim {dim} of {name}, {source}",
                    "Capture the job again",
                )

    def group(self, phase: Phase, op: Op) -> Iterator[Fault]:
        """Axis and size, the last two arguments, are the job's."""
        axis, size = op.args[-2:]
        if axis not in self.axes:
            known = ", ".join(self.axes) or "none"
            yield self.fault(phase, op, f"the job has no axis {axis!r} beside pp", f"It has {known}")
        elif size != self.axes[axis]:
            yield self.fault(
                phase,
                op,
                f"is for {size} ranks along {axis}, but the job has {self.axes[axis]}",
                f"Capture the job for {axis} = {self.axes[axis]}",
            )

    # 2 to 4. What happens between start and wait.

    def waited(self, phase: Phase, op: Op, waits: list[Place]) -> Iterator[Fault]:
        if len(waits) != 1:
            names = ", ".join(name for _, name in waits)
            yield self.fault(
                phase,
                op,
                f"is waited for {len(waits)} times, by {names}"
                if waits
                else "nothing waits until it is done",
                "Keep one wait" if waits else f"Add a `comm.wait` of {op.name} to stage {self.stage.index}",
            )
            return
        source = op.args[0] if op.args and isinstance(op.args[0], Ref) else None
        root = None if source is None else self.root(phase, source.name)
        if root is None or not root.startswith("buffer/") or waits[0][0] is phase:
            return
        for buffer in self.job.buffers:
            if f"buffer/{buffer.name}" == root and any(at == self.stage.index for at, *_ in buffer.updates):
                yield self.fault(
                    phase,
                    op,
                    f"sends {root}, which is updated when a window ends, and is waited for in another window",
                    f"Wait for it in {phase}, or send a copy",
                )

    def root(self, phase: Phase, name: str) -> str:
        """The value that owns the storage in which a value lies."""
        seen: set[Place] = set()
        place = self.place(phase, name)
        while place is not None and place not in seen and self.ops[place].alias is not None:
            seen.add(place)
            name = str(self.ops[place].alias)
            place = self.place(place[0], name)
        return name

    def leaving(self) -> Iterator[Fault]:
        """What leaves the stage or outlives the microbatch is complete."""
        taken = [
            (edge.phase, edge.value, f"edge {edge} takes it to stage {edge.target}")
            for edge in self.job.edges
            if edge.source == self.stage.index
        ]
        for phase in PHASES:
            results = results_of(self.job, self.stage.index, phase)
            taken += [(phase, value, f"it is {use}") for value, uses in results.items() for use in uses]
        for phase, value, use in taken:
            op = self.ops.get((phase, value))
            if op is not None and op.target in STARTS:
                yield self.fault(
                    phase,
                    op,
                    f"{use}, while it is being filled",
                    f"Use the result of the `comm.wait` of {value}",
                )


def _has_form(op: Op, *kinds: type) -> bool:
    """Whether the op's arguments are of these kinds, and its result is one tensor."""
    return (
        not op.kwargs
        and len(op.args) == len(kinds)
        and all(type(arg) is kind for arg, kind in zip(op.args, kinds, strict=True))
        and len(op.outputs) == 1
        and op.outputs[0] is not None
    )
