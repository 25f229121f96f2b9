"""What older releases of PyTorch do wrong is right, on every release."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stretto.backend.older_torch_adapter import asked_itself
from stretto.tensor.dtensor_adapter import new_spec, wrapped
from tests.tensor.lone import single_rank

aten = torch.ops.aten


def test_every_op_on_a_subclass_of_dtensor_calls_its_own_function() -> None:
    asked = []

    @asked_itself
    class Kind(DTensor):
        @classmethod
        def __torch_dispatch__(cls, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def,override]
            assert cls is Kind
            asked.append((op, kwargs or {}))
            return wrapped(Kind, args[0]._local_tensor.detach(), args[0]._spec)

    with single_rank(0, 2):
        spec = new_spec(DeviceMesh("cpu", [0, 1]), [Shard(0)], (4, 6), (6, 1), torch.float32)
        x = wrapped(Kind, torch.ones(2, 6), spec)
        plain = wrapped(DTensor, torch.ones(2, 6), spec)
        assert type(nn.Parameter(x)) is Kind
        assert [op for op, _ in asked] == [aten.detach.default]
        asked.clear()
        results = [x.flip(0), torch.add(plain, x, alpha=2), x.cumsum(1), aten.sin.default(x)]
        assert {type(result) for result in results} == {Kind}
        ops = [aten.flip.default, aten.add.Tensor, aten.cumsum.default, aten.sin.default]
        assert [op for op, _ in asked] == ops
        assert asked[1][1] == {"alpha": 2}
        asked.clear()
        assert type(plain + 1) is DTensor
        assert not asked


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_without_values_is_described_as_it_is(dtype: torch.dtype, masked: bool) -> None:
    shapes = (2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)

    def found(mode: str) -> list[tuple[object, ...]]:
        device = "meta" if mode == "meta" else "cpu"
        q, k, v = (torch.ones(shape, dtype=dtype, device=device).transpose(1, 2) for shape in shapes)
        more = (
            {"attn_mask": torch.zeros(q.shape[2], k.shape[2], dtype=dtype, device=device)} if masked else {}
        )
        results = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, **more)
        return [(x.shape, x.stride(), x.dtype, str(x.device)) for x in results]

    with FakeTensorMode():
        fake = found("fake")
    assert fake == found("real")
    assert [x[:3] for x in found("meta")] == [x[:3] for x in fake]
