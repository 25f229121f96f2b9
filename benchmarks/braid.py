"""Tensor-parallel all-reduces of a pipeline that hide: our windows beside STP's braid, on described costs.

    python -m benchmarks braid [RANKS ...]

"Synergistic Tensor and Pipeline Parallelism" (NeurIPS 2025, arXiv 2510.27257) braids units of a forward with
units of a backward by hand, so that each hides the other's all-reduces. Its table, for p ranks of two chunks
each and m microbatches, is the time in which a rank's compute waits for all-reduces, where AR are those of
one pass, forward or backward, over one chunk:

    interleaved 1F1B  2m AR        those of forwards; those of backwards are under weight gradients
    ZB-V              4m AR        all, as weight gradients are not beside their input gradients
    STP               (2p + 1) AR

and beside the work and these, a step has a bubble of (p - 1) (F + AR + I - W) with STP.

A chunk here is a layer of two units, attention and MLP, with an all-reduce behind each. F, I and W of a unit
take equally long, messages nothing. Prints one row for each number of ranks; docs/overlap.md
has the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from stretto.ir.action import Phase, Schedule
from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.plan import ItemKind, Plan
from stretto.ir.program import WAIT, Edge, Job, Op, OverlapMode, Parameter, Ref, Shard, Stage, TensorSpec
from stretto.planning.make_plan import make_plan
from stretto.schedule.families import make_schedule
from stretto.schedule.timing import peak_live
from stretto.simulating import simulate

UNITS = 2
"""Of a chunk: attention and MLP."""

UNIT_US = 100.0
"""F, I or W of one unit."""

CHUNK_US = UNITS * UNIT_US

WORK = "made_up.work.default"
"""An op of no library."""

VALUE = TensorSpec((256, 512), "float32")
WEIGHT = TensorSpec((512, 256), "float32")


class _Programs(dict[Phase, list[Op]]):
    """Of a chunk that is being made."""

    def op(self, phase: Phase, name: str, *uses: str, spec: TensorSpec = VALUE) -> str:
        args = tuple(Ref(use) for use in uses)
        self[phase].append(Op(name, WORK, args, (), (spec,), flops=1000))
        return name

    def summed(self, phase: Phase, value: str) -> str:
        start = Op(f"{value}_sum", ALL_REDUCE.target, (Ref(value), "sum", "tp", 2), (), (VALUE,))
        wait = Op(f"{value}_wait", WAIT, (Ref(start.name),), (), (VALUE,), alias=start.name)
        self[phase] += [start, wait]
        return wait.name


def stack(stages: int, microbatches: int) -> Job:
    """The job, over tp = 2."""
    made: list[Stage] = []
    parameters: list[Parameter] = []
    edges: list[Edge] = []
    last = stages - 1
    value = "batch/x"
    for s in range(stages):
        chunk = _Programs({Phase.F: [], Phase.I: [], Phase.W: []})
        inputs: list[str] = []
        for u in range(UNITS):
            inputs.append(value)
            value = chunk.summed(Phase.F, chunk.op(Phase.F, f"f{s}.{u}", value, f"param/w{s}.{u}"))
        if s == last:
            chunk.op(Phase.F, "loss", value, spec=TensorSpec((), "float32"))
        else:
            edges.append(Edge(s, value, s, Phase.F, s + 1, Phase.F, VALUE))
        gradient = "tangent" if s == last else f"i{s + 1}.0_wait"
        for u in reversed(range(UNITS)):
            name = f"w{s}.{u}"
            chunk.op(Phase.W, name, gradient, inputs[u], spec=WEIGHT)
            gradient = chunk.summed(Phase.I, chunk.op(Phase.I, f"i{s}.{u}", gradient, f"param/{name}"))
            grads = ((s, Phase.W, name),)
            parameters.append(Parameter(name, WEIGHT, (s,), grads, name, shards=(Shard("tp", 1),)))
        made.append(Stage(s, {phase: tuple(ops) for phase, ops in chunk.items()}))
    edges += [Edge(last + s - 1, f"i{s}.0_wait", s, Phase.I, s - 1, Phase.I, VALUE) for s in range(1, stages)]
    return Job(
        name="stack over tp",
        microbatches=microbatches,
        stages=tuple(made),
        edges=tuple(edges),
        parameters=tuple(parameters),
        buffers=(),
        constants=(),
        batch=(("x", VALUE),),
        loss=(last, "loss"),
        axes=(("tp", 2),),
    )


def described(job: Job, reduce_us: float) -> Costs:
    """reduce_us: an all-reduce."""
    times = {
        (stage.index, op.name): UNIT_US if op.target == WORK and op.name != "loss" else 0.0
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
    }
    cost = CollectiveCost(Curve(((0.0, 0.0), (float(VALUE.nbytes), reduce_us))), 0.0, 0.0, "described")
    return Costs(times, {}, Link(0.0, float("inf")), 0.0, "described", {("tp", ALL_REDUCE.name): cost})


@dataclass(frozen=True, slots=True)
class BraidTable:
    """The closed forms for p ranks and m microbatches; reduce_us: an all-reduce. Times in microseconds."""

    p: int
    m: int
    reduce_us: float

    @property
    def ar_us(self) -> float:
        """AR."""
        return UNITS * self.reduce_us

    @property
    def interleaved_us(self) -> float:
        return 2 * self.m * self.ar_us

    @property
    def zb_v_us(self) -> float:
        return 4 * self.m * self.ar_us

    @property
    def braid_us(self) -> float:
        return (2 * self.p + 1) * self.ar_us

    @property
    def braid_step_us(self) -> float:
        """Work, bubble and all-reduces."""
        return 6 * self.m * CHUNK_US + (self.p - 1) * (CHUNK_US + self.ar_us) + self.braid_us


def planned(table: BraidTable, family: str, overlap: OverlapMode, *, more_live: int | None = None) -> Plan:
    """more_live: of live microbatches, how many more than in the family's order a stage may keep; None is any
    number."""
    schedule: Schedule = make_schedule(family, table.p, table.m)
    job = stack(schedule.stages, table.m)
    if more_live is not None:
        job = replace(job, max_live=max(peak_live(schedule)) + more_live)
    return make_plan(job, described(job, table.reduce_us), schedule=schedule, overlap=overlap)


def live_chunks(plan: Plan) -> int:
    """The most chunks of microbatches that a rank keeps at once, from the first op of a forward that computes
    to the last of its backward."""
    most = 0
    for rank in range(plan.ranks):
        kept: dict[tuple[int, int], tuple[int, int]] = {}
        at = 0
        for _, run, window in plan.runs(rank):
            for item in window.items:
                stage = window.parts[item.part][0]
                if item.kind is ItemKind.OP and plan.costs.op_us[stage, str(item.ref)]:
                    chunk = stage, run.microbatches[item.part]
                    kept[chunk] = kept.get(chunk, (at, at))[0], at
                at += 1
        changes = [(begin, 1) for begin, _ in kept.values()] + [(end + 1, -1) for _, end in kept.values()]
        most = max(most, *accumulate(by for _, by in sorted(changes)))
    return most


def exposed_us(plan: Plan) -> float:
    """Of the rank whose compute waits longest for all-reduces."""
    return max(simulate(plan).exposed_axis_us().get("tp", (0.0,)))


def main(arguments: Sequence[str]) -> None:
    print(
        "| ranks, microbatches | interleaved 1F1B | ZB-V | STP | windows | with STP's memory |\n"
        "| --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    for p in map(int, arguments or (2, 4, 8)):
        table = BraidTable(p, 4 * p, UNIT_US / 2)
        others = planned(table, "interleaved-1f1b", "local"), planned(table, "zb-v", "off")
        cells = [_cell(table, exposed_us(plan), simulated_us(plan)) for plan in others]
        cells.append(_cell(table, table.braid_us, table.braid_step_us))
        for more_live in (None, p):
            plan = planned(table, "zb-v", "window", more_live=more_live)
            cells.append(f"{_cell(table, exposed_us(plan), simulated_us(plan))}, {live_chunks(plan)} chunks")
        print(f"| {p}, {table.m} | {' | '.join(cells)} |", flush=True)


def simulated_us(plan: Plan) -> float:
    """The step."""
    return simulate(plan).step_us


def _cell(table: BraidTable, waits_us: float, step_us: float) -> str:
    return f"{waits_us / table.ar_us:.1f} AR, {step_us / table.braid_step_us:.3f}"
