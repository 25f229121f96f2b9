"""Real processes: a rank is killed, a run is interrupted, and going on gives what would have been.

One undisturbed run of two ranks is what the others are compared with.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.train.tiny import ranks_of, run_ranks, start, steps_of, write_settings

STEPS, EVERY = 90, 18

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The folder of a run of two ranks from beginning to end, without a launcher."""
    config = write_settings(folder, pp=2, steps=STEPS, every=EVERY, run="straight")
    for status, _, err in run_ranks(*[["train", config]] * 2):
        assert (status, err) == (0, "")
    return folder / "straight"


def until(done: Callable[[], bool], within_s: float = 240.0, every_s: float = 0.05) -> None:
    until_s = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < until_s
        time.sleep(every_s)


def until_checkpoint(config: Path, process: subprocess.Popen[str]) -> dict[int, int]:
    """Wait for the first checkpoint; the ranks and their processes."""
    marker = config.with_suffix("") / "checkpoints" / "latest"
    until(lambda: marker.exists() or process.poll() is not None, every_s=0.01)
    assert process.poll() is None, process.communicate()
    return ranks_of(config)


def bits_of(run: Path) -> list[list[float]]:
    """Losses, norms and rates of all steps, and the held-out loss at the end."""
    lines = [[line[key] for key in ("step", "loss", "grad_norm", "lr")] for line in steps_of(run).values()]
    assert len(lines) == STEPS
    return [*lines, [json.loads((run / "summary.json").read_text())["held_out_loss"]]]


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
    assert all(words in err for words in ("rank 1 was lost after step", "SIGKILL ended", "last checkpoint"))
    before = steps_of(folder / "killed")
    assert EVERY <= len(before) < STEPS

    (status, out, err), _ = run_ranks(*[["train", config, "--resume"]] * 2)
    assert (status, err) == (0, "")
    assert "resumed from" in out
    assert bits_of(folder / "killed") == bits_of(undisturbed)


PHASES: dict[str, Callable[[Path], bool]] = {
    "the start": lambda run: 1 in ranks_of(run.with_suffix(".toml")),  # the one that is signalled
    "the steps": lambda run: (run / "metrics.jsonl").exists() and len(steps_of(run)) > EVERY,
    "a checkpoint": lambda run: any((run / "checkpoints").glob("*.tmp")),
    "the report": lambda run: (run / "summary.json").exists(),
}
"""Phase -> whether it has begun, by what is on the disk."""
WORDS = {
    signal.SIGKILL: "rank 1 was lost",
    signal.SIGTERM: "interrupted at step",
    signal.SIGSTOP: "rank 1 has given no sign of life",
}


@pytest.mark.slow
@pytest.mark.parametrize("signum", WORDS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_ends_the_run_soon_and_it_goes_on_to_the_same_bits(
    folder: Path, undisturbed: Path, phase: str, signum: signal.Signals
) -> None:
    run = folder / f"{signum.name}-{phase.split()[1]}"
    config = write_settings(folder, pp=2, steps=STEPS, every=EVERY, run=run.name)
    process = start("train", config)
    until(lambda: process.poll() is not None or PHASES[phase](run), 300.0, every_s=0.002)
    victim = process.pid if signum == signal.SIGTERM else ranks_of(config).get(1)
    if victim is not None and process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(victim, signum)
    _, err = ended(config, process, 60)
    assert "Traceback" not in err
    if phase == "the steps":
        assert WORDS[signum] in err
        assert process.returncode == (143 if signum == signal.SIGTERM else 1)
        assert err.count("\n") == 1
        assert "last checkpoint" in err
        if signum == signal.SIGTERM:
            assert f"step-{len(steps_of(run)):06d}" in err
    if phase != "the report":
        assert process.returncode in (1, 143), err
    for status, _, err in run_ranks(*[["train", config]] * 2):
        assert (status, err) == (0, "")
    assert bits_of(run) == bits_of(undisturbed)
    assert (run / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [1, 2])
def test_ranks_of_which_one_was_lost_are_started_again(
    folder: Path, undisturbed: Path, restarts: int
) -> None:
    run = folder / f"again-{restarts}"
    config = write_settings(folder, pp=2, steps=STEPS, every=EVERY, run=run.name)
    process = start("train", config, "--max-restarts", str(restarts))
    metrics = run / "metrics.jsonl"
    for steps in (EVERY + 9, 2 * EVERY + 9):
        until(lambda least=steps: metrics.exists() and len(steps_of(run)) > least)  # type: ignore[misc]
        victim = ranks_of(config)[1]
        os.kill(victim, signal.SIGKILL)
        until(lambda gone=victim: gone not in ranks_of(config).values())  # type: ignore[misc]
    _, err = ended(config, process, 120)
    lost = [line for line in err.splitlines() if "rank 1 was lost after step" in line]
    again = [line for line in err.splitlines() if "stretto: restart " in line]
    assert len(lost) == 2
    assert again == [f"stretto: restart {number + 1} of {restarts}" for number in range(restarts)]
    assert process.returncode == (0 if restarts == 2 else 1)
    if restarts == 2:
        assert bits_of(run) == bits_of(undisturbed)


@pytest.mark.slow
def test_what_fails_again_is_not_started_again(folder: Path) -> None:
    config = write_settings(folder, pp=2, steps=STEPS, every=0, run="wild")
    process = start(
        *("train", config, "optimizer.lr=1e30", "optimizer.grad_clip_norm=0", "--max-restarts", "3")
    )
    _, err = ended(config, process, 120)
    assert process.returncode == 1
    assert "nothing was updated" in err
    assert "restart" not in err


@pytest.mark.slow
def test_one_rank_that_is_killed_is_started_again(folder: Path) -> None:
    config = write_settings(folder, steps=STEPS, every=EVERY, run="one")
    process = start("train", config, "--max-restarts", "1")
    os.kill(until_checkpoint(config, process)[0], signal.SIGKILL)
    _, err = ended(config, process, 120)
    assert process.returncode == 0, err
    assert "stretto: restart 1 of 1" in err
    assert len(steps_of(folder / "one")) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "rank", "all"])
def test_ranks_agree_on_the_step_that_they_save_at_a_signal(
    folder: Path, undisturbed: Path, whom: str
) -> None:
    run = folder / f"saved-{whom}"
    config = write_settings(folder, pp=2, steps=STEPS, every=0, run=run.name)
    process = start("train", config)
    metrics = run / "metrics.jsonl"
    until(lambda: metrics.exists() and len(steps_of(run)) > 7)
    ranks = [*ranks_of(config).values()]
    for pid in {"launcher": [process.pid], "rank": ranks[1:], "all": [process.pid, *ranks]}[whom]:
        os.kill(pid, signal.SIGTERM)
    signalled_s = time.monotonic()
    _, err = ended(config, process, 30)
    assert time.monotonic() - signalled_s < 10
    assert process.returncode == 143
    step = len(steps_of(run))
    assert f"step-{step:06d}" in err
    assert err.count("\n") == 1
    for status, _, err in run_ranks(*[["train", config]] * 2):
        assert (status, err) == (0, "")
    assert bits_of(run) == bits_of(undisturbed)


@pytest.mark.slow
def test_ranks_do_not_outlive_a_launcher_that_was_killed(folder: Path) -> None:
    config = write_settings(folder, pp=2, steps=100_000, every=10, run="orphans")
    process = start("train", config)
    assert len(until_checkpoint(config, process)) == 2
    process.kill()
    process.communicate(timeout=30)
    until(lambda: not ranks_of(config), 15.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "status", "words"),
    [(signal.SIGINT, 130, "interrupted at step "), (signal.SIGKILL, 1, "rank 1 was lost after step ")],
)
def test_a_signal_amid_the_steps_of_tensor_parallel_ranks(
    folder: Path, signum: signal.Signals, status: int, words: str
) -> None:
    """Ctrl-C reaches the launcher, and SIGKILL a rank."""
    config = write_settings(folder, steps=100_000, every=10, run=f"tp-{status}", model="vocab_size = 302")
    process = start("train", config, "parallel.tp=2", "parallel.sequence_parallel=true")
    ranks = until_checkpoint(config, process)
    os.kill(process.pid if signum == signal.SIGINT else ranks[1], signum)
    _, err = ended(config, process, 30)
    assert process.returncode == status
    assert err.count("\n") == 1
    assert err.startswith(f"stretto: {words}")


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
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5, 200.0)
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
