"""The step of a plain model, as it was traced, laid out by passes: one rank's part of it.

1. Axes are passes in turn, the outermost first. Context-parallel ranks share the sequence of the batch's
   leaves (`stretto.passes.layout.context`). Placements of parameters over tp come from the plan that is read
   for the patched way as well (`stretto.parallelize.tensor`); with sequence parallelism, what enters the
   first block is sharded along the sequence.
2. `stretto.passes.layout` makes one rank's ops of the global ones.
3. Passes improve them, as any graph.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from stretto.capturing.graph import Traced, TracedOp, passed
from stretto.capturing.outputs import with_partial
from stretto.capturing.substitutes import with_cuda_results
from stretto.errors import CaptureError, UsageError
from stretto.ir.axes import CP, TENSOR
from stretto.ir.op_names import ATTENTION
from stretto.ir.program import GETITEM, Op, Shard, TensorSpec
from stretto.parallelize.layout import Layout
from stretto.parallelize.slices import SEQUENCE_DIM
from stretto.parallelize.tensor import TensorParallel
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.context import rows_of_masks, rules_of, sequence_of, sequences, with_plain_lse
from stretto.passes.layout.context_steps import in_steps
from stretto.passes.layout.emit import MisfitError
from stretto.passes.layout.lower import lower
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, sharded
from stretto.passes.layout.program import Origin, StepProgram, with_equal_views_once
from stretto.passes.layout.shard import GRAD, PARAM, AxisRules, ShardedProgram, shard
from stretto.passes.rewrite import rooted

_log = logging.getLogger(__name__)

LOSS, UPDATE, SEEN = "loss", "update/", "seen/"
"""How roots of a step's program begin."""


def laid_out(traced: Traced, layout: Layout, skip_passes: Collection[str] = ()) -> Traced:
    """See the module. traced: of the plain model. Raises CaptureError for what does not fit."""
    if layout.tensor is None and layout.context == 1:
        return traced
    program = with_equal_views_once(program_of(traced))
    may_be_partial = frozenset(f"{SEEN}{k}" for k, one in enumerate(traced.seen) if one.joined == "sum")
    partial: dict[str, tuple[str, ...]] = {}
    first: set[str] = set()
    for axis, along in ((CP.name, _along_context), (TENSOR, _along_tensor)):
        try:
            made = along(program, traced, layout, may_be_partial)
        except MisfitError as error:
            raise CaptureError(
                f"the passes of layouts do not fit {traced.name} along {axis} ({error}): leave the module "
                'out of tp_plan, or give layouts = "patched" without cp'
            ) from None
        if made is None:
            continue
        for one in made.gathered:
            _log.debug(
                "%s (%s) is computed in full along %s: %d bytes",
                one.op.target,
                one.op.module,
                axis,
                one.nbytes,
            )
        program = made.program
        first.update(value for value, at in made.placed.items() if at.is_sharded and at.dim == 0)
        for root in made.partial:
            partial[root] = (*partial.get(root, ()), axis)
    return _as_traced(traced, program, layout, partial, frozenset(first), skip_passes)


def _along_context(
    program: StepProgram, traced: Traced, layout: Layout, may_be_partial: frozenset[str]
) -> ShardedProgram | None:
    """Raises UsageError for a sequence that ranks cannot share equally."""
    size = layout.context
    if size == 1:
        return None
    blocks = 1 if layout.context_kind == "ulysses" else 2
    program = with_plain_lse(program)
    ahead = Ahead(program, size, dict(program.given))
    length = sequence_of(ahead, traced.full)
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
    best, above = rows_of_masks(ahead, blocks)
    parts = sequences(program, length, traced.full, above - best.keys(), blocks)
    own = AxisRules(parts, best, rules_of(layout.context_kind), mirrored=blocks == 2)
    made = shard(program, CP.name, size, {}, {}, may_be_partial, own)
    for one in made.gathered:
        if one.op.target in ATTENTION:
            raise UsageError(
                f"cp = {size}: {one.op.module} computes attention by {one.op.target}, of which ranks cannot "
                "compute the rows of their own queries: drop cp"
            )
    return made


def _along_tensor(
    program: StepProgram, traced: Traced, layout: Layout, may_be_partial: frozenset[str]
) -> ShardedProgram | None:
    tensor = layout.tensor
    if tensor is None:
        return None
    size = tensor.size
    if len({of.copies for of in tensor.shards.values()} - {1, size}) > 1:
        raise CaptureError(
            "heads of keys are shared by different numbers of ranks in different modules: give all the same "
            "heads of keys, or some the style 'replicated'"
        )
    placed = {f"{PARAM}{name}": _placement(of, size) for name, of in tensor.shards.items()}
    return shard(program, TENSOR, size, placed, stream(program, tensor), may_be_partial)


def _as_traced(
    traced: Traced,
    program: StepProgram,
    layout: Layout,
    partial: Mapping[str, tuple[str, ...]],
    sharded_first: frozenset[str],
    skip_passes: Collection[str],
) -> Traced:
    """Steps 2 and 3. partial: root -> axes along which it is a partial sum; sharded_first: values that are
    sharded along their first dim."""
    low = lower(in_steps(program))
    owned = rooted(op for op, _ in low.ops)
    if traced.device == "cuda" and not torch.cuda.is_available():
        owned = with_cuda_results(owned, low.given)
    ops = [
        TracedOp(op, origin.segment, origin.backward) for op, (_, origin) in zip(owned, low.ops, strict=True)
    ]
    ops, now = passed(ops, set(low.roots.values()), low.given, sharded_first, skip_passes)
    roots = {root: now.get(value, value) for root, value in low.roots.items()}
    gradients = {root.removeprefix(GRAD): axes for root, axes in partial.items() if root.startswith(GRAD)}
    return replace(
        traced,
        ops=tuple(ops),
        parameters={
            name: (low.given[f"{PARAM}{name}"], tie, roots.get(f"{GRAD}{name}"))
            for name, (_, tie, _) in traced.parameters.items()
        },
        buffers={name: (spec, roots.get(f"{UPDATE}{name}")) for name, (spec, _) in traced.buffers.items()},
        loss=roots[LOSS],
        shards=_kept_shards(layout, gradients),
        partial=gradients,
        seen=tuple(
            with_partial(one, partial.get(f"{SEEN}{k}", ()), roots[f"{SEEN}{k}"])
            for k, one in enumerate(traced.seen)
        ),
    )


def _placement(shard: Shard, size: int) -> AxisPlacement:
    if shard.copies == size:
        return REPLICATED
    return replace(sharded(shard.dim, shard.blocks), copies=shard.copies)


def _kept_shards(layout: Layout, partial: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[Shard, ...]]:
    """One part that all ranks have is the full parameter, where its gradient is no partial sum."""
    size = 1 if layout.tensor is None else layout.tensor.size
    result = {
        name: tuple(
            one for one in of if one.axis != TENSOR or one.copies < size or TENSOR in partial.get(name, ())
        )
        for name, of in layout.shards.items()
    }
    return {name: of for name, of in result.items() if of}


def program_of(traced: Traced) -> StepProgram:
    """A traced step as layout passes read it."""
    ops = {item.op.name: item.op for item in traced.ops}
    given = {f"{PARAM}{name}": spec for name, (spec, _, _) in traced.parameters.items()}
    given |= {f"buffer/{name}": spec for name, (spec, _) in traced.buffers.items()}
    given |= {f"batch/{name}": spec for name, spec in traced.batch}
    given |= {f"const/{constant.name}": constant.spec for constant in traced.constants}
    given["tangent"] = _spec_of(ops, traced.loss)
    roots = {LOSS: traced.loss}
    roots |= {f"{GRAD}{n}": value for n, (_, _, value) in traced.parameters.items() if value is not None}
    roots |= {f"{UPDATE}{n}": value for n, (_, value) in traced.buffers.items() if value is not None}
    roots |= {f"{SEEN}{k}": one.value for k, one in enumerate(traced.seen)}
    ties = {name: first for name, (_, first, _) in traced.parameters.items()}
    return StepProgram(
        tuple((item.op, Origin(item.segment, item.backward)) for item in traced.ops), given, roots, ties
    )


def _spec_of(ops: Mapping[str, Op], name: str) -> TensorSpec:
    op = ops[name]
    spec = ops[op.args[0].name].outputs[op.args[1]] if op.target == GETITEM else op.outputs[0]
    assert spec is not None
    return spec


def stream(program: StepProgram, tensor: TensorParallel) -> dict[str, AxisPlacement]:
    """With sequence parallelism: the residual stream, as it enters the first block, is sharded along the
    sequence. It is the first activation that the block reads. Raises UsageError where there is none, and for
    a sequence that ranks cannot share equally."""
    if tensor.first is None:
        return {}
    made: dict[str, Op] = {}
    of_parameters: set[str] = set()
    for op, _ in program.ops:
        inside = op.module == tensor.first or op.module.startswith(f"{tensor.first}.")
        for name in op.uses if inside else ():
            spec = made[name].outputs[0] if name in made and len(made[name].outputs) == 1 else None
            if name in of_parameters and spec is not None and len(spec.shape) == 3:
                length = spec.shape[SEQUENCE_DIM]
                if length % tensor.size:
                    raise UsageError(
                        f"sequence_parallel: a sequence of {length} cannot be sharded equally over "
                        f"{TENSOR} = {tensor.size}: change one of them, or leave sequence_parallel out"
                    )
                return {name: sharded(SEQUENCE_DIM)}
        if any(name.startswith(PARAM) or name in of_parameters for name in op.uses):
            of_parameters.add(op.name)
        made[op.name] = op
    raise UsageError(
        f"sequence_parallel: {tensor.first} reads no activation (batch, sequence, hidden) that a module "
        'before it has made: give it one, or layouts = "patched", or leave sequence_parallel out'
    )
