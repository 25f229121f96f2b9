"""Random op graphs, cut into stages: what the fuzz of orders plans.

No chain of blocks: an op reads any values that are there by then, of its own stage or of others (skips, both
ways), so that edges leave in any order and arrive in any phase. Collectives of every kind run on any axis and
are waited for at once, later, or in a later phase. Parameters are sharded, parts along axes, shared by stages
and tied. All is legal by construction, by rules that are written down here once more, on purpose.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.program import (
    CHUNK,
    INDEX,
    WAIT,
    Buffer,
    Edge,
    Job,
    Op,
    Ref,
    Stage,
    TensorSpec,
)
from tests.synthetic import WORK
from tests.verifying.random_tensors import random_tensors

ROWS = 64
"""Of the batch; a gather may give up to eight times as many, a scatter an eighth."""

AXES = ("dp", "cp", "ep", "tp")
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def activation(rows: int) -> TensorSpec:
    return TensorSpec((rows, 8), "float32")


def random_axes(draw: Random, most: int) -> tuple[tuple[str, int], ...]:
    """Axes other than pp, of at most `most` ranks together."""
    found: list[tuple[str, int]] = []
    for axis in AXES:
        size = draw.choice((1, 1, 2, 2, 3, 4)) if axis in ("dp", "tp") else draw.choice((1, 1, 1, 2))
        if 1 < size <= most:
            found.append((axis, size))
            most //= size
    return tuple(found)


def random_job(draw: Random, stages: int, microbatches: int, axes: tuple[tuple[str, int], ...]) -> Job:
    """A job of random programs; each stage has ops in every phase."""
    recompute = draw.choice(("none", "none", "none", "selective", "full", "gathers"))
    # Captured programs wait in the phase in which they start; planning alone moves waits on, after it has
    # chosen what is computed again.
    graph = _Graph(draw, stages, axes, crossing=0.15 if recompute == "none" else 0.0)
    return replace(graph.job(microbatches), recompute=recompute)


class _Graph:
    """crossing: the share of collectives that are waited for in a later phase than they start in."""

    def __init__(self, draw: Random, stages: int, axes: tuple[tuple[str, int], ...], crossing: float) -> None:
        self.draw = draw
        self.crossing = crossing
        self.count = stages
        self.axes = axes
        self.sizes = {axis: size for axis, size in axes if size > 1}
        self.ops: list[dict[Phase, list[Op]]] = [{phase: [] for phase in PHASES} for _ in range(stages)]
        self.specs: dict[str, TensorSpec] = {"batch/x": activation(ROWS)}
        self.home: dict[str, tuple[int, Phase]] = {}
        self.roots: dict[tuple[int, str], str] = {}
        self.differing: set[str] = set()
        self.waited: set[str] = set()
        """Values that are not the same on all ranks along tp."""
        self.edges: dict[tuple[str, int], Phase] = {}
        """(value, target stage) -> the phase that reads it first, as programs are made in this order."""
        self.late: list[list[str]] = [[] for _ in range(stages)]
        """Collectives that have started and are waited for in a later phase."""
        self.tensors = random_tensors(draw, stages, self.sizes)
        for tensor in self.tensors:
            self.specs[f"param/{tensor.name}"] = tensor.spec
            if any(shard.axis == "tp" for shard in tensor.shards):
                self.differing.add(f"param/{tensor.name}")

    def job(self, microbatches: int) -> Job:
        last = self.count - 1
        backwards = range(last, -1, -1)
        for phase, order in ((Phase.F, range(self.count)), (Phase.I, backwards), (Phase.W, backwards)):
            for stage in order:
                self._program(stage, phase)
        edges = tuple(
            Edge(at, value, *self.home[value], target, user, self.specs[value])
            for at, ((value, target), user) in enumerate(self.edges.items())
        )
        reads = [
            {name for ops in programs.values() for op in ops for name in op.uses} for programs in self.ops
        ]
        with_buffer = tuple(s for s, names in enumerate(reads) if "buffer/b" in names)
        return Job(
            name="random",
            microbatches=microbatches,
            stages=tuple(Stage(s, {p: tuple(ops[p]) for p in PHASES}) for s, ops in enumerate(self.ops)),
            edges=edges,
            parameters=tuple(tensor.parameter() for tensor in self.tensors),
            buffers=(Buffer("b", activation(ROWS), with_buffer),),
            constants=(),
            batch=(("x", activation(ROWS)),),
            loss=(last, "loss"),
            axes=self.axes,
        )

    # --- programs -----------------------------------------------------------------------------------

    def _program(self, stage: int, phase: Phase) -> None:
        draw = self.draw
        waiting = self.late[stage]
        self.late[stage] = []
        self._op(stage, phase, (self._first(stage, phase),))
        for _ in range(draw.randint(1, 6)):
            if waiting and draw.random() < 0.4:
                self._wait(stage, phase, waiting.pop(draw.randrange(len(waiting))))
            if self.sizes and draw.random() < 0.35:
                waiting += self._start(stage, phase, draw.choice(list(self.sizes)), draw.choice(KINDS))
            else:
                self._op(stage, phase, self._some(stage, phase, draw.randint(1, 3)))
        for start in waiting:
            if phase is not Phase.W and draw.random() < self.crossing:
                self.late[stage].append(start)
            else:
                self._wait(stage, phase, start)
        if phase is Phase.F and stage == self.count - 1:
            self._loss(stage)
        self._gradients(stage, phase)

    def _first(self, stage: int, phase: Phase) -> str:
        """What ties the stage to its neighbour, so that no stage is alone."""
        if phase is Phase.F:
            return "batch/x" if stage == 0 else self._one_of(stage - 1, Phase.F)
        if phase is Phase.I:
            return "tangent" if stage == self.count - 1 else self._one_of(stage + 1, Phase.I)
        return self._one_of(stage, Phase.I)

    def _one_of(self, stage: int, phase: Phase) -> str:
        return self.draw.choice([op.name for op in self.ops[stage][phase] if not op.collective])

    def _some(self, stage: int, phase: Phase, count: int) -> tuple[str, ...]:
        """Values that the program may read: own ones, mostly the latest; of other stages; from outside."""
        draw, found = self.draw, []
        own = [op.name for sub in PHASES for op in self.ops[stage][sub] if not op.collective]
        others = [
            name
            for name, (at, made) in self.home.items()
            if at != stage and (made is Phase.F if phase is not Phase.F else at < stage)
        ]
        # Input gradients come from stages behind this one, which have theirs when this one makes its own.
        later = [n for n, (at, made) in self.home.items() if at > stage and made is Phase.I]
        params = [f"param/{t.name}" for t in self.tensors if stage in t.stages]
        for _ in range(count):
            chance = draw.random()
            if chance < 0.6:
                found.append(draw.choice(own[-4:]))
            elif chance < 0.7:
                found.append(draw.choice(own))
            elif chance < 0.8 and others:
                found.append(draw.choice(others))
            elif chance < 0.85 and later and phase is not Phase.F:
                found.append(draw.choice(later))
            elif chance < 0.97:
                found.append(draw.choice(params or ["batch/x"]))
            else:
                found.append(draw.choice(["batch/x", "buffer/b"]))
        return tuple(dict.fromkeys(found))

    def _add(self, stage: int, phase: Phase, op: Op) -> str:
        if op.alias is not None:  # of a view, the stage's own root
            op = replace(op, alias=self.roots.get((stage, op.alias), op.alias))
            self.roots[stage, op.name] = str(op.alias)
        self.ops[stage][phase].append(op)
        spec = op.outputs[0]
        assert spec is not None
        self.specs[op.name] = spec
        if op.collective is None:
            self.home[op.name] = (stage, phase)
        for name in op.uses:
            if name in self.home and self.home[name][0] != stage:
                self.edges.setdefault((name, stage), phase)
        if any(name in self.differing for name in op.uses):
            self.differing.add(op.name)
        return op.name

    def _name(self, stage: int, phase: Phase) -> str:
        return f"{phase.value.lower()}{stage}.{len(self.ops[stage][phase])}"

    def _op(self, stage: int, phase: Phase, reads: tuple[str, ...], spec: TensorSpec | None = None) -> str:
        draw, name = self.draw, self._name(stage, phase)
        source = reads[0]
        rows = self.specs.get(source, activation(ROWS)).shape
        size = self.sizes.get("tp", 1)
        if spec is None and len(rows) == 2 and source in self.home:
            chance = draw.random()
            if chance < 0.1:
                view = Op(name, WORK, (Ref(source),), (), (self.specs[source],), alias=source)
                return self._add(stage, phase, view)
            waited = source in self.waited
            if chance < 0.15 and rows[0] % size == 0 and rows[0] > size > 1 and not waited:
                part = TensorSpec((rows[0] // size, *rows[1:]), "float32")
                args = (Ref(source), 0, "tp", size)
                self.differing.add(name)
                return self._add(stage, phase, Op(name, CHUNK, args, (), (part,), alias=source))
        made = spec or activation(rows[0] if len(rows) == 2 and rows[1] == 8 else ROWS)
        args = tuple(Ref(use) for use in reads)
        random = spec is None and draw.random() < 0.1
        return self._add(stage, phase, Op(name, WORK, args, (), (made,), random=random, flops=1000))

    def _start(self, stage: int, phase: Phase, axis: str, kind: str) -> list[str]:
        """The name of a collective that has started; none where the value has no fitting shape."""
        # What was summed or gathered is full on all ranks: no one sums that.
        made = (op for sub in PHASES for op in self.ops[stage][sub])
        own = [op.name for op in made if not op.collective and op.target != WAIT]
        if not own:
            return []
        size = self.sizes[axis]
        source = self.draw.choice(own[-3:])
        rows, *rest = self.specs[source].shape or (0,)
        if axis == "cp":
            kind = "all_gather"  # nothing differs along it, so that nothing is summed
        if kind == "all_gather":
            rows *= size
        elif kind == "reduce_scatter":
            if rows % size:
                return []
            rows //= size
        if not 1 <= rows <= 8 * ROWS:
            return []
        return [self._communicate(stage, phase, axis, kind, source, TensorSpec((rows, *rest), "float32"))]

    def _communicate(
        self, stage: int, phase: Phase, axis: str, kind: str, source: str, spec: TensorSpec
    ) -> str:
        extra = () if kind == "all_gather" else ("sum",)
        args = (Ref(source), *extra, axis, self.sizes[axis])
        name = self._add(stage, phase, Op(self._name(stage, phase), f"comm.{kind}", args, (), (spec,)))
        if axis == "tp":
            (self.differing.add if kind == "reduce_scatter" else self.differing.discard)(name)
        return name

    def _wait(self, stage: int, phase: Phase, start: str, name: str = "") -> str:
        name = name or self._name(stage, phase)
        self.waited.add(name)
        return self._add(stage, phase, Op(name, WAIT, (Ref(start),), (), (self.specs[start],), alias=start))

    def _loss(self, stage: int) -> None:
        """A scalar that all ranks along tp agree on."""
        scalar = TensorSpec((), "float32")
        reads = tuple(Ref(name) for name in self._some(stage, Phase.F, 2))
        if not any(ref.name in self.differing for ref in reads):
            self._add(stage, Phase.F, Op("loss", WORK, reads, (), (scalar,)))
            return
        self._add(stage, Phase.F, Op("part", WORK, reads, (), (scalar,)))
        start = self._communicate(stage, Phase.F, "tp", "all_reduce", "part", scalar)
        self._wait(stage, Phase.F, start, "loss")

    def _gradients(self, stage: int, phase: Phase) -> None:
        """Each trained parameter of the stage gets its gradient, in W or in I."""
        for tensor in self.tensors:
            here = stage in tensor.stages and tensor.trained and phase is not Phase.F
            if not here or any(at == stage for at, *_ in tensor.grads):
                continue
            if phase is Phase.I and self.draw.random() < 0.7:
                continue
            reads = self._some(stage, phase, 2)
            sharded = any(shard.axis == "tp" for shard in tensor.shards)
            if tensor.differs and not any(name in self.differing for name in reads):
                index = Op(
                    self._name(stage, phase), INDEX, ("tp", self.sizes["tp"]), (), (TensorSpec((), "int64"),)
                )
                self.differing.add(index.name)
                reads = (*reads, self._add(stage, phase, index))
            made = self._op(stage, phase, reads, tensor.spec)
            if made in self.differing and not tensor.differs and not sharded:
                start = self._communicate(stage, phase, "tp", "all_reduce", made, tensor.spec)
                made = self._wait(stage, phase, start)
            tensor.grads.append((stage, phase, made))
