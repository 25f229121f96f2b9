"""Lanes on NCCL: a communicator of one rank, on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stretto.ir.collectives import IN_PROGRAMS, KINDS
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Communicator
from stretto.runtime.torch_transport import TorchTransport

pytestmark = pytest.mark.gpu


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[TorchTransport]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    made = TorchTransport()
    made.open([Communicator("tp", (0,), ("tp",))], torch.device("cuda", 0), Mesh((("pp", 1), ("tp", 1))))
    yield made
    made.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [kind.name for kind in IN_PROGRAMS])
def test_a_collective_comes_back(transport: TorchTransport, kind: str) -> None:
    value = torch.randn(64, 64, device="cuda")
    result = value if KINDS[kind].in_place else torch.zeros_like(value)
    expected = value.clone()
    handle = transport.collective("tp", kind, result, value, "sum" if KINDS[kind].in_place else "")
    handle.wait()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)


def test_a_collective_is_recorded_and_replayed(transport: TorchTransport) -> None:
    """As `stretto.runtime.step_graph` records a step with communication."""
    value = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        doubled = value * 2.0
        transport.collective("tp", "all_reduce", doubled, doubled, "sum").wait()
        made = doubled + 1.0
    for number in (3.0, 5.0):
        value.fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made, torch.full_like(made, 2.0 * number + 1.0))
