"""Real processes: a rank is killed, a run is interrupted, and going on gives what would have been.

One undisturbed run of two ranks is what the others are compared with.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.runtime.launch import launch
from tests.train.kill_anywhere import Drive, draw
from tests.train.tiny import ranks_of, run_ranks, start, steps_of, write_settings

from stretto.config import load_settings
from stretto.train.lock import LOCK
from stretto.train.trainer import Trainer
from stretto.train.world import World

STEPS, EVERY = 90, 18

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The folder of a run of two ranks from beginning to end, without a launcher."""
    config = write_settings(folder, pp=2, steps=STEPS, every=EVERY, run="straight")
    launch(2, "stretto", "train", str(config))
    return folder / "straight"


def until_checkpoint(config: Path, process: subprocess.Popen[str]) -> dict[int, int]:
    """Wait for the first checkpoint; the ranks and their processes."""
    marker = config.with_suffix("") / "checkpoints" / "latest"
    until_s = time.monotonic() + 120
    while not marker.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return ranks_of(config)


def ended(config: Path, process: subprocess.Popen[str], within_s: float) -> tuple[str, str]:
    """Output and errors of a run that must end by itself and leave no process."""
    out, err = process.communicate(timeout=within_s)
    assert ranks_of(config) == {}
    return out, err


def test_killing_a_rank_ends_the_run_with_its_name_and_resuming_changes_no_bit(
    folder: Path, undisturbed: Path
) -> None:
    config = write_settings(folder, pp=2, steps=STEPS, every=EVERY, run="killed")
    config.write_text(config.read_text().replace(str(folder / "cache"), str(folder / "empty")))
    process = start("train", config)
    os.kill(until_checkpoint(config, process)[1], signal.SIGKILL)
    out, err = ended(config, process, 30)
    assert process.returncode == 1
    assert out.count("documents") == 2  # read once, said once: the ranks find it ready
    assert err.count("\n") == 1
    assert err.startswith("stretto: rank 1 was lost after step ")
    assert "SIGKILL ended it" in err
    assert "last checkpoint " in err
    before = steps_of(folder / "killed")
    assert EVERY <= len(before) < STEPS

    (status, out, err), _ = run_ranks(*[["train", config, "--resume"]] * 2)
    assert (status, err) == (0, "")
    assert "resumed from" in out
    assert "Measured against predicted" in out
    expected, found = steps_of(undisturbed), steps_of(folder / "killed")
    for key in ("loss", "grad_norm", "lr"):
        assert {step: line[key] for step, line in found.items()} == {
            step: line[key] for step, line in expected.items()
        }
    assert len(found) == STEPS


@pytest.mark.slow
def test_another_split_goes_on_from_the_same_checkpoint(folder: Path, undisturbed: Path) -> None:
    config = write_settings(folder, pp=1, steps=STEPS, every=EVERY, run="alone")
    made = undisturbed / "checkpoints" / f"step-{STEPS - EVERY:06d}"
    Trainer(load_settings(config, [f"checkpoint.resume={made}"]), World()).run()
    expected, found = steps_of(undisturbed), steps_of(folder / "alone")
    assert sorted(found) == list(range(STEPS - EVERY + 1, STEPS + 1))
    for step, line in found.items():
        assert line["loss"] == pytest.approx(expected[step]["loss"], rel=1e-6)


def test_ranks_that_see_other_folders_are_told_before_they_train(folder: Path) -> None:
    config = write_settings(folder, pp=2, steps=4, every=2, run="apart")
    outputs = launch(2, "tests.train.apart", str(config), statuses=(2,))
    said = "".join(outputs)
    assert said.count("the ranks do not share the folder of checkpoints") == 1
    assert "on rank 1, host " in said
    assert "Set checkpoint.dir to a folder that all hosts mount (NFS, Lustre)" in said
    for at in (folder / "apart", folder / "apart-1"):
        assert not [path for path in at.rglob("*") if path.is_file() and path.name != LOCK]


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
)
@pytest.mark.slow
def test_an_interrupted_run_ends_at_once_with_one_line(folder: Path, signum: int, status: int) -> None:
    name = signal.Signals(signum).name.lower()
    config = write_settings(folder, pp=2, steps=100_000, every=10, run=name)
    process = start("train", config)
    until_checkpoint(config, process)
    process.send_signal(signum)
    _, err = ended(config, process, 15)
    assert process.returncode == status
    assert err.count("\n") == 1
    assert err.startswith("stretto: interrupted at step ")
    assert err.rstrip().endswith("; go on with --resume")


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_within_a_minute(folder: Path) -> None:
    """Its connections stay open: nothing breaks, and nobody answers."""
    config = write_settings(folder, pp=2, steps=10**6, every=EVERY, run="stopped")
    process = start("train", config)
    os.kill(until_checkpoint(config, process)[1], signal.SIGSTOP)
    begun_s = time.monotonic()
    _, err = ended(config, process, 100)
    assert time.monotonic() - begun_s < 60
    assert process.returncode == 1
    assert err.startswith("stretto: rank 1 has given no sign of life for 30 s; it was stopped")
    assert "(phase: training)" in err
    assert "last checkpoint " in err


def test_ranks_do_not_outlive_a_launcher_that_was_killed(folder: Path) -> None:
    config = write_settings(folder, pp=2, steps=100_000, every=10, run="orphans")
    process = start("train", config)
    assert len(until_checkpoint(config, process)) == 2
    process.kill()
    process.communicate(timeout=30)
    until_s = time.monotonic() + 15
    while ranks_of(config):
        assert time.monotonic() < until_s
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_tensor_parallel_rank_is_named(folder: Path) -> None:
    config = write_settings(folder, steps=100_000, every=10, run="tensor", model="vocab_size = 302")
    process = start("train", config, "parallel.tp=2", "parallel.sequence_parallel=true")
    os.kill(until_checkpoint(config, process)[1], signal.SIGKILL)
    _, err = ended(config, process, 30)
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert err.startswith("stretto: rank 1 was lost after step ")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks", "victim"), [("pp", 3, 0), ("pp", 3, 2), ("tp-dp", 4, 0)])
def test_ranks_without_our_launcher_agree_on_who_was_lost(
    folder: Path, layout: str, ranks: int, victim: int
) -> None:
    run = f"apart-{layout}-{victim}"
    config = write_settings(folder, steps=100_000, run=run, model="vocab_size = 302").resolve()
    changes = ["parallel.pp=3"] if layout == "pp" else ["parallel.tp=2", "parallel.dp=2"]
    changes += ["model.layers=3", "checkpoint.every_steps=0"]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(29700 + victim), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [start("train", config, *changes, RANK=str(rank), **shared) for rank in range(ranks)]
    metrics = folder / run / "metrics.jsonl"
    try:
        until_s = time.monotonic() + 200
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        processes[victim].kill()
        for rank, process in enumerate(processes):
            _, err = process.communicate(timeout=30)
            if rank != victim:
                assert process.returncode == 1
                assert err.count("\n") == 1
                assert f"rank {victim} was lost" in err
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_signals_at_random_phases(tmp_path: Path) -> None:
    """Three of the cases that `tests.train.kill_anywhere` tries: SIGTERM, SIGKILL and SIGSTOP."""
    drive = Drive(tmp_path)
    rows = drive.drive([draw(number, seed=1) for number in (16, 30, 44)], at_once=1)
    assert not drive.wrong, rows
