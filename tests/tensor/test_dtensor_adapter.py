"""Each private corner of DTensor that the adapter uses is there, and means what it takes it to mean."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from stretto.tensor import dtensor_adapter as adapter
from tests.tensor.lone import single_rank

aten = torch.ops.aten


def test_a_tensor_from_its_parts() -> None:
    with single_rank(1, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        spec = adapter.new_spec(mesh, [Shard(0)], (4, 6), (6, 1), torch.float32)
        local = torch.ones(2, 6)
        x = adapter.wrapped(DTensor, local, spec, requires_grad=True)
        assert (tuple(x.shape), x.stride(), x.placements, x.requires_grad) == (
            (4, 6),
            (6, 1),
            (Shard(0),),
            True,
        )
        assert adapter.local_of(x) is local
        assert adapter.spec_of(x) == spec
        assert adapter.described(spec) == ((4, 6), torch.float32)
        turned = adapter.new_spec(mesh, [Shard(1)], (6, 4), (1, 6), torch.float32)
        y = adapter.wrapped(DTensor, local.t(), turned)
        adapter.set_spec(y, spec)
        assert y.placements == (Shard(0),)


def test_schemas_say_what_is_written() -> None:
    assert adapter.written_args(aten.add_.Tensor) == ((0, "self"),)
    assert adapter.written_args(aten.add.out) == ((3, "out"),)
    assert adapter.written_args(aten._foreach_add_.List) == ((0, "self"),)
    assert adapter.written_args(aten.add.Tensor) == ()
    assert adapter.written_args(aten._native_batch_norm_legit.default) == ()


def test_composite_ops_and_inner_shards() -> None:
    assert adapter.is_composite(aten.matmul.default)
    assert not adapter.is_composite(aten.mm.default)
    assert adapter.plain_placement(_StridedShard(1, split_factor=2)) == Shard(1)
    assert type(adapter.plain_placement(_StridedShard(1, split_factor=2))) is Shard
    assert adapter.plain_placement(Partial("avg")) == Partial("avg")


def test_parts_under_other_placements() -> None:
    with single_rank(1, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        spec = adapter.new_spec(mesh, [Replicate()], (4, 6), (6, 1), torch.float32)
        full = torch.arange(24.0).reshape(4, 6)
        assert torch.equal(adapter.part_of(full, spec, [Shard(1)]), full[:, 3:])


def test_dims_changed_in_place() -> None:
    with single_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        spec = adapter.new_spec(mesh, [Shard(0)], (4, 6), (6, 1), torch.float32)
        x = adapter.wrapped(DTensor, torch.ones(2, 6), spec)
        adapter.shown_as(x, x.t(), aten.t_.default, (x,), {})
        assert (x.shape, x.placements, x.to_local().shape) == ((6, 4), (Shard(1),), (6, 2))


def test_rules_that_fail_are_no_rules() -> None:
    with single_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        spec = adapter.new_spec(mesh, [Shard(0)], (5, 6), (6, 1), torch.float32)
        x = adapter.wrapped(DTensor, torch.ones(3, 6), spec)
        assert adapter.has_rule(aten.relu.default, (x,), {})
        assert not adapter.has_rule(aten.view.default, (x, [7]), {})


def test_no_mode_is_active_outside_modes() -> None:
    known = torch.arange(3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(torch.ones(2), FakeTensor)
        assert isinstance(known + 1, FakeTensor)
        with adapter.outside_modes():
            assert not isinstance(torch.ones(2), FakeTensor)
            assert (known + 1).tolist() == [1, 2, 3]


def test_ops_without_values() -> None:
    with adapter.without_values():
        x = torch.ones(2, 3)
        assert isinstance(x, FakeTensor)
        assert x.cumsum(0).shape == (2, 3)
        with pytest.raises(adapter.VALUES_NEEDED):
            x.sum().item()
        with pytest.raises(adapter.SHAPE_UNKNOWN):
            x.nonzero()


def test_writes_and_memory() -> None:
    x = torch.zeros(4)
    before = adapter.writes_of(x)
    x[1:].add_(1)
    assert adapter.writes_of(x) == adapter.writes_of(x[2:]) == before + 1
    assert adapter.same_memory(x, x[1:])
    assert not adapter.same_memory(x, x.clone())
    with torch.inference_mode():
        assert adapter.writes_of(torch.zeros(4)) is None
    for op, view in ((aten.squeeze_.dim, aten.squeeze.dim), (aten.transpose_.default, aten.transpose.int)):
        assert adapter.without_underscore(op) is view


def test_the_store_is_there() -> None:
    with single_rank(0, 2):
        assert adapter.shared_store("stretto") is not None
