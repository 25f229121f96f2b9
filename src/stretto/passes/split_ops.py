"""A product and the collective of its result are cut in parts, where the cost model says that it pays.

A rowwise matrix makes a sum over ranks, and so does a colwise one's input gradient: the collective begins
when the whole product is there, and what follows waits for all of it. Cut by columns, the collective of one
part runs under the product of the next. It costs the overhead of more ops, and a copy that joins the parts.

    1. Find products (mm) whose result is for one collective alone (an all-reduce or reduce-scatter of sums),
       with nothing but views and copies between that leave the last dim as it is.
    2. Time by the costs of the job, for k parts: p a part's product (with its copies and its start), c its
       collective, r what c takes from the compute lane, j the copy that joins:
       p + (k - 1) max(p + r, c) + c + j, against P + C for the whole. The best k is taken if it wins by GAIN.
    3. In the place of the chain: for each part the columns of the matrix (a view), product, chain and start;
       then waits and the copy. Started early and waited for late, they are ordinary ops to every order.

Parts of a product may be rounded otherwise than the whole (kernels choose by size): equal to 1e-10 in
float64, not bit by bit. So it is done only when asked for (`split_ops`); plans of different overlap modes may
then have different parts. Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.ir.action import Phase
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES
from stretto.ir.program import GETITEM, VIEWS, WAIT, Job, Op, Ref, Stage, TensorSpec
from stretto.ir.transfers import axis_time
from stretto.passes.rewrite import spec_with, strides_of

PARTS = (2, 3, 4, 6, 8)
"""Numbers of parts that are tried."""

ALIGNMENT = 8
"""A part has a multiple of this many columns: half-precision kernels want it (NVIDIA, "Matrix Multiplication
Background"), and others lose nothing."""

GAIN = 0.05
"""A cut must save more than this share of the product and its collective. Assumed: below it, what an order
hides anyway is worth more than what the parts hide."""

COPIES = ("aten.clone.default", "aten.cat.default", "aten.add.Tensor")
"""Ops whose time by bytes tells what a copy takes."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Step 1. between: views and copies from the product to the start; parts: how many it is cut into."""

    stage: int
    phase: Phase
    product: Op
    between: tuple[Op, ...]
    start: Op
    wait: Op
    parts: int = 1

    @property
    def columns(self) -> int:
        made = self.product.outputs[0]
        assert made is not None
        return made.shape[1]


def split_for_overlap(job: Job, costs: Costs) -> tuple[Job, Costs]:
    """The job with its products cut where that pays, and its costs; both as they are when it pays nowhere.

    The costs of parts are those of the whole by their share, above the time of the job's shortest op, which
    every op pays. Method: a product is decomposed to overlap with its collective as in Wang et al., "Overlap
    Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
    """
    prices = _Prices(job, costs)
    cuts: dict[int, list[Chain]] = {}
    specs = {f"param/{p.name}": p.spec for p in job.parameters}
    kept = {job.loss[1], *(edge.value for edge in job.edges)}
    kept |= {value for p in job.parameters for _, _, value in p.grads}
    for stage in job.stages:
        made = specs | _specs(stage)
        for chain in chains(stage):
            inner = {op.name for op in (chain.product, *chain.between, chain.start)}
            if chain.product.args[1].name not in made or not kept.isdisjoint(inner):
                continue
            parts = prices.best(chain)
            if parts > 1:
                cuts.setdefault(stage.index, []).append(replace(chain, parts=parts))
    if not cuts:
        return job, costs
    op_us = dict(costs.op_us)
    stages = tuple(
        _cut(stage, cuts[stage.index], specs, op_us, prices) if stage.index in cuts else stage
        for stage in job.stages
    )
    return replace(job, stages=stages), costs.with_times(op_us)


def chains(stage: Stage) -> list[Chain]:
    """Step 1 for one stage."""
    users: dict[str, list[Op]] = {}
    for phase in PHASES:
        for op in stage.ops[phase]:
            for name in op.uses:
                users.setdefault(name, []).append(op)
    found: list[Chain] = []
    for phase in PHASES:
        here = {op.name: op for op in stage.ops[phase]}
        for start in stage.ops[phase]:
            summed = start.kind is not None and start.kind.sums and start.how == "sum"
            waits = users.get(start.name, [])
            if not summed or len(waits) != 1 or waits[0].target != WAIT or waits[0].name not in here:
                continue
            between: list[Op] = []
            source: Op | None = here.get(start.args[0].name)
            while source is not None and len(users[source.name]) == 1 and _keeps_columns(source, here):
                between.append(source)
                source = here.get(source.args[0].name)
            if source is None or source.target != "aten.mm.default" or len(users[source.name]) != 1:
                continue
            made, last = source.outputs[0], start.outputs[0]
            if made is None or last is None or len(last.shape) < 2:
                continue  # of one dim: the columns are what is scattered
            if last.shape[-1] == made.shape[1]:
                found.append(Chain(stage.index, phase, source, tuple(reversed(between)), start, waits[0]))
    return found


def _keeps_columns(op: Op, here: Mapping[str, Op]) -> bool:
    """Whether the op moves whole rows: its last dim is that of its input."""
    source = here.get(op.args[0].name) if op.args and isinstance(op.args[0], Ref) else None
    if source is None or len(op.outputs) != 1 or op.outputs[0] is None or len(source.outputs) != 1:
        return False
    before, after = source.outputs[0], op.outputs[0]
    if before is None or before.shape[-1:] != after.shape[-1:]:
        return False
    if op.target == "aten.permute.default":
        return int(op.args[1][-1]) % len(after.shape) == len(after.shape) - 1
    return (op.target in VIEWS and before.stride is None) or (
        op.target == "aten.clone.default" and after.stride is None
    )


class _Prices:
    """Step 2."""

    def __init__(self, job: Job, costs: Costs) -> None:
        self.costs = costs
        self.shortest_us = 0.0
        self.copy_us_per_byte = 0.0
        timed = [
            (costs.op_us.get((stage.index, op.name), 0.0), op)
            for stage in job.stages
            for ops in stage.ops.values()
            for op in ops
            if op.alias is None and op.collective is None and op.target != GETITEM
        ]
        timed = [(us, op) for us, op in timed if us > 0.0]
        self.shortest_us = min((us for us, _ in timed), default=0.0)
        rates = sorted(
            (us - self.shortest_us) / op.nbytes for us, op in timed if op.target in COPIES and op.nbytes
        )
        if rates:
            self.copy_us_per_byte = rates[len(rates) // 2]

    def best(self, chain: Chain) -> int:
        """The number of parts, 1 for a chain that is not to be cut."""
        asked, result = chain.start.collective, chain.wait.outputs[0]
        assert asked is not None
        if (asked.axis, asked.kind) not in self.costs.collectives or result is None:
            return 1
        begin_us = self.costs.op_us.get((chain.stage, chain.start.name), 0.0)
        ops = (chain.product, *chain.between)

        def product_us(parts: int) -> float:
            return sum(self.part_us(chain.stage, op, parts) for op in ops)

        def collective_us(parts: int) -> tuple[float, float]:
            """From its call on, alone on its lane, as the simulation has it, and the compute lost to it."""
            time = axis_time(self.costs, asked.axis, asked.kind, asked.nbytes // parts)
            return time.us, time.load * time.us

        whole = product_us(1) + collective_us(1)[0]
        best, best_us = 1, whole * (1.0 - GAIN)
        for parts in PARTS:
            if chain.columns % (parts * ALIGNMENT):
                continue
            p, (c, r) = product_us(parts), collective_us(parts)
            total = p + (parts - 1) * max(p + begin_us + r, c) + c + self.join_us(result)
            if total < best_us:
                best, best_us = parts, total
        return best

    def part_us(self, stage: int, op: Op, parts: int) -> float:
        """Time of one of `parts` equal parts of an op on the compute lane."""
        us = self.costs.op_us.get((stage, op.name), 0.0)
        fixed = us if op.alias is not None else min(us, self.shortest_us)
        return fixed + (us - fixed) / parts

    def join_us(self, result: TensorSpec) -> float:
        """Time of the copy that puts the parts together."""
        return self.shortest_us + self.copy_us_per_byte * result.nbytes


def _specs(stage: Stage) -> dict[str, TensorSpec]:
    return {
        op.name: op.outputs[0]
        for ops in stage.ops.values()
        for op in ops
        if len(op.outputs) == 1 and op.outputs[0] is not None
    }


def _cut(
    stage: Stage,
    cuts: Sequence[Chain],
    specs: Mapping[str, TensorSpec],
    op_us: dict[tuple[int, str], float],
    prices: _Prices,
) -> Stage:
    """Step 3 for one stage; puts the times of new ops into `op_us`."""
    known = dict(specs) | _specs(stage)
    owners = {op.name: op.alias for ops in stage.ops.values() for op in ops if op.alias is not None}
    # The chain stands where its start stood; what waited for it waits for the copy of its parts.
    place = {chain.start.name: chain for chain in cuts}
    joined = {chain.wait.name: chain for chain in cuts}
    gone = {op.name for chain in cuts for op in (chain.product, *chain.between)}
    made: dict[Phase, tuple[Op, ...]] = {}
    for phase, ops in stage.ops.items():
        new: list[Op] = []
        for op in ops:
            if op.name in place:
                chain = place[op.name]
                for part in range(chain.parts):
                    new += _part(chain, part, known, owners, op_us, prices)
            elif op.name in joined:
                new += _join(joined[op.name], op_us, prices)
            elif op.name not in gone:
                owner = next((c.wait.name for c in cuts if op.alias == c.start.name), op.alias)
                new.append(op if owner == op.alias else replace(op, alias=owner))
        made[phase] = tuple(new)
    return replace(stage, ops=made)


def _part(
    chain: Chain,
    part: int,
    known: Mapping[str, TensorSpec],
    owners: Mapping[str, str],
    op_us: dict[tuple[int, str], float],
    prices: _Prices,
) -> list[Op]:
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
        owners.get(matrix.name, matrix.name),
        module=product.module,
    )
    view_us = min(
        (prices.costs.op_us.get((chain.stage, op.name), 0.0) for op in chain.between if op.alias), default=0.0
    )
    op_us[chain.stage, columns.name] = view_us
    made = [columns]
    before: TensorSpec | None = None
    storage = ""
    for op in (product, *chain.between, chain.start):
        whole = op.outputs[0]
        assert whole is not None
        shape = (*whole.shape[:-1], width)
        args = (Ref(made[-1].name), *op.args[1:])
        result = TensorSpec(shape, whole.dtype)
        if op is product:
            args = (op.args[0], Ref(columns.name))
        elif op.target in VIEWS:
            args = (args[0], shape)
        elif op.target == "aten.permute.default":
            assert before is not None
            strides = strides_of(before)
            result = spec_with(shape, whole.dtype, [strides[int(d) % len(shape)] for d in op.args[1]])
        name = f"{op.name}_part{part}"
        alias = None if op.alias is None else storage
        new = replace(
            op, name=name, args=args, outputs=(result,), alias=alias, flops=op.flops * width // chain.columns
        )
        storage = storage if alias is not None else name
        op_us[chain.stage, name] = (
            op_us.get((chain.stage, op.name), 0.0)
            if op is chain.start
            else prices.part_us(chain.stage, op, chain.parts)
        )
        made.append(new)
        before = result
    return made


def _join(chain: Chain, op_us: dict[tuple[int, str], float], prices: _Prices) -> list[Op]:
    """The waits, and the copy that has the name of the whole's wait."""
    whole = chain.wait.outputs[0]
    assert whole is not None
    waits = []
    for part in range(chain.parts):
        spec = TensorSpec((*whole.shape[:-1], chain.columns // chain.parts), whole.dtype)
        start = f"{chain.start.name}_part{part}"
        name = f"{chain.wait.name}_part{part}"
        waits.append(replace(chain.wait, name=name, args=(Ref(start),), outputs=(spec,), alias=start))
        op_us[chain.stage, name] = op_us.get((chain.stage, chain.wait.name), 0.0)
    parts = tuple(Ref(wait.name) for wait in waits)
    join = replace(chain.wait, target="aten.cat.default", args=(parts, len(whole.shape) - 1), alias=None)
    op_us[chain.stage, join.name] = prices.join_us(whole)
    return [*waits, join]
