"""The step of a plain model, as it was traced, laid out by passes: one rank's part of it.

1. Axes are passes in turn. Ranks keep parameters of their own experts. Context-parallel ranks share the
   sequence of the batch's leaves (`stretto.passes.layout.context`). The sequence is cut in chunks
   (`stretto.passes.layout.chunks`), and a rank's ops come in the place of modules of experts
   (`stretto.capturing.experts`). Placements of parameters over tp come from the plan
   (`stretto.parallelize.tensor`); with sequence parallelism, what enters the first block is sharded along
   the sequence.
2. `stretto.passes.layout` makes one rank's ops of the global ones.
3. Passes improve them, as any graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from stretto.backend.process_memory import rarely_collected
from stretto.capturing.experts import along_experts, by_chunk, with_experts
from stretto.capturing.graph import SEEN, Traced
from stretto.capturing.in_full import check_in_full
from stretto.capturing.outputs import with_partial
from stretto.capturing.substitutes import with_cuda_results
from stretto.errors import CaptureError, UsageError
from stretto.ir.axes import CP, EP, TENSOR
from stretto.ir.op_names import ATTENTION, ATTENTION_BACKWARD
from stretto.ir.program import CHUNK, INDEX, STARTS, Op, Shard
from stretto.parallelize.layout import RankLayout
from stretto.parallelize.tensor import TensorParallel
from stretto.passes import on_graph
from stretto.passes.layout import context
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.attention import shared
from stretto.passes.layout.chunks import SEQUENCE_DIM, ChunkedProgram, in_chunks, stream_into
from stretto.passes.layout.context_steps import in_steps
from stretto.passes.layout.emit import MisfitError
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, sharded
from stretto.passes.layout.program import StepProgram, with_equal_views_once
from stretto.passes.layout.rules import as_kernel
from stretto.passes.layout.shard import GRAD, PARAM, AxisRules, ShardedProgram, shard
from stretto.passes.layout.shared_heads import blocks_of, copies_of
from stretto.passes.rewrite import rooted


@rarely_collected()
def laid_out(
    traced: Traced, layout: RankLayout, model: nn.Module, skip_passes: Collection[str] = ()
) -> Traced:
    """See the module. traced: of the plain model. Raises CaptureError for what does not fit."""
    for op, _ in traced.program.ops if layout.tensor is not None else ():
        if op.target in (*STARTS, CHUNK, INDEX) and op.args[-2] == TENSOR:
            raise CaptureError(
                f"{op.module or 'the loss'} communicates along {TENSOR}, over which passes lay out what "
                "the code computes in full: leave it out"
            )
    program = with_equal_views_once(traced.program)
    placed: list[Mapping[str, AxisPlacement]] = []
    partial: dict[str, tuple[str, ...]] = {}

    def along(axis: str, made: ShardedProgram) -> StepProgram:
        placed.append(made.placed)
        for root in made.partial:
            partial[root] = (*partial.get(root, ()), axis)
        return made.program

    try:
        if layout.experts is not None:
            experts, made = along_experts(program, layout.experts, model)
            layout, program = replace(layout, experts=experts), along(EP.name, made)
        if layout.context > 1:
            program = along(CP.name, _along_context(program, traced, layout))
            program = context.with_own_tokens(program, CP.name)
        wishes = stream(program, layout)
        if layout.chunks is not None:
            chunked = _in_chunks(program, layout, _may_be_partial(traced))
            program = chunked.program
            if wishes:
                wishes = dict.fromkeys(chunked.entering, sharded(SEQUENCE_DIM))
                wishes |= dict.fromkeys(chunked.leaving, REPLICATED)
        program, traced = with_experts(program, model, layout, traced)
        if layout.tensor is not None:
            layout, made = _along_tensor(program, traced, layout, layout.tensor, wishes)
            program = along(TENSOR, made)
    except MisfitError as error:
        raise CaptureError(
            f"the passes of layouts do not fit {traced.job.name} ({error}): leave the module out of tp_plan, "
            "or ampipe_degree out"
        ) from None
    first = {name for one in placed for name, at in one.items() if at.is_sharded and at.dim == 0}
    return _as_traced(traced, layout, program, partial, frozenset(first), skip_passes)


def _may_be_partial(traced: Traced) -> frozenset[str]:
    return frozenset(f"{SEEN}{k}" for k, one in enumerate(traced.job.metrics) if one.joined == "sum")


def _along_context(program: StepProgram, traced: Traced, layout: RankLayout) -> ShardedProgram:
    """Raises UsageError for a sequence that ranks cannot share equally."""
    size, blocks = layout.context, context.blocks_of(layout.context_kind)
    program = shared(program)
    ahead = Ahead(program, size, dict(program.given))
    length = context.sequence_of(ahead, traced.job.replicated)
    if not length:
        raise UsageError(
            f"cp = {size} shares the sequence of the batch, and no leaf of it is (batch, sequence) or more: "
            "drop cp"
        )
    if length % (blocks * size) or length == blocks * size:
        raise UsageError(
            f"cp: a sequence of {length} cannot be shared equally by {size} ranks, in {blocks * size} blocks "
            "of two tokens or more: change one of them"
        )
    best, above = context.rows_of_masks(ahead, blocks)
    parts = context.sequences(program, length, traced.job.replicated, above - best.keys(), blocks)
    own = AxisRules(parts, best, context.rules_of(layout.context_kind, ahead), mirrored=blocks == 2)
    made = shard(program, CP.name, size, {}, {}, _may_be_partial(traced), own)
    for one in made.gathered:
        if as_kernel(one.op).target in ATTENTION | ATTENTION_BACKWARD:
            raise UsageError(
                f"cp = {size}: {one.op.module} computes attention by {one.op.target}, of which ranks cannot "
                "compute the rows of their own queries: drop cp"
            )
    return made


def _in_chunks(program: StepProgram, layout: RankLayout, may_be_partial: frozenset[str]) -> ChunkedProgram:
    chunks, tensor = layout.chunks, layout.tensor
    assert chunks is not None
    ranks = 1 if tensor is None or not tensor.firsts else tensor.size
    program = program if chunks.full else by_chunk(program)
    blocks = 0 if layout.context == 1 else context.blocks_of(layout.context_kind)
    return in_chunks(program, chunks.blocks, chunks.degree, ranks, may_be_partial, blocks)


def _along_tensor(
    program: StepProgram,
    traced: Traced,
    layout: RankLayout,
    tensor: TensorParallel,
    wishes: Mapping[str, AxisPlacement],
) -> tuple[RankLayout, ShardedProgram]:
    """The layout with the shards that were found."""
    size = tensor.size
    ahead = Ahead(program, size, dict(program.given))
    packed = {
        name: replace(
            one, blocks=one.blocks * blocks_of(ahead, f"{PARAM}{name}", sharded(one.dim, one.blocks))
        )
        for name, one in tensor.shards.items()
    }
    shared = {  # which ranks share where they are more than heads
        name: replace(one, copies=copies_of(ahead, f"{PARAM}{name}", sharded(one.dim, one.blocks)))
        for name, one in packed.items()
    }
    is_one_way = len({of.copies for of in shared.values()} - {1, size}) <= 1
    ways = [shared, packed, dict(tensor.shards)] if is_one_way else [packed, dict(tensor.shards)]
    for shards in ways:
        placed = {f"{PARAM}{name}": _placement(of, size) for name, of in shards.items()}
        gathering = _gathering(tensor, shards)
        asked = {**wishes, **entering_in_full(program, gathering)}
        try:
            made = shard(program, TENSOR, size, placed, asked, _may_be_partial(traced))
            break
        except MisfitError:
            if shards is ways[-1]:
                raise
    check_in_full(traced, made, gathering)
    return layout.with_tensor(shards), made


def _as_traced(
    traced: Traced,
    layout: RankLayout,
    program: StepProgram,
    partial: Mapping[str, tuple[str, ...]],
    sharded_first: frozenset[str],
    skip_passes: Collection[str],
) -> Traced:
    """Steps 2 and 3. partial: root -> axes along which it is a partial sum; sharded_first: values that are
    sharded along their first dim."""
    low = in_steps(program)
    owned = rooted(op for op, _ in low.ops)
    if traced.job.device == "cuda" and not torch.cuda.is_available():
        owned = with_cuda_results(owned, low.given)
    low = replace(low, ops=tuple((op, origin) for op, (_, origin) in zip(owned, low.ops, strict=True)))
    gradients = {root.removeprefix(GRAD): axes for root, axes in partial.items() if root.startswith(GRAD)}
    shards = _kept_shards(layout, gradients)
    parameters = (
        replace(
            one,
            spec=low.given[f"{PARAM}{one.name}"],
            shards=shards.get(one.name, ()),
            partial=gradients.get(one.name, ()),
        )
        for one in traced.job.parameters
    )
    seen = (with_partial(one, partial.get(f"{SEEN}{k}", ())) for k, one in enumerate(traced.job.metrics))
    job = replace(traced.job, parameters=tuple(parameters), metrics=tuple(seen))
    return replace(traced, program=on_graph(low, sharded_first, skip_passes), job=job)


def _placement(shard: Shard, size: int) -> AxisPlacement:
    if shard.copies == size:
        return REPLICATED
    return replace(sharded(shard.dim, shard.blocks), copies=shard.copies)


def _kept_shards(layout: RankLayout, partial: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[Shard, ...]]:
    """One part that all ranks have is the full parameter, where its gradient is no partial sum."""
    size = 1 if layout.tensor is None else layout.tensor.size
    result = {
        name: tuple(
            one for one in of if one.axis != TENSOR or one.copies < size or TENSOR in partial.get(name, ())
        )
        for name, of in layout.shards.items()
    }
    return {name: of for name, of in result.items() if of}


def stream(program: StepProgram, layout: RankLayout) -> dict[str, AxisPlacement]:
    """With sequence parallelism: each residual stream, as it enters the first block of a list, is sharded
    along the sequence. Raises UsageError where there is none, and where ranks can share no sequence
    equally."""
    tensor = layout.tensor
    if tensor is None or not tensor.firsts:
        return {}
    entering = [one for first in tensor.firsts if (one := stream_into(program, first)) is not None]
    if not entering:
        raise UsageError(
            f"sequence_parallel: {tensor.firsts[0]} reads no activation (batch, sequence, hidden) that a "
            "module before it has made: give it one, or leave sequence_parallel out"
        )
    fitting = [one for one in entering if one.length % tensor.size == 0]
    if not fitting:
        raise UsageError(
            f"sequence_parallel: a sequence of {entering[0].length} cannot be sharded equally over "
            f"{TENSOR} = {tensor.size}: change one of them, or leave sequence_parallel out"
        )
    return {one.name: sharded(SEQUENCE_DIM) for one in fitting}


def entering_in_full(program: StepProgram, inside: tuple[str, ...]) -> dict[str, AxisPlacement]:
    """What enters a module that gathers is gathered there once. A router sees all tokens: no rank asks what
    another has chosen. inside: how names begin in such modules."""
    result: dict[str, AxisPlacement] = {}
    made: dict[str, Op] = {}
    for op, origin in program.ops:
        own = not origin.backward and f"{op.module}.".startswith(inside)
        for name in op.uses if own else ():
            maker = made.get(name)
            if maker is not None and not f"{maker.module}.".startswith(inside) and len(maker.outputs) == 1:
                result[name] = REPLICATED
        made[op.name] = op
    return result


def _gathering(tensor: TensorParallel, shards: Mapping[str, Shard]) -> tuple[str, ...]:
    """How names begin in modules that with sequence parallelism gather what they are given, for what in them
    is replicated as well: those with experts, and those with a head of keys that all ranks share."""
    if not tensor.firsts:
        return ()
    shared = (name.rsplit(".", 2)[0] for name, of in shards.items() if of.copies == tensor.size)
    return tuple(f"{name}." for name in sorted({*tensor.mixtures, *shared}))
