"""Parameters that are spread over ranks: a rank's part of the whole, and the whole from all parts.

May touch `stretto.ir` and the formulas of `stretto.parallelize.tensor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from stretto.ir.program import Job, Parameter, TensorSpec
from stretto.parallelize.tensor import local_part, whole_of


def whole_spec(job: Job, parameter: Parameter) -> TensorSpec:
    """The spec of the model's own tensor, of which a rank holds `parameter.spec`."""
    shape = list(parameter.spec.shape)
    for shard in parameter.shards:
        shape[shard.dim] *= job.size(shard.axis)
    return TensorSpec(tuple(shape), parameter.spec.dtype)


def part_of(
    whole: torch.Tensor, parameter: Parameter, job: Job, coordinates: Mapping[str, int]
) -> torch.Tensor:
    """The part of the rank at `coordinates`; a view where it can be."""
    for shard in parameter.shards:
        whole = local_part(whole, shard, job.size(shard.axis), coordinates[shard.axis])
    return whole


def join(parts: Sequence[torch.Tensor], parameter: Parameter) -> torch.Tensor:
    """The whole from the parts along the parameter's one axis, in the order of ranks. A parameter that is
    not spread is the first part."""
    if not parameter.shards:
        return parts[0]
    (shard,) = parameter.shards
    return whole_of(list(parts), shard)
