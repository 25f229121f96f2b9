"""Ranks as forks of a process that has imported what they need: whose children they are, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from stretto.config import TrainSettings
from stretto.train import preload
from stretto.train.launch_adapter import forking
from stretto.train.preload import Preloaded, preloaded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt")

PROGRAM = """
    import os, sys, threading, time
    from pathlib import Path
    from stretto.train import preload

    preload.MODULES = ("stretto.errors", "stretto.no_such_module")
    preload.become_rank()
    assert "colorsys" in sys.modules and preload.PRELOAD not in os.environ and threading.active_count() == 1
    rank = os.environ["RANK"]
    Path(os.environ["FOLDER"], rank).write_text(f"{os.getppid()} {os.getsid(0)} {os.environ.get('HOME')}")
    if rank == "1":
        time.sleep(60)
    sys.exit(int(rank))
"""
COMMAND = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
USED = ("colorsys:rgb_to_hsv", "colorsys:no_such_member")


@pytest.fixture
def ranks() -> Iterator[Preloaded]:
    assert preload._adopt(True)
    process = Preloaded(COMMAND, {}, USED, 3)
    yield process
    process.close()
    preload._adopt(False)


def test_a_rank_that_cannot_be_forked_is_started_otherwise(tmp_path: Path) -> None:
    """The process between the two has no rank, and says so; the next one is forked."""
    fails = """
        import os
        fork, main, calls = os.fork, os.getpid(), []
        def failing():
            if os.getpid() != main and not os.path.exists(os.environ["MARK"]):
                open(os.environ["MARK"], "w").close()
                raise BlockingIOError(11, "no process is to be had")
            return fork()
        os.fork = failing
    """
    command = [sys.executable, "-c", textwrap.dedent(fails) + textwrap.dedent(PROGRAM)]
    assert preload._adopt(True)
    process = Preloaded(command, {"MARK": str(tmp_path / "mark")}, [*USED], 2)
    try:
        assert process.wait()
        assert process.fork({"RANK": "0", "FOLDER": str(tmp_path)}) is None
        forked = process.fork({"RANK": "2", "FOLDER": str(tmp_path)})
        assert forked is not None
        assert forked.wait(60) == 2
    finally:
        process.close()
        preload._adopt(False)


def test_ranks_are_children_of_the_launcher_in_sessions_of_their_own(
    ranks: Preloaded, tmp_path: Path
) -> None:
    assert ranks.wait()
    started = [ranks.fork({"RANK": str(rank), "FOLDER": str(tmp_path)}) for rank in range(3)]
    first, second, third = (one for one in started if one is not None)
    assert (first.wait(60), third.wait(60)) == (0, 2)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.05)
    os.killpg(second.pid, signal.SIGKILL)
    assert second.wait(60) == second.poll() == -signal.SIGKILL
    assert ranks._process.returncode is not None, "nothing is left to be forked"
    for rank, one in ((0, first), (2, third)):
        # The environment is what was sent, and nothing else.
        assert (tmp_path / str(rank)).read_text() == f"{os.getpid()} {one.pid} None"


def test_ranks_outlive_the_process_that_they_are_forks_of(ranks: Preloaded, tmp_path: Path) -> None:
    assert ranks.wait()
    rank = ranks.fork({"RANK": "1", "FOLDER": str(tmp_path)})
    assert rank is not None
    ranks.close()
    assert rank.poll() is None
    os.kill(rank.pid, signal.SIGTERM)
    assert rank.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("ready", [False, True])
def test_where_the_process_is_gone_ranks_start_as_always(
    ranks: Preloaded, tmp_path: Path, ready: bool
) -> None:
    assert not ready or ranks.wait()
    ranks._process.kill()
    ranks._process.wait()
    assert not ranks.wait()
    assert ranks.fork({"RANK": "0"}) is None
    made = [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['RANK']))"]
    before = api.get_subprocess_handler  # type: ignore[attr-defined]
    with forking(ranks):
        handler = api.get_subprocess_handler(made[0], tuple(made[1:]), {"RANK": "3"}, "", "", 0, None)  # type: ignore[attr-defined]
        assert isinstance(handler, SubprocessHandler)
        assert handler.proc.wait(60) == 3
    assert api.get_subprocess_handler is before  # type: ignore[attr-defined]


def test_ranks_single_runs_and_accelerators_start_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    single, two = (TrainSettings.model_validate({"parallel": {"pp": ranks}}) for ranks in (1, 2))
    with preloaded(single, ["no such command"]) as process:
        assert process is None
    monkeypatch.setattr(preload, "_adopt", lambda wanted: False)
    with preloaded(two, ["no such command"]) as process:
        assert process is None
    monkeypatch.undo()
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(preload, "DEVICES", tmp_path)
    with preloaded(two, ["no such command"]) as process:
        assert process is None
    monkeypatch.undo()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with preloaded(two, ["no such command"]) as process:
        assert process is None
