"""Each private corner of DTensor that tracing uses is there, and means what the adapter takes it to mean."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from stretto.tensor import tracing_adapter as adapter
from stretto.tensor.dtensor_adapter import local_of, new_spec, spec_of, unmasked, wrapped
from tests.tensor.lone import single_rank

aten = torch.ops.aten


def test_every_rank_stands_first_for_a_while() -> None:
    with single_rank(1, 4):
        on, off = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        before = on.get_coordinate()
        assert (tuple(before or ()), off.get_coordinate()) == ((1,), None)
        with adapter.standing_first([on, off]):
            assert tuple(on.get_coordinate() or ()) == tuple(off.get_coordinate() or ()) == (0,)
        assert (on.get_coordinate(), off.get_coordinate()) == (before, None)


def test_dtensor_changes_placements_as_it_is_told() -> None:
    """When an op needs it, when a program asks for it, and when a gradient goes back to a plain part."""
    asked: list[tuple[str, str]] = []

    def change(local: torch.Tensor, source: adapter.Spec, target: adapter.Spec) -> torch.Tensor:
        asked.append((str(source.placements[0]), str(target.placements[0])))
        return local.new_ones(4, 4)

    with single_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        spec = new_spec(mesh, [Shard(1)], (4, 4), (4, 1), torch.float32)
        x = wrapped(DTensor, torch.ones(4, 2), spec)
        part = torch.ones(4, 4, requires_grad=True)
        with adapter.redistributing(change):
            assert tuple(local_of(torch.softmax(x, 1)).shape) == (4, 4)
            assert asked == [("S(1)", "R")]
            assert tuple(local_of(x.redistribute(mesh, [Replicate()])).shape) == (4, 4)
            assert asked[1:] == [("S(1)", "R")]
            full = DTensor.from_local(part, mesh, [Replicate()], run_check=False)
            gradient = wrapped(
                DTensor, torch.ones(4, 4), new_spec(mesh, [Partial()], (4, 4), (4, 1), part.dtype)
            )
            full.backward(gradient)
            assert asked[2:] == [("P(sum)", "R")]
        before = len(asked)
        x.redistribute(mesh, [Replicate()])
        assert len(asked) == before


def test_the_inner_shard_of_several_dims_in_one() -> None:
    assert adapter.split_factor(_StridedShard(0, split_factor=3)) == 3
    assert adapter.split_factor(Shard(0)) == 1
    with single_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        spec = new_spec(mesh, [Shard(1)], (3, 4, 5), (20, 5, 1), torch.float32)
        x = wrapped(DTensor, torch.ones(3, 2, 5), spec)
        if torch.__version__ < "2.12":  # it has no such shard by itself
            with pytest.raises(RuntimeError, match="cannot be performed without redistribution"):
                x.view(12, 5)
            return
        (placement,) = x.view(12, 5).placements
    assert isinstance(placement, _StridedShard)
    assert (placement.dim, adapter.split_factor(placement)) == (0, 3)


def test_rows_of_a_table() -> None:
    seen = []

    def change(local: torch.Tensor, source: adapter.Spec, target: adapter.Spec) -> torch.Tensor:
        (placement,) = target.placements
        seen.append(adapter.table_rows(placement))
        adapter.keep_elsewhere(placement, local > 3)
        return local % 4

    with single_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        table = wrapped(DTensor, torch.ones(4, 3), new_spec(mesh, [Shard(0)], (8, 3), (3, 1), torch.float32))
        indices = wrapped(DTensor, torch.arange(8), new_spec(mesh, [Replicate()], (8,), (1,), torch.int64))
        with adapter.redistributing(change):
            found = aten.embedding.default(table, indices)
        (placement,) = found.placements
    assert seen == [8]
    kept = unmasked(torch.ones(8), spec_of(found))[0]
    assert kept.tolist() == [1.0] * 4 + [0.0] * 4
    assert [adapter.table_rows(p) for p in (placement, Partial(), Shard(0), Replicate())] == [
        8,
        None,
        None,
        None,
    ]
