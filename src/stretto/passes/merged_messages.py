"""Values of one microbatch that go from a stage to another at about one time go as one message.

A message keeps its link for a moment before its bytes, and its ends call and wake threads for it, however
small it is (`ir.costs.Link`). Several small ones cost that several times. Put into one piece of memory they
cost it once; a copy at the sender is the price, the receiver's pieces are views, and what was ready first
waits for the last.

    1. Of the values that a stage sends to a stage of another rank, take those of one phase that are first
       read in one phase there, and that all tensor-parallel ranks hold alike, or all do not. Each is whole
       and in one piece.
    2. They lie in the order in which they are made. As many messages as values, to begin with; then the two
       neighbours are merged whose merging makes a microbatch's passage cheapest, until none is cheaper. What
       a passage takes: from the begin of the sender's program to the end of the receiver's, as far as it is
       for these messages, the time that the link is busy, and what both ends compute for them.
    3. The sender makes all of a message flat and joins them (`aten.cat`), of several dtypes as bytes. The
       receiver takes slices and sees them as what they were. Each begins where a tensor of its own might
       (`ALIGNED`), for kernels go by that, and round by it; what is between is of no meaning.

Planning tries a step with and without. No number changes. Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from stretto.ir.action import Phase
from stretto.ir.costs import Costs, Link
from stretto.ir.placed_programs import differing_in
from stretto.ir.prices import specs_of
from stretto.ir.program import DTYPE_BYTES, VIEW, Const, Edge, Job, Op, Ref, TensorSpec
from stretto.ir.transfers import occupancy_us, processor_us, time_of
from stretto.parallelize.tensor import AXIS
from stretto.passes.rewrite import read_as, stage_of
from stretto.passes.step import Context, Step

CAT = "aten.cat.default"
SLICE = "aten.slice.Tensor"
AS_DTYPE = "aten.view.dtype"
BYTES = "uint8"

ALIGNED = 256
"""Bytes. PyTorch's matrix products ask up to this alignment (`_getAlignment` of its cuBLASLt calls), kernels
on processors for 64, as their allocator gives."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A value on its way. made_us: from the begin of the sender's program to it; read_us: from the begin of
    the receiver's to the first op that reads it."""

    edge: Edge
    made_us: float
    read_us: float


Message = tuple[_Value, ...]
"""What goes together, in the order in which it is made."""


def merged_messages(step: Step, context: Context) -> Step:
    """The step with such messages merged; the step itself where none is."""
    job, ranks = step.job, step.schedule.stage_ranks
    borders = _borders(job, ranks)
    if not borders:
        return step
    costs, specs = context.costs_of(job), specs_of(job)
    time = _Times(job, costs)
    chosen: list[Message] = []

    @cache
    def ends_us(message: Message) -> tuple[int, float, float]:
        # No copy of all specs of the job for each op.
        return _ends_us(message, lambda op, made: context.prices.us(op, ChainMap(made, specs)))

    for edges in borders:
        values = sorted((time.of(edge) for edge in edges), key=lambda value: value.made_us)
        link = costs.link(ranks[edges[0].source], ranks[edges[0].target])

        def passage_us(messages: Sequence[Message], link: Link = link) -> float:
            return _passage_us(messages, link, ends_us)

        chosen += [one for one in _grouped(values, passage_us) if len(one) > 1]
    return replace(step, job=_joined(job, chosen)) if chosen else step


def _borders(job: Job, ranks: Sequence[int]) -> list[list[Edge]]:
    """Step 1: edges that may share messages, of several each."""
    found: dict[object, list[Edge]] = defaultdict(list)
    for edge in job.edges:
        whole = edge.spec.stride is None and edge.spec.numel and edge.spec.dtype in DTYPE_BYTES
        if ranks[edge.source] != ranks[edge.target] and whole:
            found[edge.source, edge.phase, edge.target, edge.user_phase].append(edge)
    several = [edges for edges in found.values() if len(edges) > 1]
    if job.size(AXIS) == 1 or not several:
        return several
    own = differing_in(job, AXIS)
    apart = (
        [edge for edge in edges if (edge.value in own) is of] for edges in several for of in (False, True)
    )
    return [edges for edges in apart if len(edges) > 1]


class _Times:
    """When values are made and first read, in programs without waits."""

    def __init__(self, job: Job, costs: Costs) -> None:
        self._job = job
        self._costs = costs
        self._known: dict[tuple[int, Phase], tuple[dict[str, float], dict[str, float]]] = {}

    def of(self, edge: Edge) -> _Value:
        made, _ = self._program(edge.source, edge.phase)
        _, read = self._program(edge.target, edge.user_phase)
        return _Value(edge, made[edge.value], read[edge.value])

    def _program(self, stage: int, phase: Phase) -> tuple[dict[str, float], dict[str, float]]:
        if (stage, phase) not in self._known:
            made: dict[str, float] = {}
            read: dict[str, float] = {}
            now_us = 0.0
            for op in self._job.stages[stage].ops[phase]:
                for name in op.uses:
                    read.setdefault(name, now_us)
                now_us += time_of(self._costs, stage, op)
                made[op.name] = now_us
            self._known[stage, phase] = made, read
        return self._known[stage, phase]


def _grouped(values: Sequence[_Value], passage_us: Callable[[Sequence[Message]], float]) -> list[Message]:
    """Step 2."""
    messages: list[Message] = [(value,) for value in values]
    least_us = passage_us(messages)
    while len(messages) > 1:
        merged = [
            [*messages[:at], (*messages[at], *messages[at + 1]), *messages[at + 2 :]]
            for at in range(len(messages) - 1)
        ]
        times = [passage_us(one) for one in merged]
        if min(times) >= least_us:
            break
        least_us = min(times)
        messages = merged[times.index(least_us)]
    return messages


def _passage_us(
    messages: Sequence[Message], link: Link, ends_us: Callable[[Message], tuple[int, float, float]]
) -> float:
    """What step 2 compares. ends_us: as `_ends_us`."""
    found_us = busy_us = computed_us = sender_us = left_us = 0.0
    for message in messages:
        nbytes, there_us, back_us = ends_us(message)
        sender_us += there_us
        left_us = max(left_us, message[-1].made_us + sender_us) + occupancy_us(link, nbytes)
        needed_us = min(value.read_us for value in message)
        found_us = max(found_us, left_us + link.latency_us + back_us - needed_us)
        busy_us += occupancy_us(link, nbytes)
        computed_us += there_us + back_us + 2 * processor_us(link, nbytes)
    return found_us + busy_us + computed_us


def _ends_us(
    message: Message, price_us: Callable[[Op, dict[str, TensorSpec]], float]
) -> tuple[int, float, float]:
    """A message's bytes, and what sender and receiver compute for it. price_us: of an op that reads values of
    these specs beside those of the job."""
    if len(message) == 1:
        return message[0].edge.spec.nbytes, 0.0, 0.0
    packed = _packed([value.edge for value in message], "merged")
    there = [*packed.ops, packed.join]
    back = [op for v in message for op in packed.unpacked(v.edge, f"{v.edge.value} again", "")]
    made = {op.name: spec for op in (*there, *back) for spec in op.outputs if spec is not None}
    there_us, back_us = (sum(price_us(op, made) for op in ops) for ops in (there, back))
    return packed.spec.nbytes, there_us, back_us


@dataclass(frozen=True, slots=True)
class _Packed:
    """Step 3 for one message, `name`. ops: what makes each flat; join: what joins them; spec: of the whole;
    at: value -> its first element in it."""

    name: str
    ops: tuple[Op, ...]
    join: Op
    spec: TensorSpec
    at: Mapping[str, int]

    def unpacked(self, edge: Edge, name: str, module: str) -> list[Op]:
        """The receiver's ops that make a value of its part, under a name."""
        flat = TensorSpec((edge.spec.numel,), edge.spec.dtype)
        first = self.at[edge.value]
        ops: list[tuple[str, tuple[object, ...], TensorSpec]] = []
        count = edge.spec.numel if self.spec.dtype == edge.spec.dtype else edge.spec.nbytes
        kept = TensorSpec((count,), self.spec.dtype)
        ops.append((SLICE, (0, first, first + count), kept))
        if kept.dtype != flat.dtype:
            ops.append((AS_DTYPE, (Const("dtype", flat.dtype),), flat))
        if edge.spec != flat:
            ops.append((VIEW, (edge.spec.shape,), edge.spec))
        return _views(self.name, name, ops, module)


def _packed(edges: Sequence[Edge], name: str) -> _Packed:
    """Step 3 for the sender of these edges' values."""
    dtypes = {edge.spec.dtype for edge in edges}
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else BYTES
    ops: list[Op] = []
    flats: dict[str, tuple[str, int]] = {}
    for edge in edges:
        flat = TensorSpec((edge.spec.numel,), edge.spec.dtype)
        calls: list[tuple[str, tuple[object, ...], TensorSpec]] = []
        if edge.spec != flat:
            calls.append((VIEW, (flat.shape,), flat))
        if dtype != flat.dtype:
            flat = TensorSpec((edge.spec.nbytes,), dtype)
            calls.append((AS_DTYPE, (Const("dtype", dtype),), flat))
        made = _views(edge.value, f"{edge.value}_into_{name}", calls, "")
        ops += made
        flats[edge.value] = (made[-1].name if made else edge.value), flat.numel
    parts: list[Ref] = []
    at: dict[str, int] = {}
    length, step = 0, ALIGNED // DTYPE_BYTES[dtype]
    longest, most = max(flats.values(), key=lambda flat: flat[1])
    for value, (flat_name, numel) in flats.items():
        while length % step:
            # Whatever is at hand: nobody reads it.
            count = min(most, step - length % step)
            between = f"{name}_between_{length}"
            spec = TensorSpec((count,), dtype)
            ops.append(Op(between, SLICE, (Ref(longest), 0, 0, count), (), (spec,), longest))
            parts.append(Ref(between))
            length += count
        at[value] = length
        parts.append(Ref(flat_name))
        length += numel
    spec = TensorSpec((length,), dtype)
    return _Packed(name, tuple(ops), Op(name, CAT, (tuple(parts), 0), (), (spec,)), spec, at)


def _views(
    value: str, name: str, calls: Sequence[tuple[str, tuple[object, ...], TensorSpec]], module: str
) -> list[Op]:
    """Views one of the other, of which the last makes `name`."""
    found: list[Op] = []
    for number, (target, args, spec) in enumerate(calls):
        made = name if number == len(calls) - 1 else f"{name}_{number}"
        found.append(Op(made, target, (Ref(value), *args), (), (spec,), value, module=module))
        value = made
    return found


def _joined(job: Job, messages: Sequence[Message]) -> Job:
    """Step 3. Messages of the same values to several stages are one value."""
    programs = {stage.index: dict(stage.ops) for stage in job.stages}
    carried: dict[int, Edge] = {edge.index: edge for edge in job.edges}
    packs: dict[tuple[str, ...], _Packed] = {}
    for message in messages:
        edges = [value.edge for value in message]
        key = tuple(edge.value for edge in edges)
        first = edges[0]
        if key not in packs:
            packs[key] = packed = _packed(edges, f"{first.value}_merged_{len(packs)}")
            ops = programs[first.source][first.phase]
            last = max(at for at, op in enumerate(ops) if op.name in key)
            module = ops[last].module
            new = (replace(op, module=module) for op in (*packed.ops, packed.join))
            programs[first.source][first.phase] = (*ops[: last + 1], *new, *ops[last + 1 :])
        packed = packs[key]
        for edge in edges:
            name = f"{edge.value}_at_{edge.target}_of_{packed.name}"
            read_as(programs[edge.target], edge, name, partial(packed.unpacked, edge, name))
            del carried[edge.index]
        carried[first.index] = replace(first, value=packed.name, spec=packed.spec)
    kept = (carried[index] for index in sorted(carried))
    touched = {edge.source for m in messages for edge in (v.edge for v in m)}
    touched |= {value.edge.target for message in messages for value in message}
    stages = tuple(stage_of(s.index, programs[s.index]) if s.index in touched else s for s in job.stages)
    edges_now = tuple(replace(edge, index=index) for index, edge in enumerate(kept))
    return replace(job, stages=stages, edges=edges_now)
