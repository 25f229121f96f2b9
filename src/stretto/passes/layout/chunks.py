"""Where the sequence is in chunks (AMPipe): from the first attention to what leaves the last block.

    1. Queries of the first attention are sharded along the sequence over an axis of time, and so are
       gradients of what leaves the last block. Where ranks share each chunk, or no kernel computes that
       attention, what enters the first block, the residual stream, is sharded in place of queries. Where a
       rank has several blocks of tokens, a chunk has its part of each.
    2. `shard` carries that through the blocks, and `unroll` writes the chunks one behind another. Chunk k of
       attention reads keys of the chunks before it (`attention`); all else is of a chunk's own tokens.
    3. What leaves the blocks is full again.

Chunks do not depend on each other but by attention, and the order of ops hides an all-to-all, forward and
backward. Source: MindSpeed's Ampipe (docs/features/ampipe.md), where it is one autograd function with its own
streams.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

from stretto.errors import UsageError
from stretto.ir.program import GETITEM, Op, TensorSpec
from stretto.parallelize.parts import lengths_of
from stretto.passes.layout.attention import ROWS, check_draws, rules_of_chunks, shared
from stretto.passes.layout.kernels import SHARED_OP
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, sharded
from stretto.passes.layout.program import StepProgram
from stretto.passes.layout.shard import PARAM, AxisRules, shard
from stretto.passes.layout.unroll import unroll

AXIS = "chunk"
"""The axis of time. No mesh has it."""

SEQUENCE_DIM = 1
"""The dim of the sequence in activations (batch, sequence, hidden)."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream: the value that enters the first block, and its spec."""

    name: str
    spec: TensorSpec

    @property
    def length(self) -> int:
        return self.spec.shape[SEQUENCE_DIM]


@dataclass(frozen=True, slots=True)
class ChunkedProgram:
    """entering, leaving: the chunks of what enters the first block, where they begin there, and of what
    leaves the blocks and is gathered there."""

    program: StepProgram
    entering: tuple[str, ...]
    leaving: tuple[str, ...]


def stream_into(program: StepProgram, block: str) -> Stream | None:
    """The first activation (batch, sequence, hidden) that a block reads and a module before it has made."""
    specs: dict[str, TensorSpec] = {}
    of_parameters: set[str] = set()
    for op, _ in program.ops:
        for name in op.uses if _inside(op, (block,)) else ():
            if name in of_parameters and name in specs and len(specs[name].shape) == 3:
                return Stream(name, specs[name])
        if any(name.startswith(PARAM) or name in of_parameters for name in op.uses):
            of_parameters.add(op.name)
        if len(op.outputs) == 1 and op.outputs[0] is not None:
            specs[op.name] = op.outputs[0]
    return None


def in_chunks(
    program: StepProgram,
    blocks: Sequence[str],
    degree: int,
    ranks: int,
    may_be_partial: frozenset[str] = frozenset(),
    blocks_of_tokens: int = 0,
) -> ChunkedProgram:
    """See the module. ranks: with sequence parallelism, those that share each chunk, and go on with it up to
    the norm behind the last block. blocks_of_tokens: that a rank has, where ranks share the sequence. Raises
    UsageError for a sequence that is too short, and MisfitError."""
    stream = stream_into(program, blocks[0])
    if stream is None:
        raise UsageError(
            f"ampipe_degree = {degree} cuts the sequence where it enters {blocks[0]}, which reads no "
            "activation (batch, sequence, hidden) that a module before it has made: leave ampipe_degree out"
        )
    unit_of_ranks = lcm(ranks, blocks_of_tokens or 1)
    least = max(2, unit_of_ranks)
    if stream.length < least * degree:
        fewer = "two tokens" if least == 2 else f"{least} tokens, one of each rank"
        raise UsageError(
            f"ampipe_degree = {degree} cuts a sequence of {stream.length} into chunks of less than {fewer}; "
            f"give {max(stream.length // least, 1)} or less"
        )
    program = shared(program)
    check_draws(program)
    lengths = [unit_of_ranks * n for n in lengths_of(stream.length // unit_of_ranks, degree)]
    unit = gcd(*lengths)
    part = sharded(SEQUENCE_DIM, blocks_of_tokens or 1)
    region = _Region(program, blocks, stream, part)
    begin = region.at_attention() if ranks == 1 else {}
    if ranks > 1:
        region = region.with_norm_behind()
    made = shard(
        program,
        AXIS,
        stream.length // unit,
        {},
        (begin or {stream.name: part}) | region.wishes(),
        may_be_partial,
        AxisRules(rules=rules_of_chunks(lengths, part.blocks), of_time=True),
    )
    unrolled = unroll(made, AXIS, [length // unit for length in lengths], blocks_of_tokens > 0)
    entering = made.forms[stream.name].get(part, "")
    # Chunks of one length are slices in blocks when they are joined; others are gathered before.
    in_blocks = len({*lengths}) == part.blocks == 1
    left = [region.leaving, *(() if in_blocks else region.gradients)]
    leaving = tuple(chunk for name in left for chunk in unrolled.chunks.get(name, ()))
    return ChunkedProgram(unrolled.program, unrolled.chunks.get(entering, ()), leaving)


class _Region:
    """The ops of the blocks: the forward's, and the backward's, each from the first to the last. part: of the
    stream, that a chunk has; leaving: what leaves them of the stream's shape; "" for nothing."""

    def __init__(
        self, program: StepProgram, modules: Sequence[str], stream: Stream, part: AxisPlacement
    ) -> None:
        self.program, self.modules, self.stream, self.part = program, tuple(modules), stream, part
        self.made = {op.name: op for op, _ in program.ops}
        self.forward = [op for op, origin in program.ops if not origin.backward]
        self.backward = [op for op, origin in program.ops if origin.backward]
        self.leaving = next(filter(self._is_like_stream, self._left()), "")

    def _left(self) -> list[str]:
        """What the forward of the blocks makes for others alone."""
        _, inside, after = self._parts(self.forward)
        own = {op.name for op in inside} - {name for op in inside for name in op.uses}
        return list(dict.fromkeys(name for op in after for name in op.uses if name in own))

    def with_norm_behind(self) -> _Region:
        """Up to the module that is given what leaves the blocks, where it makes the like of it."""
        _, _, after = self._parts(self.forward)
        behind = next((op.module for op in after if self.leaving in op.uses), "")
        if not behind or any(_names(self.modules[0], (behind,))):
            return self
        wider = _Region(self.program, (*self.modules, behind), self.stream, self.part)
        return wider if wider.leaving else self

    def at_attention(self) -> dict[str, AxisPlacement]:
        """Step 1 for queries, and for gradients of what their attention reads. Nothing where the first block
        has no attention by a kernel."""
        forward, backward = (
            [op for op in self._parts(ops)[1] if op.target.startswith(SHARED_OP)]
            for ops in (self.forward, self.backward)
        )
        if not forward or not _inside(forward[0], self.modules[:1]):
            return {}
        first = {op.name for op in backward[-1:]}
        gradients = (op.name for op in self.backward if op.target == GETITEM and op.args[0].name in first)
        return dict.fromkeys(gradients, REPLICATED) | {forward[0].args[0].name: replace(self.part, dim=ROWS)}

    def wishes(self) -> dict[str, AxisPlacement]:
        """Step 3, and gradients of what leaves the blocks."""
        result = dict.fromkeys(self._left(), REPLICATED)
        before, inside, _ = self._parts(self.backward)
        outside = {op.name for op in before}
        for name in {name: None for op in inside for name in op.uses if name in outside}:
            if self._is_like_stream(name):
                result[name] = self.part
        return result | dict.fromkeys(self.gradients, REPLICATED)

    @property
    def gradients(self) -> list[str]:
        """What the backward of the blocks makes for others, of the stream's shape."""
        _, inside, after = self._parts(self.backward)
        own = {op.name for op in (*inside, *after) if not op.module or _inside(op, self.modules)}
        names = dict.fromkeys(name for op in after if op.module for name in op.uses if name in own)
        return list(filter(self._is_like_stream, names))

    def _parts(self, ops: Sequence[Op]) -> tuple[Sequence[Op], Sequence[Op], Sequence[Op]]:
        """The ops before, in and after the modules."""
        places = [at for at, op in enumerate(ops) if _inside(op, self.modules)]
        first, last = (places[0], places[-1] + 1) if places else (len(ops), len(ops))
        return ops[:first], ops[first:last], ops[last:]

    def _is_like_stream(self, name: str) -> bool:
        op = self.made[name]
        spec = self.made[op.args[0].name].outputs[op.args[1]] if op.target == GETITEM else op.outputs[0]
        return spec is not None and spec.shape == self.stream.spec.shape


def _inside(op: Op, modules: Collection[str]) -> bool:
    """Whether the op is of one of the modules, or of one within."""
    return any(_names(op.module, modules))


def _names(module: str, modules: Collection[str]) -> Iterator[bool]:
    return (module == name or module.startswith(f"{name}.") for name in modules)
