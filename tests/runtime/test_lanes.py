"""Lanes at run time: made up front in one order, each on its own, side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import RunError, UsageError
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Communicator
from stretto.ir.serialize import load_plan
from stretto.models.gpt import next_token_loss
from stretto.runtime import torch_transport
from stretto.runtime.runner import Runner
from stretto.runtime.torch_transport import TorchTransport
from tests.parallelize.equality import batch_of, gpt
from tests.runtime.equality import lowered
from tests.runtime.launch import launch

PAIR = Mesh((("pp", 2),))
LANES = [Communicator(name, (0, 1)) for name in ("first", "second", "third", "fourth")]
CPU = torch.device("cpu")


# What processes do.


def creation(folder: Path) -> None:
    """Which groups a pipeline of tensor-parallel places makes, and when; and how many it gives back."""
    made: list[Any] = []
    ended: list[Any] = []
    plain, plain_end = dist.new_group, dist.destroy_process_group

    def new_group(ranks: Any = None, *arguments: Any, **named: Any) -> Any:
        made.append(ranks)
        return plain(ranks, *arguments, **named)

    def end(group: Any = None) -> None:
        ended.append(group)
        plain_end(group)

    dist.new_group, dist.destroy_process_group = new_group, end
    runner = Runner(load_plan(folder / "plan.json"), gpt().double())
    before = len(made)
    for _ in range(2):
        runner.step(batch_of())
    transport = runner.transport
    refused = ""
    try:
        transport.broadcast("a lane that no one opened", torch.zeros(1), 0)
    except RunError as error:
        refused = str(error)
    told: dict[str, Any] = {"made": [*made], "before": before, "refused": refused}
    transport.beside().all_gather("all are connected")
    runner.close()
    mine = [ranks for ranks in made if ranks is None or dist.get_rank() in ranks]
    told |= {"left": len(mine) - len(ended), "beside": len(made) - before}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(told))


def disagreement(folder: Path) -> None:
    """Ranks that would make their groups in different orders."""
    transport = TorchTransport(timeout_s=60)
    lanes = LANES[:2] if dist.get_rank() == 0 else LANES[1::-1]
    try:
        transport.open(lanes, CPU, PAIR)
        told = "opened"
    except UsageError as error:
        told = str(error)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(told))


def blocked(folder: Path) -> None:
    """Rank 1 starts its part on three lanes only when the fourth, which was started last, is done."""
    rank = dist.get_rank()
    transport = TorchTransport(timeout_s=60)
    transport.open(LANES, CPU, PAIR)

    def start(lane: str, at: int) -> Any:
        value = torch.arange(6.0) + 10 * rank
        if at % 3 == 0:
            return transport.collective(lane, "all_reduce", value, value, "sum"), value
        result = torch.empty(12 if at % 3 == 1 else 3)
        kind = "all_gather" if at % 3 == 1 else "reduce_scatter"
        return transport.collective(lane, kind, result, value, "sum"), result

    first, *others = [lane.name for lane in reversed(LANES)]
    kept = [start(lane, at) for at, lane in enumerate(others)] if rank == 0 else []
    results = []
    for kind in range(3):
        handle, result = start(first, kind)
        handle.wait()
        results.append(result.tolist())
    handle, buffer = None, torch.empty(4)
    if rank == 0:
        transport.send(first, torch.full((4,), 7.0), 1).wait()
    else:
        transport.recv(first, buffer, 0).wait()
        results.append(buffer.tolist())
    transport.all_gather("the fourth lane is done")
    kept = kept or [start(lane, at) for at, lane in enumerate(others)]
    for handle, result in kept:
        handle.wait()
        results.append(result.tolist())
    (folder / f"{rank}.json").write_text(json.dumps(results))
    transport.close()


# What is asked of them.


def told(what: str, ranks: int, folder: Path) -> list[Any]:
    launch(ranks, "tests.runtime.test_lanes", what, str(folder))
    return read(ranks, folder)


def read(ranks: int, folder: Path) -> list[Any]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have told, a folder for each question."""
    folder = tmp_path_factory.mktemp("two_ranks")
    asked: list[str] = []
    for what in ("disagreement", "blocked"):
        (folder / what).mkdir()
        asked += what, str(folder / what)
    launch(2, "tests.runtime.test_lanes", *asked)
    return folder


def test_all_ranks_make_all_communicators_up_front_in_one_order(tmp_path: Path) -> None:
    layout = Parallel(tp=2, pp=2, sequence_parallel=True, microbatches=2)
    job = capture(gpt().double(), batch_of(), next_token_loss, layout)
    lowered(job, "1f1b").save(tmp_path / "plan.json")
    found = told("creation", 4, tmp_path)
    # The transport's own; messages each way, for either tensor-parallel rank; the loss; the places' own.
    assert found[0]["made"] == [None, [0, 2], [1, 3], [2, 0], [3, 1], [0, 2], [1, 3], [0, 1], [2, 3]]
    for rank in range(4):
        assert found[rank]["made"] == found[0]["made"]
        assert found[rank]["before"] == len(found[0]["made"]), "a step makes no communicator"
        assert "lane 'a lane that no one opened' was not opened" in found[rank]["refused"]
        assert (found[rank]["beside"], found[rank]["left"]) == (1, 0), "an end beside is closed, too"


def test_ranks_that_would_open_lanes_in_different_orders_are_refused(two_ranks: Path) -> None:
    zero, one = read(2, two_ranks / "disagreement")
    assert "rank 0 opens lanes first, second, but rank 1 opens second, first" in zero
    assert "rank 1 opens lanes second, first, but rank 0 opens first, second" in one


def test_a_lane_goes_on_while_others_are_blocked(two_ranks: Path) -> None:
    zero, one = read(2, two_ranks / "blocked")
    summed = [10.0 + 2 * k for k in range(6)]
    gathered = [*map(float, range(6)), *(10.0 + k for k in range(6))]
    scattered = [summed[:3], summed[3:]]
    for rank, found in enumerate((zero, one)):
        message = [[7.0] * 4] if rank == 1 else []
        each = [summed, gathered, scattered[rank]]
        assert found == [*each, *message, *each]


class Options:
    """Stands for NCCL's, which PyTorch has only where it was built with it."""

    is_high_priority_stream = False


def test_on_nccl_a_lane_has_a_stream_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("NCCL", (), {"Options": Options}), raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    found = torch_transport._lane_options(torch.device("cuda", 0))
    assert found["backend"] == "nccl"
    assert found["pg_options"].is_high_priority_stream is True
    assert torch_transport._lane_options(CPU) == {"backend": "stretto_gloo"}
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    assert torch_transport._lane_options(torch.device("cuda", 0)) == {}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    DONE = {
        "creation": creation,
        "disagreement": disagreement,
        "blocked": blocked,
    }
    for at in range(1, len(sys.argv), 2):
        DONE[sys.argv[at]](Path(sys.argv[at + 1]))
    dist.destroy_process_group()
