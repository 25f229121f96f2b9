"""Parts of tensors in checkpoints: whatever boxes were written, every other layout finds its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from stretto.ir.program import Job, Parameter, Shard, TensorSpec
from stretto.parallelize.parts import local_shape
from stretto.runtime.rank_tensors import Part, full_spec, join, part_of, pieces_of
from stretto.runtime.transport import Transport
from stretto.saving import digests, tensors
from stretto.saving.folder import Writing
from stretto.train.checkpoint import read_tensors
from tests.synthetic import make_job

FULL = (12, 24)
# In a single process PyTorch's checkpoints warn that it is one.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHARDS = {
    "rows": Shard("tp", 0),
    "columns": Shard("tp", 1),
    "packed rows": Shard("tp", 0, 3),
    "packed columns": Shard("tp", 1, 3),
}
SHARED = {
    "rows that two keep": Shard("tp", 0, 1, 2),
    "packed rows that two keep": Shard("tp", 0, 3, 2),
    "rows that all keep": Shard("tp", 0, 1, 4),
}


def value() -> torch.Tensor:
    return torch.arange(12 * 24, dtype=torch.float32).reshape(FULL)


def job_of(size: int) -> Job:
    return replace(make_job(1, 1), axes=(("tp", size),))


def parameter_of(how: str, size: int) -> Parameter:
    shard = {**SHARDS, **SHARED}[how]
    shape = local_shape(torch.Size(FULL), shard, size)
    return Parameter(how, TensorSpec(shape, "float32"), (0,), (), how, shards=(shard,))


def part(how: str, size: int, at: int, tensor: torch.Tensor) -> Part:
    boxes = pieces_of(tensor, parameter_of(how, size), job_of(size), {"tp": at})
    return Part(FULL, tuple(boxes))


class Alone:
    """The transport of one rank."""

    rank, size = 0, 1

    def all_gather(self, item: Any) -> list[Any]:
        return [item]


def write(folder: Path, parts: dict[str, Part]) -> None:
    files = tensors.write(folder, parts, cast(Transport, Alone()), Writing("it", "see to it", ""))
    for name, data in {**files, digests.NAME: digests.sealed(files)}.items():
        (folder / name).write_bytes(data)


def kept(how: str, size: int, at: int) -> torch.Tensor:
    return part_of(value(), parameter_of(how, size), job_of(size), {"tp": at}).clone()


@pytest.mark.parametrize(
    ("how", "size"), [*((how, size) for how in SHARDS for size in (1, 2, 4)), *((how, 4) for how in SHARED)]
)
def test_the_boxes_of_all_ranks_lie_where_the_full_tensor_has_them(how: str, size: int) -> None:
    copies = {**SHARDS, **SHARED}[how].copies
    for first in range(copies):
        full = torch.full(FULL, -1.0)
        for at in range(first, size, copies):
            for offsets, view in part(how, size, at, kept(how, size, at)).boxes:
                box = tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))
                assert (full[box] == -1).all(), "two ranks have the same"
                full[box] = view
        assert torch.equal(full, value())
    parts = [kept(how, size, at) for at in range(size)]
    assert full_spec(job_of(size), parameter_of(how, size)).shape == FULL
    assert all(
        torch.equal(join(parts, parameter_of(how, size), job_of(size), copy), value())
        for copy in range(copies)
    )


@pytest.mark.parametrize("how", SHARDS)
@pytest.mark.parametrize(("wrote", "reads"), [(2, 4), (4, 2), (1, 2), (2, 1)])
def test_another_layout_finds_its_part(tmp_path: Path, how: str, wrote: int, reads: int) -> None:
    boxes = [box for at in range(wrote) for box in part(how, wrote, at, kept(how, wrote, at)).boxes]
    write(tmp_path, {"x": Part(FULL, tuple(boxes)), "step": Part.all_of(torch.tensor(7.0))})
    stored = tensors.stored_in(tmp_path)
    for at in range(reads):
        mine, step = torch.zeros(parameter_of(how, reads).spec.shape), torch.zeros(())
        wanted = {"x": part(how, reads, at, mine), "step": Part.all_of(step)}
        tensors.read(tmp_path, stored, wanted)
        assert torch.equal(mine, kept(how, reads, at))
        assert step == 7
    for read in (read_tensors, lambda folder, values: load(values, checkpoint_id=folder, no_dist=True)):
        full = torch.zeros(FULL)
        read(tmp_path, {"x": full})  # the latter as PyTorch alone does
        assert torch.equal(full, value())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128, torch.bool, torch.float8_e4m3fn])
def test_any_dtype_and_strides_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    given = value().to(dtype).t()
    write(tmp_path, {"x": Part.all_of(given), "none": Part.all_of(torch.zeros(0, 3, dtype=dtype))})
    found = torch.zeros(FULL[::-1], dtype=dtype)
    read_tensors(tmp_path, {"x": found, "none": torch.zeros(0, 3, dtype=dtype)})
    assert torch.equal(found.view(torch.uint8), given.contiguous().view(torch.uint8))
