"""Made-up jobs with more than pipeline messages: tensor-parallel collectives, data-parallel sums.

Each stage is `blocks` blocks. A block's forward multiplies, sums over tp and adds to its input (or, with
`sequence`, gathers, multiplies and scatters); its input gradient does the same backward; its weight gradient
waits for no collective. Each stage has a weight a block and one norm whose gradient is partial over tp.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from stretto.ir.action import Phase, Schedule
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.flow import OVER_STEP
from stretto.ir.plan import Item, ItemKind, Plan, Window
from stretto.ir.program import Arg, Job, Op, OverlapMode, Parameter, Ref, Shard, Stage, TensorSpec
from stretto.planning.lower import lower
from stretto.schedule.once import around_starts
from tests.synthetic import ACTIVATION, WORK, chain

WEIGHT = TensorSpec((512, 256), "float32")
NORM = TensorSpec((512,), "float32")
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def make_comm_job(
    stages: int,
    microbatches: int,
    *,
    axes: tuple[tuple[str, int], ...] = (("tp", 2),),
    blocks: int = 1,
    sequence: bool = False,
    tied: bool = False,
) -> Job:
    """A chain of `stages`. axes: other than pp; without tp there are no collectives in programs.

    sequence: gather before and scatter after each multiplication instead of one all-reduce. tied: the
    first and the last stage's first weights are one tensor.
    """
    size = dict(axes).get("tp", 1)
    made: list[Stage] = []
    parameters: list[Parameter] = []
    last = stages - 1
    for s in range(stages):
        stage = _Stage(size, sequence)
        value = "batch/x" if s == 0 else f"y{s - 1}"
        inputs: list[str] = []
        for b in range(blocks):
            inputs.append(value)
            value = stage.multiply(Phase.F, f"{s}.{b}", "f", value, f"param/w{s}.{b}")
        stage.op(Phase.F, f"y{s}", value, f"param/n{s}")
        if s == last:
            stage.op(Phase.F, "loss", f"y{s}", spec=TensorSpec((), "float32"))
        gradient = stage.op(Phase.I, f"d{s}", "tangent" if s == last else f"dx{s + 1}", f"y{s}")
        stage.op(Phase.W, f"dn{s}", gradient, value, spec=NORM)
        for b in reversed(range(blocks)):
            stage.op(Phase.W, f"dw{s}.{b}", gradient, inputs[b], spec=WEIGHT)
            gradient = stage.multiply(Phase.I, f"{s}.{b}", "b", gradient, f"param/w{s}.{b}")
        stage.op(Phase.I, f"dx{s}", gradient)
        made.append(Stage(s, {phase: tuple(ops) for phase, ops in stage.programs.items()}))
        for b in range(blocks):
            name = f"w{s}.{b}"
            shards = (Shard("tp", 1),) if size > 1 else ()
            tie = "w0.0" if tied and s == last and b == 0 else name
            grads = ((s, Phase.W, f"dw{s}.{b}"),)
            parameters.append(Parameter(name, WEIGHT, (s,), grads, tie, shards=shards))
        partial = ("tp",) if size > 1 else ()
        parameters.append(Parameter(f"n{s}", NORM, (s,), ((s, Phase.W, f"dn{s}"),), f"n{s}", partial=partial))
    return chain("synthetic with collectives", microbatches, made, parameters, ACTIVATION, axes)


class _Stage:
    """The programs of a stage that is being made; size: of the tp group."""

    def __init__(self, size: int, sequence: bool) -> None:
        self.programs: dict[Phase, list[Op]] = {Phase.F: [], Phase.I: [], Phase.W: []}
        self._size = size
        self._sequence = sequence
        shape = (ACTIVATION.shape[0] * size, *ACTIVATION.shape[1:])
        self._gathered = TensorSpec(shape, ACTIVATION.dtype)

    def op(self, phase: Phase, name: str, *uses: str, spec: TensorSpec = ACTIVATION) -> str:
        args = tuple(Ref(use) for use in uses)
        self.programs[phase].append(Op(name, WORK, args, (), (spec,), flops=1000))
        return name

    def multiply(self, phase: Phase, at: str, letter: str, value: str, weight: str) -> str:
        """A block's multiplication with its collectives, added to its input."""
        if self._sequence:
            full = self._communicate(phase, "all_gather", f"{letter}g{at}", value, self._gathered)
            product = self.op(phase, f"{letter}m{at}", full, weight, spec=self._gathered)
            summed = self._communicate(phase, "reduce_scatter", f"{letter}s{at}", product, ACTIVATION)
        else:
            product = self.op(phase, f"{letter}m{at}", value, weight)
            summed = self._communicate(phase, "all_reduce", f"{letter}r{at}", product, ACTIVATION)
        return self.op(phase, f"{letter}y{at}", value, summed)

    def _communicate(self, phase: Phase, kind: str, name: str, value: str, spec: TensorSpec) -> str:
        if self._size == 1:
            return value
        extra: tuple[Arg, ...] = () if kind == "all_gather" else ("sum",)
        start = Op(name, f"comm.{kind}", (Ref(value), *extra, "tp", self._size), (), (spec,))
        waited = Op(f"{name}_w", "comm.wait", (Ref(name),), (), (spec,), alias=name)
        self.programs[phase] += [start, waited]
        return waited.name


def make_comm_costs(
    job: Job,
    *,
    op_us: float = 100.0,
    start_us: float = 0.0,
    collective_us: float | Mapping[str, float] = 50.0,
    latency_us: float = 0.0,
    bytes_per_us: float = float("inf"),
    processor_us_per_mb: float = 0.0,
    slowdown: float = 0.0,
    shared: tuple[str, ...] = (),
) -> Costs:
    """Every compute op takes `op_us`. collective_us: what a collective of one activation takes on every axis,
    or by axis; time is in proportion to bytes."""
    times: dict[tuple[int, str], float] = {}
    for stage in job.stages:
        for ops in stage.ops.values():
            for op in ops:
                if op.target != "comm.wait":
                    times[stage.index, op.name] = start_us if op.collective else op_us
    collectives: dict[tuple[str, str], CollectiveCost] = {}
    for axis, size in job.axes:
        each = collective_us if isinstance(collective_us, int | float) else collective_us[axis]
        curve = Curve(((0.0, 0.0), (float(ACTIVATION.nbytes), each)))
        for kind in KINDS if size > 1 else ():
            collectives[axis, kind] = CollectiveCost(curve, processor_us_per_mb, slowdown, "made up")
    link = Link(latency_us, bytes_per_us)
    return Costs(times, {}, link, 0.0, "made up", collectives, shared)


def plan_with(job: Job, schedule: Schedule, costs: Costs, *, overlap: OverlapMode = "local") -> Plan:
    """Lower `schedule` onto `job`."""
    return lower(job, schedule, costs, overlap=overlap)


def make_comm_plan(
    schedule: Schedule,
    *,
    axes: tuple[tuple[str, int], ...] = (("tp", 2),),
    blocks: int = 1,
    sequence: bool = False,
    tied: bool = False,
    **costs: float,
) -> Plan:
    """A plan of a made-up job of the schedule's stages and microbatches; `costs` as in `make_comm_costs`."""
    shape = schedule.stages, schedule.microbatches
    job = make_comm_job(*shape, axes=axes, blocks=blocks, sequence=sequence, tied=tied)
    return plan_with(job, schedule, make_comm_costs(job, **costs))  # type: ignore[arg-type]


def reduced(program: Sequence[Op]) -> dict[str, tuple[str, ...]]:
    """Start of a program that runs once a step -> what it reduces: parameters, or "step/loss"."""
    leads, _ = around_starts(program)
    return {
        start: tuple(n.removeprefix("grad/") for op in lead for n in op.uses if n.startswith(OVER_STEP))
        for start, lead in leads.items()
    }


def shuffled(plan: Plan, seed: int) -> Plan:
    """The plan with the items of every window in another order that respects what reads what.

    Collectives of one axis start in another order as well; messages keep theirs, as peers post for it.
    """
    draw = random.Random(seed)
    # Where nothing else runs, reductions of one gradient are in one round after the other.
    windows = {
        name: _shuffled(plan, window, draw) if window.actions else window
        for name, window in plan.windows.items()
    }
    return replace(plan, windows=windows)


def _shuffled(plan: Plan, window: Window, draw: random.Random) -> Window:
    job = plan.job
    made: dict[tuple[int, str], int] = {}
    for at, item in enumerate(window.items):
        if item.kind is ItemKind.WAIT:
            made[item.part, job.edges[int(item.ref)].value] = at
        elif item.kind is ItemKind.OP:
            made[item.part, str(item.ref)] = at
    ops = {
        (part, op.name): op
        for part, (stage, phase) in enumerate(window.parts)
        for sub in phase.programs
        for op in job.stages[stage].ops[sub]
    }
    needs: dict[int, set[int]] = defaultdict(set)
    adds: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for parameter in job.parameters:
        adds[f"grad/{parameter.name}"] |= {(stage, value) for stage, _, value in parameter.grads}
    touched: dict[str, set[int]] = defaultdict(set)
    messages = [at for at, item in enumerate(window.items) if item.kind in (ItemKind.WAIT, ItemKind.SEND)]
    for before, after in pairwise(messages):
        needs[after].add(before)
    for at, item in enumerate(window.items):
        reads: tuple[str, ...] = ()
        if item.kind is ItemKind.OP:
            reads = ops[item.part, str(item.ref)].uses
            writes = ops[item.part, str(item.ref)].writes
            for name in dict.fromkeys((*reads, *writes)):
                adding = adds.get(name, set())
                needs[at] |= {n for (part, v), n in made.items() if (window.parts[part][0], v) in adding}
                needs[at] |= touched[name] if name in adds else set()
                touched[name].add(at)
        elif item.kind is ItemKind.SEND:
            reads = (job.edges[int(item.ref)].value,)
        mates = (item.part, *window.mates(item.part))
        needs[at] |= {made[part, name] for part in mates for name in reads if (part, name) in made}
        if item.kind is ItemKind.OP and window.parts[item.part][1] is not Phase.F:
            # All of a microbatch's forward comes before its backward.
            forwards = {part for part in mates if window.parts[part][1] is Phase.F}
            needs[at] |= {n for (part, _), n in made.items() if part in forwards}
    done: set[int] = set()
    order: list[Item] = []
    left = list(range(len(window.items)))
    while left:
        at = draw.choice([at for at in left if needs[at] <= done])
        left.remove(at)
        done.add(at)
        order.append(window.items[at])
    return replace(window, items=tuple(order))
