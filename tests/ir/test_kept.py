"""Which rows of a parameter each rank keeps."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import stretto
from stretto.ir.action import Phase
from stretto.ir.kept import (
    gradient_nbytes,
    kept_over,
    kept_spec,
    made_nbytes,
    parameter_nbytes,
    part_count,
    part_number,
    part_rows,
    rows_kept,
    rows_shape,
    state_nbytes,
)
from stretto.ir.program import Job, Parameter, Shard, TensorSpec
from stretto.ir.serialize import CODEC, job_text
from stretto.runtime.rank_tensors import part_of, pieces_of
from stretto.verifying.memory import bytes_throughout
from tests.synthetic import make_job

AXES = (("dp", 2), ("dp_shard", 2), ("cp", 3), ("ep", 2), ("tp", 2))


def job() -> Job:
    return replace(make_job(1, 1), axes=AXES, zero=3)


def parameter(shape: tuple[int, ...], *kept: str) -> Parameter:
    return Parameter("w", TensorSpec(shape, "bfloat16"), (0,), (), "w", "float32", kept=kept)


@pytest.mark.parametrize("shape", [(0, 2), (1,), (5, 2), (6,), (7, 1), (12,), (13, 3)])
@pytest.mark.parametrize("kept", [("cp",), ("cp", "ep"), ("cp", "ep", "dp_shard")])
def test_parts_are_those_of_chunk(shape: tuple[int, ...], kept: tuple[str, ...]) -> None:
    one = parameter(shape, *kept)
    count = part_count(job(), one)
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    # DTensor's way to say that later parts have no rows.
    parts = [*full.chunk(count), *[full[:0]] * count][:count] if shape[0] else [full] * count
    for number, part in enumerate(parts):
        first, end = rows_kept(job(), one, number)
        assert torch.equal(full[first:end], part)
        assert kept_spec(job(), one, number) == TensorSpec(tuple(part.shape), "float32")
        assert end - first <= part_rows(job(), one)
    assert 0 <= part_rows(job(), one) * part_count(job(), one) - shape[0] < count


def test_a_number_is_one_row() -> None:
    one = parameter((), "cp", "ep")
    assert [kept_spec(job(), one, at).shape for at in range(6)] == [(), *[(0,)] * 5]
    assert part_rows(job(), one) * part_count(job(), one) == 6


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((1, 8, 5), (8, 5)), ((2, 3, 5), (6, 5)), ((6, 3, 5), (6, 3, 5)), ((5, 7, 1), (35, 1))],
)
def test_a_stack_that_does_not_divide_is_cut_within_its_matrices(
    shape: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    """Of one expert a rank, each rank keeps rows of its matrix; of full matrices one rank would keep all."""
    one = parameter(shape, "cp")
    assert rows_shape(job(), one) == rows
    full = torch.arange(math.prod(shape)).reshape(shape)
    boxes = []
    for number in range(3):
        part = part_of(full, one, job(), {"cp": number})
        assert part.shape == kept_spec(job(), one, number).shape
        boxes += pieces_of(part, one, job(), {"cp": number})
    found = torch.full(shape, -1)
    for offsets, box in boxes:
        where = tuple(slice(a, a + n) for a, n in zip(offsets, box.shape, strict=True))
        assert (found[where] == -1).all()
        found[where] = box
    assert torch.equal(found, full)


def test_scattering_over_one_axis_after_the_other_leaves_each_rank_its_part() -> None:
    one = parameter((24,), "cp", "ep")
    for cp in range(3):
        for ep in range(2):
            at = {"dp": 1, "dp_shard": 1, "cp": cp, "ep": ep, "tp": 1}
            scattered = torch.arange(24).chunk(3)[cp].chunk(2)[ep]
            first, end = rows_kept(job(), one, part_number(job(), one, at))
            assert scattered.tolist() == list(range(first, end))


def test_it_is_kept_over_axes_with_copies() -> None:
    assert kept_over(parameter((8,)), ("cp", "ep", "dp")) == ("cp", "ep", "dp")
    expert = replace(parameter((8,)), shards=(Shard("ep", 0),))
    assert kept_over(expert, ("cp", "ep", "dp")) == ("cp", "dp")


def test_bytes_are_those_of_the_first_part() -> None:
    some, one = parameter((13, 3), "cp"), parameter((13, 3))
    assert parameter_nbytes(job(), one) == 13 * 3 * 4
    assert made_nbytes(job(), one) == 13 * 3 * 2  # the copy that ops read
    assert parameter_nbytes(job(), some) == gradient_nbytes(job(), some) == 5 * 3 * 4
    assert gradient_nbytes(replace(job(), zero=1), some) == 13 * 3 * 4  # until a step's end
    assert state_nbytes(replace(job(), optimizer="adamw"), some) == 2 * 5 * 3 * 4
    assert state_nbytes(replace(job(), optimizer="sgd"), some) == 0
    kept = replace(job(), parameters=(replace(some, grads=((0, Phase.W, "g"),)),), optimizer="momentum")
    assert bytes_throughout(kept, (0,)) == dict.fromkeys(("parameters", "optimizer"), 60)


def test_files_have_it_where_it_is() -> None:
    none = replace(job(), zero=0)
    assert '"zero"' not in job_text(none)
    assert '"kept"' not in job_text(none)
    form = CODEC.form(Job)
    for one in (none, replace(job(), parameters=(parameter((3,), "cp"),)), replace(job(), zero="auto")):
        assert form.read(json.loads(job_text(one))) == one


@pytest.mark.parametrize(
    ("given", "axes", "kept"),
    [
        ({"dp": 4}, {"dp": 4}, ()),
        ({"dp": 4, "zero": 1}, {"dp": 4}, ("dp",)),
        ({"dp": 4, "zero": "auto", "tp": 2}, {"dp": 4, "tp": 2}, ("dp",)),
        ({"dp": 8, "ep": 2, "cp": 2, "zero": 3}, {"dp": 4, "cp": 2, "ep": 2}, ("cp", "ep", "dp")),
        ({"dp": 8, "zero": 3, "dp_shard": 8}, {"dp": 8}, ("dp",)),
        ({"dp": 8, "zero": 3, "dp_shard": 2}, {"dp": 4, "dp_shard": 2}, ("dp_shard",)),
        ({"dp": 8, "ep": 2, "zero": 2, "dp_shard": 4}, {"dp": 2, "dp_shard": 2, "ep": 2}, ("ep", "dp_shard")),
        ({"dp": 8, "ep": 2, "zero": 2, "dp_shard": 2}, {"dp": 4, "ep": 2}, ("ep",)),
        ({"dp": 2, "ep": 2, "zero": 1}, {"ep": 2}, ("ep",)),
        ({"cp": 2, "zero": 1}, {"cp": 2}, ("cp",)),
        ({"dp": 2, "cp": 2, "dp_shard": 1, "zero": 1}, {"dp": 2, "cp": 2}, ("cp",)),
    ],
)
def test_axes_of_settings(given: dict[str, object], axes: dict[str, int], kept: tuple[str, ...]) -> None:
    parallel = stretto.Parallel(**given)  # type: ignore[arg-type]
    assert dict(parallel.axes) == axes
    assert parallel.kept_axes == kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"zero": 1, "pp": 2},
            "zero = 1 is about what ranks have copies of; give dp = 2",
        ),
        ({"dp": 4, "dp_shard": 2}, "dp_shard = 2 is about the parts that zero makes"),
        ({"dp": 4, "zero": 1, "dp_shard": 3}, "give one of 2, 4, or drop it"),
        ({"dp": 2, "zero": True}, "zero = 'True': input should be 0, 1, 2, 3 or 'auto'"),
        ({"dp": 2, "zero": "3"}, "zero = '3': input should be 0, 1, 2, 3 or 'auto'"),
        ({"dp": 2, "zero": 4}, "zero = 4: input should be 0, 1, 2, 3 or 'auto'"),
        ({"dp": 8, "ep": 4, "zero": 1, "dp_shard": 2}, "give one of 4, 8, or drop it"),
        ({"dp": 4, "zero": 1, "dp_shard": 1}, "dp_shard = 1 leaves no ranks"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, object], message: str) -> None:
    with pytest.raises(stretto.UsageError, match=message):
        stretto.Parallel(**given)  # type: ignore[arg-type]
