"""A product and the collective of its result are cut in parts, where the cost model says that it pays.

Cut by columns, the collective of one part runs under the product of the next. It costs the overhead of more
ops, and a copy that joins the parts.

    1. Find products (mm) whose result is for one collective alone (an all-reduce or reduce-scatter of sums),
       with nothing between that needs more than one column at a time (`stretto.ir.dims`).
    2. Time by the prices of the ops that k parts would be: p a part's (with its copies and its start), c its
       collective, r what c takes from the compute lane, j the copy that joins:
       p + (k - 1) max(p + r, c) + c + j, against the full tensor's. The best k is taken if it wins by GAIN.
    3. In the place of the chain: for each part the columns of the matrix (a view), product, chain and start;
       then waits and the copy.

Parts may be rounded otherwise than the full tensor: equal to 1e-10 in float64, not bit by bit. So it is done
only when asked for (`split_ops`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.ir.collectives import Collective
from stretto.ir.dims import dims_of, operands
from stretto.ir.flow import PHASES
from stretto.ir.prices import Prices, Specs, specs_of
from stretto.ir.program import VIEWS, WAIT, Job, Op, Ref, Stage, TensorSpec
from stretto.ir.transfers import axis_time
from stretto.passes.rewrite import changed, spec_with, stage_of, strides_of, users_of
from stretto.passes.step import Context, LeftOutError, Step

PARTS = (2, 3, 4, 6, 8)
"""Numbers of parts that are tried."""

ALIGNMENT = 8
"""A part has a multiple of this many columns: half-precision kernels want it (NVIDIA, "Matrix Multiplication
Background"), and others lose nothing."""

PERMUTE = "aten.permute.default"

GAIN = 0.05
"""A cut must save more than this share of the product and its collective. Assumed: below it, what an order
hides anyway is worth more than what the parts hide."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Step 1. between: views and copies from the product to the start; parts: how many it is cut into."""

    stage: int
    product: Op
    between: tuple[Op, ...]
    start: Op
    wait: Op
    parts: int = 1

    @property
    def columns(self) -> int:
        return self.product.made.shape[1]


def split_products(step: Step, context: Context) -> Step:
    """The step with its products cut where that pays, and where the job asks for it.

    Method: a product is decomposed to overlap with its collective as in Wang et al., "Overlap Communication
    with Dependent Computation via Decomposition" (ASPLOS 2023).
    """
    job = step.job
    if not job.split_ops or not job.trains:
        raise LeftOutError
    choice = _Choice(job, context.prices)
    cuts: dict[int, list[Chain]] = {}
    kept = {job.loss[1], *(edge.value for edge in job.edges), *(metric.value for metric in job.metrics)}
    kept |= {value for p in job.parameters for _, _, value in p.grads}
    for stage in job.stages:
        for chain in chains(stage):
            inner = {op.name for op in (chain.product, *chain.between, chain.start)}
            if chain.product.args[1].name not in choice.specs or not kept.isdisjoint(inner):
                continue
            parts = choice.best(chain)
            if parts > 1:
                cuts.setdefault(stage.index, []).append(replace(chain, parts=parts))
    if not cuts:
        raise LeftOutError
    stages = tuple(
        _cut(stage, cuts[stage.index], choice.specs) if stage.index in cuts else stage for stage in job.stages
    )
    return replace(step, job=replace(job, stages=stages))


def chains(stage: Stage) -> list[Chain]:
    """Step 1 for one stage."""
    users = users_of(op for phase in PHASES for op in stage.ops[phase])
    result: list[Chain] = []
    for phase in PHASES:
        here = {op.name: op for op in stage.ops[phase]}
        for start in stage.ops[phase]:
            reduced = start.kind is not None and start.kind.sums and start.how == "sum"
            waits = users[start.name]
            if not reduced or len(waits) != 1 or waits[0].target != WAIT or waits[0].name not in here:
                continue
            between: list[Op] = []
            source: Op | None = here.get(start.args[0].name)
            while source is not None and len(users[source.name]) == 1 and _keeps_columns(source, here):
                between.append(source)
                source = here.get(source.args[0].name)
            if source is None or source.target != "aten.mm.default" or len(users[source.name]) != 1:
                continue
            # Of one dim: the columns are what is scattered.
            if len(start.made.shape) > 1 and start.made.shape[-1] == source.made.shape[1]:
                result.append(Chain(stage.index, source, tuple(reversed(between)), start, waits[0]))
    return result


def _keeps_columns(op: Op, here: Mapping[str, Op]) -> bool:
    """Whether the op makes each part of its last dim out of that part of its only operand's."""
    source = here.get(op.args[0].name) if op.args and isinstance(op.args[0], Ref) else None
    before, after = None if source is None else source.spec, op.spec
    if before is None or after is None or op.random or len(operands(op)) != 1:
        return False
    if before.shape[-1:] != after.shape[-1:]:
        return False
    if op.target in VIEWS:
        return before.stride is None
    rule = dims_of(op, [before])
    if (
        rule is None
        or not rule.inputs[0]
        or rule.outputs[0][-1:] != rule.inputs[0][-1:]
        or rule.inputs[0][-1] in rule.full
    ):
        return False
    return op.target == PERMUTE or (op.alias is None and after.stride is None)


class _Choice:
    """Step 2."""

    def __init__(self, job: Job, prices: Prices) -> None:
        self._prices = prices
        self._costs = prices.costs_of(job)
        self.specs = specs_of(job)

    def best(self, chain: Chain) -> int:
        """The number of parts, 1 for a chain that is not to be cut."""
        asked = chain.start.collective
        assert asked is not None
        if (asked.axis, asked.kind) not in self._costs.collectives:
            return 1
        ops = (chain.product, *chain.between, chain.start)
        full_us = sum(self._costs.op_us.get((chain.stage, op.name), 0.0) for op in ops)
        best, best_us = 1, (full_us + self._collective_us(asked.nbytes, asked)[0]) * (1.0 - GAIN)
        for count in PARTS:
            if chain.columns % (count * ALIGNMENT):
                continue
            total_us = self._parts_us(replace(chain, parts=count), asked)
            if total_us < best_us:
                best, best_us = count, total_us
        return best

    def _collective_us(self, nbytes: int, asked: Collective) -> tuple[float, float]:
        """From its call on, alone on its lane, as the simulation has it, and the compute lost to it."""
        time = axis_time(self._costs, asked.axis, asked.kind, nbytes)
        return time.us, time.load * time.us

    def _parts_us(self, chain: Chain, asked: Collective) -> float:
        """What a chain in parts takes."""
        part, join = _part(chain, 0, self.specs), _join(chain)
        made = (*part, *join)
        specs = self.specs | {op.name: spec for op in made for spec in op.outputs[:1] if spec is not None}
        p = sum(self._prices.us(op, specs) for op in part)
        c, r = self._collective_us(asked.nbytes // chain.parts, asked)
        return p + (chain.parts - 1) * max(p + r, c) + c + self._prices.us(join[-1], specs)


def _cut(stage: Stage, cuts: Sequence[Chain], specs: Specs) -> Stage:
    """Step 3 for one stage."""
    # The chain is where its start was; what waited for it waits for the copy of its parts.
    place = {chain.start.name: chain for chain in cuts}
    joined = {chain.wait.name: chain for chain in cuts}
    gone = {op.name for chain in cuts for op in (chain.product, *chain.between)}

    def news(op: Op) -> list[Op]:
        if op.name in place:
            chain = place[op.name]
            return [new for part in range(chain.parts) for new in _part(chain, part, specs)]
        if op.name in joined:
            return _join(joined[op.name])
        return [] if op.name in gone else [op]

    return stage_of(stage.index, changed(stage, news).ops)


def _part(chain: Chain, part: int, known: Specs) -> list[Op]:
    """The columns of the matrix, their product, what moves it, and the start."""
    width = chain.columns // chain.parts
    product, matrix = chain.product, chain.product.args[1]
    spec = known[matrix.name]
    columns = Op(
        f"{product.name}_columns{part}",
        "aten.slice.Tensor",
        (matrix, 1, part * width, (part + 1) * width),
        (),
        (spec_with((spec.shape[0], width), spec.dtype, strides_of(spec)),),
        matrix.name,
        module=product.module,
    )
    made = [columns]
    before: TensorSpec | None = None
    for op in (product, *chain.between, chain.start):
        full = op.made
        shape = (*full.shape[:-1], width)
        args = (Ref(made[-1].name), *op.args[1:])
        result = TensorSpec(shape, full.dtype)
        if op is product:
            args = (op.args[0], Ref(columns.name))
        elif op.target in VIEWS:
            args = (args[0], shape)
        elif op.target == PERMUTE:
            assert before is not None
            strides = strides_of(before)
            result = spec_with(shape, full.dtype, [strides[int(d) % len(shape)] for d in op.args[1]])
        name, alias = f"{op.name}_part{part}", None if op.alias is None else made[-1].name
        flops = op.flops * width // chain.columns
        made.append(replace(op, name=name, args=args, outputs=(result,), alias=alias, flops=flops))
        before = result
    return made


def _join(chain: Chain) -> list[Op]:
    """The waits, and the copy that has the name of the full tensor's wait."""
    full = chain.wait.made
    waits = []
    for part in range(chain.parts):
        spec = TensorSpec((*full.shape[:-1], chain.columns // chain.parts), full.dtype)
        start = f"{chain.start.name}_part{part}"
        name = f"{chain.wait.name}_part{part}"
        waits.append(replace(chain.wait, name=name, args=(Ref(start),), outputs=(spec,), alias=start))
    parts = tuple(Ref(wait.name) for wait in waits)
    join = replace(chain.wait, target="aten.cat.default", args=(parts, len(full.shape) - 1), alias=None)
    return [*waits, join]
