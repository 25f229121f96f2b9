"""A rank among the others: how many there are, what they compute on, and how they meet."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from stretto.config import Parallel
from stretto.errors import StrettoError, UsageError
from stretto.train import world
from stretto.train.world import World, check_graph, check_kinds, device_for, device_note, join, what_to_check

CPU, ALONE = torch.device("cpu"), World()


@pytest.fixture
def accelerators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with two of them, with one whose driver PyTorch does not see, or one of another kind."""
    what = request.param
    monkeypatch.setattr(world, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: what == "two")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: what == "xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    if what == "unseen":
        (tmp_path / "nvidia0").touch()


MANY = World(size=4, local_size=4)


@pytest.mark.parametrize(
    ("accelerators", "here", "device", "note", "refusal"),
    [
        ("two", ALONE, torch.device("cuda", 0), None, None),
        ("two", World(7, 8, 2, local_rank=1), torch.device("cuda", 1), None, None),
        ("two", MANY, CPU, "too few for its 4 ranks", "has 2: choose a layout"),
        ("none", ALONE, CPU, None, r"has 0: .*training.device = 'cpu'"),
        ("unseen", ALONE, CPU, "NVIDIA, which this PyTorch", "accelerators of NVIDIA, .* install"),
        ("xpu", ALONE, CPU, "kind 'xpu'", "kind 'xpu'"),
    ],
    indirect=["accelerators"],
)
@pytest.mark.usefixtures("accelerators")
def test_a_rank_has_an_accelerator_where_there_is_one_for_each(
    here: World, device: torch.device, note: str | None, refusal: str | None
) -> None:
    assert device_for("auto", here) == device
    assert device_for("cpu", here) == CPU
    assert device_note("cpu", here) is None, "as it was asked for"
    assert (device_note("auto", here) is None) if note is None else note in str(device_note("auto", here))
    if refusal is None:
        assert device_for("cuda", here) == device
    else:
        with pytest.raises(UsageError, match=refusal):
            device_for("cuda", here)


def test_a_step_is_replayed_on_accelerators_only() -> None:
    check_graph(True, torch.device("cuda", 0))
    check_graph(False, CPU)
    with pytest.raises(UsageError, match="processors"):
        check_graph(True, CPU)


@pytest.mark.parametrize(
    ("size", "layout", "words"),
    [
        (2, {"pp": 2, "tp": 2, "dp": 2}, "parallel.pp = 2 times .*dp = 2 times .*tp = 2 needs 8 ranks"),
        (1, {"tp": 2}, "parallel.tp = 2 needs 2 ranks"),
        (3, {}, "parallel.pp = 1 needs 1 rank, but WORLD_SIZE is 3"),
        (8, {"pp": 2, "tp": 2, "dp": 2}, None),
    ],
)
def test_there_are_as_many_ranks_as_the_layout_needs(
    size: int, layout: dict[str, int], words: str | None
) -> None:
    if words is None:
        world.check_size(World(0, size), Parallel(**layout))
    else:
        with pytest.raises(UsageError, match=words):
            world.check_size(World(0, size), Parallel(**layout))


def test_the_environment_names_the_rank_and_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [world.threads(None, n) for n in (1, 3, 16)] == [8, 2, 1]
    assert world.threads(5, 2) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert world.threads(None, 1) == 3
    assert world.crowding(4, 2) is None
    assert "8 ranks of 2 threads share 8 cores" in str(world.crowding(8, 2))
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="RANK = 'one'"):
        world.environment()


def test_ranks_of_two_kinds_are_refused_on_all() -> None:
    store = HashStore()
    store.set("device/0", "cuda")
    with pytest.raises(UsageError, match="rank 1 would compute on a processor and rank 0 on an accelerator"):
        check_kinds(store, 1, 2, CPU)
    store.set("device/0", "cpu")
    check_kinds(store, 1, 2, CPU)


def test_a_port_that_another_program_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(StrettoError, match=f"^port {port} .* is in use"):
            join(World(rank=0, size=2, local_size=2))


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RuntimeError) as caught:
        ProcessGroupGloo.create_device(interface="none0")
    assert "'none0'" in what_to_check(caught.value, 2)
    other = RuntimeError("The client socket has timed out after 300000ms")
    assert "MASTER_ADDR" in what_to_check(other, 2)
