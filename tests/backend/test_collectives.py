"""Every kind of collective against plain formulas, on threads, on processes, and on a single rank."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.backend import collectives
from stretto.ir.collectives import IN_PROGRAMS, KINDS
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Communicator
from stretto.runtime.emulated_transport import SingleRankEnd
from stretto.runtime.torch_transport import TorchTransport
from stretto.runtime.transport import Handle, ThreadTransport, Transport
from tests.runtime.launch import launch

ROWS = 6
CASES: list[tuple[str, str]] = [
    *(("all_reduce", how) for how in ("sum", "max")),
    ("all_gather", ""),
    ("reduce_scatter", "sum"),
    ("all_to_all", ""),
    ("permute_next", ""),
    ("permute_previous", ""),
]
CPU = torch.device("cpu")


def value_of(rank: int) -> Tensor:
    return torch.sin(torch.arange(float(ROWS * 2), dtype=torch.float64).reshape(ROWS, 2) + 7 * rank)


def expected(kind: str, told: str, values: Sequence[Tensor], me: int) -> Tensor:
    size = len(values)
    if kind == "all_reduce":
        return torch.stack(list(values)).amax(0) if told == "max" else sum(values[1:], values[0])
    if kind == "all_gather":
        return torch.cat(list(values))
    if kind == "reduce_scatter":
        return sum(values[1:], values[0]).chunk(size)[me]
    if kind == "all_to_all":
        return torch.cat([value.chunk(size)[me] for value in values])
    return values[(me + (1 if kind == "permute_previous" else -1)) % size]


def result_of(kind: str, how: str, value: Tensor, size: int) -> Tensor:
    shape = KINDS[kind].shape(value.shape, size, how)
    assert shape is not None
    return value if KINDS[kind].in_place else value.new_full(shape, float("nan"))


def opened(end: Any, size: int) -> Any:
    end.open([Communicator("tp", tuple(range(size)), ("tp",))], CPU, Mesh((("tp", size),)))
    return end


def moved(end: Any, kind: str, told: str, size: int) -> Tensor:
    value = value_of(end.rank)
    result = result_of(kind, told, value, size)
    end.collective("tp", kind, result, value, told).wait()
    return result


def test_every_kind_of_programs_is_here() -> None:
    assert {kind for kind, _ in CASES} == {kind.name for kind in IN_PROGRAMS}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("kind", "told"), CASES)
def test_threads_get_what_the_formula_says(kind: str, told: str, size: int) -> None:
    ends = [opened(end, size) for end in ThreadTransport.group(size)]
    found: dict[int, Tensor] = {}

    def work(end: ThreadTransport) -> None:
        found[end.rank] = moved(end, kind, told, size)

    threads = [threading.Thread(target=work, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = [value_of(rank) for rank in range(size)]
    for rank in range(size):
        assert torch.equal(found[rank], expected(kind, told, values, rank))


def test_processes_get_what_the_formula_says(tmp_path: Path) -> None:
    for size in (2, 3):
        launch(size, __file__, str(tmp_path))
        values = [value_of(rank) for rank in range(size)]
        for rank in range(size):
            found = json.loads((tmp_path / f"{size}.{rank}.json").read_text())
            for (kind, told), mine in zip(CASES, found, strict=True):
                assert torch.equal(
                    torch.tensor(mine, dtype=torch.float64), expected(kind, told, values, rank)
                )


class SingleRank(SingleRankEnd):
    """A rank, of no plan, whose collectives are over when they begin."""

    send = recv = SingleRankEnd.broadcast

    def __init__(self, rank: int, size: int) -> None:
        Transport.__init__(self, rank, size)
        self.members = {"tp": tuple(range(size))}

    def _collective(self, lane: str, fill: Callable[[], object] | None = None) -> Handle:
        if fill is not None:
            fill()
        return Handle(lambda: None)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("kind", "told"), CASES)
def test_a_lone_ranks_peers_hold_what_it_holds_and_sums_stay(kind: str, told: str, size: int) -> None:
    for rank in range(size):
        end = SingleRank(rank, size)
        values = [value_of(rank)] * size
        want = expected(kind, "max" if told == "sum" else told, values, rank)
        if kind == "reduce_scatter":
            want = values[0].chunk(size)[rank]
        assert torch.equal(moved(end, kind, told, size), want)


@pytest.mark.parametrize(("kind", "told"), CASES)
def test_accelerators_call_the_library(kind: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of the library's own calls, which only processors do without."""
    called: list[tuple[Any, ...]] = []
    group: Any = object()

    def note(*args: Any, **named: Any) -> None:
        assert named.pop("async_op") is True
        assert named.pop("group") is group
        called.append((*args, *named.values()))

    for name in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(dist, name, note)
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(collectives, name, note)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 3)
    value = torch.empty(ROWS, 2, device="meta")
    result = result_of(kind, told, value, 3)
    collectives.start(kind, result, value, group, told)
    ((first, *rest),) = called
    assert first is result
    more: list[Any] = [value]
    if kind == "all_reduce":
        more = [dist.ReduceOp.MAX if told == "max" else dist.ReduceOp.SUM]
    elif kind == "all_to_all":
        more += [None, None]
    elif kind == "permute_next":
        more += [[ROWS, 0, 0], [0, 0, ROWS]]
    elif kind == "permute_previous":
        more += [[0, 0, ROWS], [ROWS, 0, 0]]
    assert rest == more


def _process(folder: Path) -> None:
    size = dist.get_world_size()
    end = opened(TorchTransport(timeout_s=60), size)
    found = [moved(end, kind, told, size).tolist() for kind, told in CASES]
    (folder / f"{size}.{end.rank}.json").write_text(json.dumps(found))
    end.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _process(Path(sys.argv[1]))
    dist.destroy_process_group()
