"""The step of a plain model, as it was traced, laid out by passes: one rank's part of it.

1. Placements of parameters come from the plan that is read for the patched way as well
   (`stretto.parallelize.tensor`); with sequence parallelism, what enters the first block is sharded along
   the sequence.
2. `stretto.passes.layout` makes one rank's ops of the global ones.
3. Passes improve them, as any graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from stretto.backend.process_memory import rarely_collected
from stretto.capturing.graph import Traced, TracedOp, passed
from stretto.capturing.in_full import check_in_full
from stretto.capturing.outputs import with_partial
from stretto.capturing.substitutes import with_cuda_results
from stretto.errors import CaptureError, UsageError
from stretto.ir.axes import TENSOR
from stretto.ir.program import GETITEM, Op, Shard, TensorSpec
from stretto.parallelize.layout import Layout
from stretto.parallelize.slices import SEQUENCE_DIM
from stretto.parallelize.tensor import TensorParallel, full_inside, mixtures
from stretto.passes.layout.emit import MisfitError
from stretto.passes.layout.lower import lower
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, sharded
from stretto.passes.layout.program import Origin, StepProgram, with_equal_views_once
from stretto.passes.layout.shard import GRAD, PARAM, shard
from stretto.passes.rewrite import rooted

LOSS, UPDATE, SEEN = "loss", "update/", "seen/"
"""How roots of a step's program begin."""


@rarely_collected()
def laid_out(traced: Traced, layout: Layout, skip_passes: Collection[str] = ()) -> Traced:
    """See the module. traced: of the plain model. Raises CaptureError for what does not fit."""
    tensor = layout.tensor
    if tensor is None:
        return traced
    program = with_equal_views_once(program_of(traced))
    size = tensor.size
    if len({of.copies for of in tensor.shards.values()} - {1, size}) > 1:
        raise CaptureError(
            "heads of keys are shared by different numbers of ranks in different modules: give all the same "
            "heads of keys, or some the style 'replicated'"
        )
    placed = {f"{PARAM}{name}": _placement(of, size) for name, of in tensor.shards.items()}
    may_be_partial = frozenset(f"{SEEN}{k}" for k, one in enumerate(traced.seen) if one.joined == "sum")
    wishes = {**stream(program, tensor), **entering_in_full(program, tensor)}
    try:
        made = shard(program, TENSOR, size, placed, wishes, may_be_partial)
    except MisfitError as error:
        raise CaptureError(
            f"the passes of layouts do not fit {traced.name} ({error}): leave the module out of tp_plan, or "
            'give layouts = "patched"'
        ) from None
    check_in_full(traced, made, _gathering(tensor))
    low = lower(made.program)
    owned = rooted(op for op, _ in low.ops)
    if traced.device == "cuda" and not torch.cuda.is_available():
        owned = with_cuda_results(owned, low.given)
    ops = [
        TracedOp(op, origin.segment, origin.backward) for op, (_, origin) in zip(owned, low.ops, strict=True)
    ]
    first = frozenset(value for value, at in made.placed.items() if at.is_sharded and at.dim == 0)
    ops, now = passed(ops, set(low.roots.values()), low.given, first, skip_passes)
    roots = {root: now.get(value, value) for root, value in low.roots.items()}
    partial = dict.fromkeys(made.partial, (TENSOR,))
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
        shards=_kept_shards(layout.shards, gradients, size),
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


def _kept_shards(
    shards: Mapping[str, tuple[Shard, ...]], partial: Collection[str], size: int
) -> dict[str, tuple[Shard, ...]]:
    """One part that all ranks have is the full parameter, where its gradient is no partial sum."""
    result = {
        name: tuple(one for one in of if one.copies < size or name in partial) for name, of in shards.items()
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


def entering_in_full(program: StepProgram, tensor: TensorParallel) -> dict[str, AxisPlacement]:
    """With sequence parallelism: what enters a module that gathers is gathered there once. A router sees all
    tokens, so that no rank has to be told what another's has chosen."""
    inside = _gathering(tensor)
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


def _gathering(tensor: TensorParallel) -> tuple[str, ...]:
    """How names begin in modules that with sequence parallelism gather what they are given, for what in them
    is replicated as well: those with experts, and those with a head of keys that all ranks share."""
    if tensor.first is None:
        return ()
    inside = full_inside(tensor.first.rpartition(".")[0], tensor.modules)
    shared = [name for name, of in tensor.shards.items() if of.copies == tensor.size]
    found = {*mixtures(inside, tensor.modules)}
    found |= {name for name in inside if any(one.startswith(f"{name}.") for one in shared)}
    return tuple(f"{name}." for name in sorted(found))
