"""When a run saves: beside its steps, at a signal, and what is left where a save fails."""

from __future__ import annotations

import errno
import signal
import statistics
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.tiny import GPT, steps_of, train, write_settings
from torch.distributed.checkpoint import FileSystemWriter

from stretto.config import load_settings
from stretto.errors import StrettoError
from stretto.saving.beside import Saving
from stretto.train import interrupt, launch
from stretto.train.saves import Saves
from stretto.train.trainer import Trainer

EVERY = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose text and tokens all runs of this file share."""
    return tmp_path_factory.mktemp("saves")


def bits_of(run: Path) -> list[tuple[float, ...]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in steps_of(run).values()]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[tuple[float, ...]]:
    path = write_settings(folder, steps=4 * EVERY, every=EVERY, run="straight")
    return bits_of(train(path, "checkpoint.asynchronous=false").settings.run_dir)


def test_a_save_that_fails_beside_steps_ends_the_run_and_the_last_checkpoint_stays(
    folder: Path, undisturbed: list[tuple[float, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_settings(folder, steps=4 * EVERY, every=EVERY, run="full")
    checkpoints = load_settings(path).checkpoint_dir
    original = FileSystemWriter.write_data

    def fill_up(writer: FileSystemWriter, *rest: Any) -> object:
        if (checkpoints / "latest").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(writer, *rest)

    monkeypatch.setattr(FileSystemWriter, "write_data", fill_up)
    words = r"step 10 .* the disk is full.*the last complete checkpoint is .*step-000005"
    with pytest.raises(StrettoError, match=words) as caught:
        train(path)
    assert caught.value.exit_status == 1
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step-000005"]
    assert len(steps_of(path.with_suffix(""))) < 3 * EVERY + 1
    monkeypatch.undo()
    assert bits_of(train(path).settings.run_dir) == undisturbed


def test_what_ended_a_run_is_reported_whatever_its_save_ends_with() -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    runner: Any = SimpleNamespace(transport=SimpleNamespace(size=1))
    nothing: Any = None
    saves = Saves(nothing, nothing, runner, nothing, print)
    saves._under_way = Saving(fail)
    with pytest.raises(ZeroDivisionError), saves:
        raise ZeroDivisionError


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_the_step_and_the_run_goes_on_to_the_same_bits(
    folder: Path,
    undisturbed: list[tuple[float, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signum: signal.Signals,
) -> None:
    path = write_settings(folder, steps=4 * EVERY, every=EVERY, run=signum.name)
    one_step = Trainer._one_step

    def signalled(self: Trainer, batch: Any) -> tuple[float, float, float]:
        if self.step == EVERY + 2:
            signal.raise_signal(signum)
            signal.raise_signal(signum)  # as a batch system and a launcher do
        return one_step(self, batch)

    monkeypatch.setattr(Trainer, "_one_step", signalled)
    assert launch.start(load_settings(path), ["stretto"]) == 128 + signum
    assert f"interrupted at step {EVERY + 3}; last checkpoint" in capsys.readouterr().err
    assert (path.with_suffix("") / "checkpoints" / "latest").read_text() == f"step-{EVERY + 3:06d}\n"
    monkeypatch.undo()
    assert bits_of(train(path).settings.run_dir) == undisturbed


def test_a_second_signal_ends_the_run_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_settings(folder, steps=4 * EVERY, every=0, run="twice")

    def signalled(self: Trainer, batch: Any) -> tuple[float, float, float]:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it goes on")

    monkeypatch.setattr(Trainer, "_one_step", signalled)
    monkeypatch.setattr(interrupt, "REPEATED_S", 0.0)
    assert launch.start(load_settings(path), ["stretto"]) == 143
    assert not (path.with_suffix("") / "checkpoints" / "latest").exists()


def waited_s() -> float:
    """How long this thread was ready and had no core, in all: what other programs cost it."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    return int(text.split()[1]) / 1e9


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="asks the system's scheduler")
def test_steps_beside_a_save_are_hardly_longer(folder: Path) -> None:
    """Medians of steps with a save under way, and of those between, without what they wait for a core: the
    thread that writes needs one of its own."""
    table = GPT.replace("hidden = 32", "hidden = 256")
    path = write_settings(folder, steps=121, every=10, run="long", table=table)
    busy: list[float] = []
    idle: list[float] = []
    one_step = Trainer._one_step

    def timed(self: Trainer, batch: Any) -> tuple[float, float, float]:
        begin_s = time.perf_counter() - waited_s()
        made = one_step(self, batch)
        took_s = time.perf_counter() - waited_s() - begin_s
        saves = self._saves._under_way is not None and not self._saves._under_way.done
        (busy if saves else idle).append(took_s)
        return made

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "_one_step", timed)
        train(path)
    ratio = statistics.median(busy) / statistics.median(idle)
    print(f"{len(busy)} steps beside saves, {len(idle)} others: {ratio:.3f} times as long")
    assert len(busy) >= 10
    assert ratio < 1.05
