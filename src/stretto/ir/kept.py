"""What a rank keeps of a parameter: where several ranks read it in full, some of its rows (`Parameter.kept`).

`Parameter.spec`, which ops read, is cut along dim 0 in as many parts as the axes have ranks, as `torch.chunk`
cuts: every part has equally many rows, rounded up, and later parts have fewer or none. Of a stack of matrices
(three dims or more) that does not divide so, leading dims are merged until it does: of one expert a rank,
parts are rows of its matrix. A number without dims counts as one row: the first part is the number, others
are vectors of no element. Collectives work on equal parts and pad them; what is kept is not padded.

One that a rank keeps in full (`Parameter.slot`) lies in a bucket of such: each rank keeps a row of the
bucket, in which the parameters are that are its own. Of others it has no rows.

A rank's part goes by its coordinates along the axes, of which the last varies the fastest: what is scattered
over one axis after the other leaves each rank its part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stretto.ir.mesh import Mesh
from stretto.ir.parameters import STATES, Shard, gathers
from stretto.ir.program import Job, Parameter, TensorSpec


def kept_over(parameter: Parameter, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of the axes along which ranks have copies of the parameter."""
    return tuple(axis for axis in axes if not parameter.is_sharded(axis))


def part_count(job: Job, parameter: Parameter) -> int:
    """How many parts there are."""
    return math.prod(job.size(axis) for axis in parameter.kept)


def part_number(job: Job, parameter: Parameter, coordinates: Mapping[str, int]) -> int:
    """Which part the rank at these coordinates keeps."""
    return Mesh(tuple((axis, job.size(axis)) for axis in parameter.kept)).rank(coordinates)


def rows_shape(job: Job, parameter: Parameter) -> tuple[int, ...]:
    """The shape with the rows that are cut, along dim 0."""
    shape, parts = parameter.spec.shape, part_count(job, parameter)
    while parameter.slot is None and len(shape) > 2 and shape[0] % parts:
        shape = (shape[0] * shape[1], *shape[2:])
    return shape or (1,)


def rows_shard(job: Job, parameter: Parameter, shard: Shard) -> Shard:
    """How what is cut along dim 0 (`rows_shape`) is sharded over an axis over which the parameter is."""
    shape = parameter.spec.shape
    merged = len(shape) - len(rows_shape(job, parameter))  # into dim 0, besides itself
    if merged <= 0 or shard.dim > merged:
        return replace(shard, dim=shard.dim - max(0, merged))
    return replace(shard, dim=0, blocks=shard.blocks * math.prod(shape[: shard.dim]))


def part_rows(job: Job, parameter: Parameter) -> int:
    """Rows of each part for a collective, the last ones of which may be padding."""
    return -(-rows_shape(job, parameter)[0] // part_count(job, parameter))


def rows_kept(job: Job, parameter: Parameter, number: int) -> tuple[int, int]:
    """Where the rows of a part begin and end."""
    if parameter.slot is not None:
        return 0, rows_shape(job, parameter)[0] if number == parameter.slot.part else 0
    rows, each = rows_shape(job, parameter)[0], part_rows(job, parameter)
    return min(rows, number * each), min(rows, (number + 1) * each)


def largest_part(parameter: Parameter) -> int:
    """The number of the part that has the most rows."""
    return 0 if parameter.slot is None else parameter.slot.part


def kept_spec(job: Job, parameter: Parameter, number: int | None = None) -> TensorSpec:
    """Of a part, in the dtype of the model's own parameter; without a number, of the largest. A parameter
    that is not kept in parts has one."""
    if not parameter.kept:
        return parameter.grad_spec
    number = largest_part(parameter) if number is None else number
    first, end = rows_kept(job, parameter, number)
    shape = (end - first, *rows_shape(job, parameter)[1:])
    return TensorSpec(shape if parameter.spec.shape or first == end else (), parameter.grad_dtype)


def added_spec(job: Job, parameter: Parameter) -> TensorSpec:
    """What a rank's ops add up as the parameter's gradient."""
    return shard_spec(job, parameter) if parameter.scattered else parameter.grad_spec


def shard_spec(job: Job, parameter: Parameter) -> TensorSpec:
    """What programs have of a part, in the dtype of the model's own parameter: with its padding, and with a
    dim of rows; a row of the bucket, where the parameter lies in one."""
    if not parameter.kept:
        return parameter.grad_spec
    if parameter.slot is not None:
        return TensorSpec((1, parameter.slot.length), parameter.grad_dtype)
    return TensorSpec((part_rows(job, parameter), *rows_shape(job, parameter)[1:]), parameter.grad_dtype)


def bucket_pieces(job: Job, bucket: str) -> list[tuple[Parameter | None, int]]:
    """What lies one behind another in all parts of a bucket (`Parameter.slot`): (the first parameter of a
    tie, or None for padding, elements)."""
    ties = {p.tied_to: p for p in reversed(job.parameters) if p.slot is not None and p.kept_as == bucket}
    lie = {p.slot.part * p.slot.length + p.slot.first: p for p in ties.values() if p.slot is not None}
    result: list[tuple[Parameter | None, int]] = []
    at = 0
    for begin, parameter in sorted(lie.items()):
        result += [(None, begin - at)] * (begin > at) + [(parameter, parameter.spec.numel)]
        at = begin + parameter.spec.numel
    some = next(iter(lie.values()))
    end = part_count(job, some) * shard_spec(job, some).numel
    return result + [(None, end - at)] * (end > at)


# Bytes on the rank that has most of them. Of a bucket its first parameter has all that a rank keeps.


def parameter_nbytes(job: Job, parameter: Parameter) -> int:
    """Of what the rank keeps."""
    if parameter.slot is not None:
        return shard_spec(job, parameter).nbytes if parameter.leads else 0
    return kept_spec(job, parameter).nbytes


def made_nbytes(job: Job, parameter: Parameter) -> int:
    """Of what ops read, where that is made of it once a step."""
    in_microbatches = bool(parameter.kept) and gathers(job.zero)
    return parameter.spec.nbytes if parameter.is_made and not in_microbatches else 0


def gradient_nbytes(job: Job, parameter: Parameter) -> int:
    """Of the gradient while microbatches add to it, of a parameter that is trained."""
    return parameter.grad_nbytes if job.zero in (0, 1) else kept_spec(job, parameter).nbytes


def state_nbytes(job: Job, parameter: Parameter) -> int:
    """Of the optimizer's state, of a parameter that is trained."""
    return STATES[job.optimizer] * parameter_nbytes(job, parameter)
