"""What PyTorch's own DTensor gets wrong, or fails at on some ranks, with tensors on a mesh: right on all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import stretto
from stretto.tensor.dtensor_adapter import local_of
from tests.tensor.lone import single_rank
from tests.tensor.sweep_cases import ranged
from tests.tensor.world import all_end_well

F64 = torch.float64
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Ranks 0 and 1, and all three."""
    return DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])


def everywhere(x: Any, everyone: DeviceMesh) -> torch.Tensor:
    """The full tensor, on every rank."""
    found = stretto.local(stretto.reshard(x.detach(), everyone, [R]))
    assert found is not None
    return found


def close(found: torch.Tensor, expected: torch.Tensor | None) -> None:
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def values() -> None:
    mesh, _ = meshes()
    x = stretto.shard(torch.arange(1.0, 8.0, dtype=F64), mesh, [S0])
    total = x.sum()
    if dist.get_rank() == 2:
        for ask in (total.item, lambda: float(total), lambda: bool(total > 3), x.tolist, x.numpy):
            with pytest.raises(stretto.UsageError, match=r"rank 2 has no value of tensor .*stretto\.reshard"):
                ask()
        return
    assert local_of(total).item() != 28  # type: ignore[arg-type]
    assert total.item() == float(total) == 28
    assert int(total) == 28
    assert bool(total > 18)
    assert f"{total:.1f}" == "28.0"
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert np.asarray(x).sum() == x.numpy().sum() == 28
    assert torch.allclose(x, x + 1e-12)
    assert not torch.allclose(x, x + 1)
    with pytest.raises(stretto.UsageError, match=r"wants a gradient.*x\.detach\(\)"):
        stretto.shard(torch.ones(4, requires_grad=True), mesh, [S0]).numpy()


def equal_on_all_ranks() -> None:
    mesh, _ = meshes()
    x = torch.arange(7.0)
    one, other = stretto.shard(x, mesh, [S0]), stretto.shard(x, mesh, [R])
    assert torch.equal(one, other)
    assert not torch.equal(one + 1, other)


def what_shows_a_sharded_dim_is_a_copy() -> None:
    """Every rank is reported, and no write is lost."""
    mesh, everyone = meshes()
    x = stretto.shard(ranged(5, 4), mesh, [S0]) * 1
    with pytest.raises(stretto.UsageError, match=r"aten.fill_.*took out of a tensor.*torch\.where"):
        x[1:3] = 2.0
    x[:, 1:3] = 2.0
    assert everywhere(x, everyone)[:, 1:3].eq(2).all()
    part, rows = x[1:3], x[:, 0]
    x.add_(1)
    with pytest.raises(stretto.UsageError, match=r"aten.mul.*has been written into since"):
        part * 2
    close(everywhere(rows, everyone), ranged(5, 4)[:, 0] + 1)
    close(everywhere(x[1:3], everyone)[:, 1], torch.full((2,), 3.0, dtype=F64))


def dims_changed_in_place() -> None:
    mesh, everyone = meshes()
    x = stretto.shard(ranged(4, 6), mesh, [S0]) * 1
    x.t_().unsqueeze_(0)
    assert tuple(x.shape) == (1, 6, 4)
    assert x.placements == (Shard(2),)  # type: ignore[attr-defined]
    close(everywhere(x.squeeze_(0) + 1, everyone), ranged(4, 6).t() + 1)
    with pytest.raises(stretto.UsageError, match="changes the dims"):
        x.resize_(2, 2)


def what_no_rank_can_do_is_refused_on_all() -> None:
    mesh, _ = meshes()
    x = stretto.shard(ranged(4, 4), mesh, [S0])
    with pytest.raises(stretto.UsageError, match=r"draws at random.*one seed on all ranks"):
        torch.multinomial(x.abs(), 1)
    with pytest.raises(stretto.UsageError, match="is sparse"):
        x.to_sparse()
    with pytest.raises(stretto.UsageError, match=r"sparse.*to_dense"):
        x @ torch.eye(4, dtype=F64).to_sparse()
    with pytest.raises(RuntimeError, match=r"reduction dim|mat1"):
        x @ stretto.shard(ranged(5, 4), mesh, [S0])


def writes_into_a_sum() -> None:
    mesh, everyone = meshes()
    x = stretto.shard(ranged(5, 4), mesh, [S0])
    total = x.sum(0)
    assert total.placements == (Partial(),)  # type: ignore[attr-defined]
    total.mul_(2).add_(1).clamp_(min=0)
    close(everywhere(total, everyone), (ranged(5, 4).sum(0) * 2 + 1).clamp(min=0))


def three_ranks() -> None:
    values()
    equal_on_all_ranks()
    what_shows_a_sharded_dim_is_a_copy()
    dims_changed_in_place()
    what_no_rank_can_do_is_refused_on_all()
    writes_into_a_sum()


def test_programs() -> None:
    all_end_well([(3, "tests.tensor.test_global_values:three_ranks")])


@pytest.mark.parametrize("placement", [S0, S1], ids=str)
def test_an_op_of_rows_gathers_nothing(placement: Shard) -> None:
    """Attention cut by batch or heads, and sums along a dim that is full, stay cut."""
    with single_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        q = stretto.shard(torch.randn(4, 2, 3, 4, requires_grad=True), mesh, [placement])
        out = F.scaled_dot_product_attention(q, q, q)
        out.sum().backward()
        assert out.placements == q.grad.placements == (placement,)  # type: ignore[attr-defined,union-attr]
        assert q.cumsum(2).flip(2).placements == (placement,)  # type: ignore[attr-defined]


def test_in_inference_mode() -> None:
    """Composite ops come undivided there, and tensors count no writes."""
    with single_rank(0, 2), torch.inference_mode():
        mesh = DeviceMesh("cpu", [0, 1])
        x = stretto.shard(ranged(5, 4), mesh, [S0])
        y = F.linear(x, stretto.shard(ranged(3, 4), mesh, [R]))
        assert y.placements == (S0,)  # type: ignore[attr-defined]
        assert (x[1:3] + 1).placements == (R,)  # type: ignore[attr-defined]
