"""What a lone rank computes with when nobody gives it a model or a batch: values of the right shapes.

The contract:

1. Matrices are normal with the variance 1 / columns and vectors (norms, biases) lie around one, so that
   values neither vanish nor grow, however many layers there are. Tied parameters are one tensor.
2. Buffers are ones; integer ones are zeros, which are valid indices into anything.
3. A batch's integers name rows of the embedding that they reach, where they reach one; else they are 0 or 1.
"""

from __future__ import annotations

import math

import torch

from stretto.ir.leaf_rows import rows_named
from stretto.ir.plan import Plan
from stretto.ir.program import Job, TensorSpec
from stretto.simulating.memory import bytes_throughout


def made_up_parameters(
    plan: Plan, place: int, device: torch.device, seed: int
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Step 1, for one place: index in the job -> the parameter in its own dtype, and the tensor that ops read
    (the same one unless the plan computes in another dtype)."""
    generator = torch.Generator().manual_seed(seed)
    stages = set(plan.schedule.stages_of(place))
    own: dict[int, torch.Tensor] = {}
    read: dict[int, torch.Tensor] = {}
    first: dict[str, int] = {}
    for k, parameter in enumerate(plan.job.parameters):
        if not stages & set(parameter.stages):
            continue
        like = first.setdefault(parameter.tied_to, k)
        if like != k and plan.job.parameters[like].spec == parameter.spec:
            own[k], read[k] = own[like], read[like]
            continue
        read[k] = own[k] = _weights(parameter.spec, generator, device)
        if parameter.own_dtype is not None:
            own[k] = read[k].to(getattr(torch, parameter.own_dtype))
    return own, read


def made_up_states(plan: Plan, place: int, device: torch.device) -> list[torch.Tensor]:
    """As much memory as the optimizer's state takes at one place."""
    nbytes = bytes_throughout(plan.job, plan.schedule.stages_of(place))["optimizer"]
    return [torch.zeros(nbytes, dtype=torch.uint8, device=device)]


def _weights(spec: TensorSpec, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=dtype, device=device)
    made = torch.randn(spec.shape, generator=generator)
    made = made.div_(math.sqrt(spec.shape[-1])) if len(spec.shape) > 1 else made.mul_(0.02).add_(1.0)
    return made.to(device, dtype)


def made_up_buffers(plan: Plan, place: int, device: torch.device) -> dict[int, torch.Tensor]:
    """Step 2, for one place: index in the job -> the buffer."""
    stages = set(plan.schedule.stages_of(place))
    found: dict[int, torch.Tensor] = {}
    for k, buffer in enumerate(plan.job.buffers):
        if stages & ({*buffer.stages} | {s for s, _, _ in buffer.updates}):
            dtype = getattr(torch, buffer.spec.dtype)
            fill = 1 if dtype.is_floating_point or dtype is torch.bool else 0
            found[k] = torch.full(buffer.spec.shape, fill, dtype=dtype, device=device)
    return found


def made_up_batch(job: Job, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Step 3: leaf -> the whole batch's values, all microbatches and data-parallel copies along dim 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = rows_named(job)
    leaves: dict[str, torch.Tensor] = {}
    for name, spec in job.batch:
        shape = spec.shape if name in job.whole else (spec.shape[0] * job.pieces, *spec.shape[1:])
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            made = torch.randn(shape, generator=generator).to(dtype)
        else:
            made = torch.randint(0, rows.get(name, 2), shape, generator=generator).to(dtype)
        leaves[name] = made.to(device)
    return leaves
