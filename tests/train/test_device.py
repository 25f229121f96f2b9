"""What ranks compute on (accelerators where there is one for each, else processors), and how they meet."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from stretto.errors import StrettoError, UsageError
from stretto.train import world
from stretto.train.world import World, check_graph, check_kinds, device_for, device_note, join, what_to_check


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two")
def test_each_rank_of_a_machine_has_its_own() -> None:
    assert device_for("auto", World()) == torch.device("cuda", 0)
    assert device_for("cuda", World(rank=7, size=8, local_size=2, local_rank=1)) == torch.device("cuda", 1)
    assert device_for("cpu", World()) == torch.device("cpu")
    assert device_note("auto", World()) is None
    assert device_note("cpu", World(local_size=4)) is None


@pytest.mark.usefixtures("two")
def test_where_they_are_too_few_it_is_said() -> None:
    many = World(size=4, local_size=4)
    assert device_for("auto", many) == torch.device("cpu")
    assert "has 2 accelerators, too few for its 4 ranks" in str(device_note("auto", many))
    with pytest.raises(UsageError, match=r"4 ranks on this machine, and it has 2: choose a layout"):
        device_for("cuda", many)


def test_a_machine_without_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(world, "DEVICES", tmp_path)
    assert device_for("auto", World()) == torch.device("cpu")
    assert device_note("auto", World(local_size=2)) is None
    with pytest.raises(UsageError, match=r"has 0: .*training.device = 'cpu'"):
        device_for("cuda", World())


def test_accelerators_that_pytorch_does_not_see_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(world, "DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()
    assert device_for("auto", World()) == torch.device("cpu")
    said = str(device_note("auto", World()))
    assert said.startswith("this machine has accelerators of NVIDIA, which this PyTorch (")
    assert "does not see: ranks compute on processors" in said
    assert device_note("cpu", World()) is None, "as it was asked for"
    with pytest.raises(UsageError, match=r"'cuda': this machine has accelerators of NVIDIA, .* install"):
        device_for("cuda", World())


def test_accelerators_of_another_kind_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert "accelerators of the kind 'xpu', and ranks compute on 'cuda' or processors" in str(
        device_note("auto", World())
    )


def test_a_step_is_replayed_on_accelerators_only() -> None:
    check_graph(True, torch.device("cuda", 0))
    check_graph(False, torch.device("cpu"))
    with pytest.raises(UsageError, match="this run computes on processors: leave it out"):
        check_graph(True, torch.device("cpu"))


def test_ranks_of_two_kinds_are_refused_on_all() -> None:
    store = HashStore()
    store.set("device/0", "cuda")
    with pytest.raises(UsageError, match="rank 1 would compute on a processor and rank 0 on an accelerator"):
        check_kinds(store, 1, 2, torch.device("cpu"))
    store.set("device/0", "cpu")
    check_kinds(store, 1, 2, torch.device("cpu"))


def test_a_port_that_another_program_has_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port), ("RANK", "0")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(StrettoError, match=f"^port {port} of this machine, MASTER_PORT, is in use"):
            join(World(rank=0, size=2, local_size=2))


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RuntimeError) as told:
        ProcessGroupGloo.create_device(interface="none0")
    assert what_to_check(told.value, 2).startswith("GLOO_SOCKET_IFNAME = 'none0': give a network interface")
    other = RuntimeError("The client socket has timed out after 300000ms")
    assert "all 2 ranks were started with the same MASTER_ADDR" in what_to_check(other, 2)
