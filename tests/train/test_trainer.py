"""A run in one process: what it learns and leaves, what stops it, and costs that are measured again."""

from __future__ import annotations

import errno
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.clusters import cores
from tests.train.tiny import steps_of, train, write_settings
from torch.distributed.checkpoint import FileSystemWriter

import stretto
from stretto.config import load_settings
from stretto.errors import RunError, StrettoError, UsageError
from stretto.ir.program import Job
from stretto.ir.timeline import Timeline
from stretto.models.build import build_model
from stretto.models.gpt import next_token_loss
from stretto.report.rundir import load_run
from stretto.train import checkpoint, launch
from stretto.train.checkpoint_files import latest_in
from stretto.train.data import prepare_data
from stretto.train.results import Metrics
from stretto.train.trainer import Trainer
from stretto.train.world import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose text and tokens all runs of this file share."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.slow
def test_the_held_out_loss_is_of_as_many_chunks_as_the_plan_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(job: Job, cluster: str, **_: object) -> stretto.Plan:
        return stretto.plan(job.forms[-1] if job.forms else job, cores())

    monkeypatch.setattr("stretto.train.trainer.make_plan", chosen)
    losses = {}
    for degree in ("1", "auto"):
        path = write_settings(folder, steps=2, every=0, run=f"chunks-{degree}")
        trainer = train(path, f"parallel.ampipe_degree={degree}", "model.dropout=0")
        settings = trainer.settings
        assert trainer.runner.plan.job.chunks == (4 if degree == "auto" else 1)
        losses[degree] = json.loads((settings.run_dir / "summary.json").read_text())["held_out_loss"]
    assert losses["auto"] == pytest.approx(losses["1"], rel=1e-5)


def test_a_run_learns_and_leaves_what_a_report_needs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = train(
        write_settings(folder, steps=60, every=0, run="whole"),
        "training.eval_every=30",
        "output.tensorboard=true",
    ).settings
    out = capsys.readouterr().out
    run = load_run(settings.run_dir)
    assert run.notes == []
    lines = [line for line in run.metrics if "loss" in line]
    assert len(lines) == 60
    assert sum(line["loss"] for line in lines[-5:]) / 5 < lines[0]["loss"] - 0.5
    assert all(
        {"lr", "grad_norm", "tokens_per_s", "tokens_per_s_per_device", "step_s"} <= {*line} for line in lines
    )
    assert "mfu" in lines[0], "of the machine that is described, it is known what it computes at most"
    # Every fifth, and the one before last.
    assert sum("exposed_fraction" in line for line in lines) == 13
    resident = [line for line in run.metrics if "held_out_loss" in line]
    assert [line["step"] for line in resident] == [30, 60]
    assert run.summary is not None
    assert resident[-1]["held_out_loss"] == run.summary["held_out_loss"]
    for said in (
        "held-out loss",
        "a sample, continuing",
        "Measured against predicted",
        "report.html",
        "trace",
    ):
        assert said in out
    assert (settings.run_dir / "trace.perfetto-trace").stat().st_size > 0
    assert "<html" in (settings.run_dir / "report.html").read_text()
    assert [p.name for p in settings.checkpoint_dir.iterdir() if p.is_dir()] == ["step-000060"]
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(settings.run_dir / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [*range(1, 61)]
    names = {"held_out_loss", "lr", "grad_norm", "exposed_fraction"}
    assert names <= set(events.Tags()["scalars"])


def test_the_held_out_loss_is_that_of_the_plain_model(folder: Path) -> None:
    trainer = train(write_settings(folder, steps=3, run="resident"))
    settings = trainer.settings
    data = prepare_data(settings.data, print)
    model = build_model(settings.model, data.vocab_size, settings.training.seed)
    state = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    newest = latest_in(trainer.settings.checkpoint_dir)
    assert newest is not None
    checkpoint.read_tensors(newest, state)
    model.eval()
    with torch.no_grad():
        losses = [next_token_loss(model, data.held_out.batch(k, 4)) for k in range(2)]
    summary = json.loads((settings.run_dir / "summary.json").read_text())
    assert summary["held_out_loss"] == pytest.approx(float(sum(losses)) / 2, rel=1e-5)


def test_settings_that_make_another_model_are_refused_and_others_are_noted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_settings(folder, steps=3, run="other")
    train(path)
    with pytest.raises(UsageError, match=r"model.hidden = 64, but the checkpoint .* model.hidden = 32"):
        train(path, "model.hidden=64")
    with pytest.raises(UsageError, match=r"data.vocab_size differs"):
        train(path, "data.vocab_size=290")
    capsys.readouterr()
    train(path, "training.steps=4", "optimizer.lr=1e-4")
    out = capsys.readouterr().out
    assert "note: optimizer.lr is now 0.0001; it was 0.003 until step 3" in out
    assert "training.steps" not in out


def test_a_failed_write_is_told_and_the_last_checkpoint_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_settings(folder, steps=10, every=5, run="full")
    original = FileSystemWriter.write_data

    def fill_up(writer: FileSystemWriter, *rest: Any) -> object:
        if (load_settings(path).checkpoint_dir / "latest").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(writer, *rest)

    monkeypatch.setattr(FileSystemWriter, "write_data", fill_up)
    with pytest.raises(StrettoError, match=r"step 10 .* the disk is full") as caught:
        train(path)
    assert caught.value.exit_status == 1
    left = load_settings(path).checkpoint_dir
    assert sorted(p.name for p in left.iterdir()) == ["latest", "step-000005"]
    monkeypatch.setattr(FileSystemWriter, "write_data", original)
    assert sorted(steps_of(train(path).settings.run_dir)) == list(range(1, 11))


@pytest.fixture(scope="module")
def unsharded(folder: Path) -> Path:
    """A checkpoint; tests damage copies of it."""
    newest = latest_in(train(write_settings(folder, steps=2, run="undamaged")).settings.checkpoint_dir)
    assert newest is not None
    return newest


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (".metadata", "no pickle", "cannot be read .*--no-resume"),
        ("tokenizer.json", None, "tokenizer.json: No such file"),
        ("tokenizer.json", "", "tokenizer.json is not what was saved"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    folder: Path, unsharded: Path, tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    damaged = shutil.copytree(unsharded, tmp_path / unsharded.name)
    (damaged / name).unlink()
    if text is not None:
        (damaged / name).write_text(text)
    with pytest.raises(StrettoError, match=f"step-000002.*{words}"):
        train(write_settings(folder, run="damaged"), f"checkpoint.resume={damaged}")


def test_an_interrupt_while_a_checkpoint_is_read_stays_one(
    unsharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load_model(unsharded)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_under_the_metrics_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Metrics:
        made = Metrics(*arguments)
        made._file.close()
        made._file = open("/dev/full", "w")  # noqa: SIM115
        return made

    monkeypatch.setattr("stretto.train.trainer.Metrics", full)
    with pytest.raises(StrettoError, match=r"cannot write .*metrics\.jsonl: No space left"):
        train(write_settings(folder, steps=2, run="lines"))


def test_a_loss_that_is_no_number_stops_the_run_before_it_spoils_the_weights(folder: Path) -> None:
    path = write_settings(folder, steps=40, every=0, run="wild")
    with pytest.raises(RunError, match=r"step \d+: the loss is .* nothing was updated"):
        train(path, "optimizer.lr=1e30", "optimizer.grad_clip_norm=0")


def test_updates_that_are_part_of_the_step_train_alike(folder: Path) -> None:
    """Without clipping bit for bit; a run goes on from a checkpoint, and one that goes wrong says so."""
    layout = "microbatches = 2\nupdates = true"
    losses = {}
    for run, how in (("apart", ""), ("within", layout)):
        path = write_settings(folder, steps=6, every=3, run=run, layout=how)
        for clip in ("0", "0.05"):
            trainer = train(
                path, f"optimizer.grad_clip_norm={clip}", f"name={run}", "checkpoint.resume=never"
            )
            assert trainer.runner.plan.job.updates is bool(how)
            lines = steps_of(trainer.settings.run_dir)
            losses[run, clip] = [(line["loss"], line["grad_norm"]) for line in lines.values()]
    assert losses["within", "0"] == losses["apart", "0"]
    for one, other in zip(losses["within", "0.05"], losses["apart", "0.05"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    with pytest.raises(RunError, match=r"step \d+: the loss is .* parameters were updated by it"):
        train(
            write_settings(folder, steps=40, every=0, run="wilder", layout=layout),
            "optimizer.lr=1e30",
            "optimizer.grad_clip_norm=0",
        )


def test_bf16_computes_in_bfloat16_and_keeps_its_weights_in_float32(folder: Path) -> None:
    trainer = train(write_settings(folder, steps=8, run="bf16"), "precision=bf16")
    assert trainer.runner.plan.job.param_dtype == "bfloat16"
    assert all(p.dtype is torch.float32 for p in trainer.runner.parameters())
    plain = train(write_settings(folder, steps=8, run="float32"))
    runs = (one.settings.run_dir for one in (trainer, plain))
    a, b = ([line["loss"] for line in steps_of(run_dir).values()] for run_dir in runs)
    assert a != b
    assert all(math.isclose(x, y, rel_tol=0.02) for x, y in zip(a, b, strict=True))


def test_tensorboard_that_is_not_there_is_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(write_settings(folder, run="boardless"), ["output.tensorboard=true"])
    monkeypatch.setattr("stretto.train.launch.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'stretto\[tensorboard\]'"):
        launch.start(settings, ["nothing"])
    assert not settings.run_dir.exists()


def test_replayed_steps_have_no_timeline(folder: Path) -> None:
    """What is traced then is the last step that was walked, once; and no step's log has another's share."""
    trainer = Trainer(load_settings(write_settings(folder, steps=4, run="replayed")), World())
    walked = Timeline("measured", 1, 5.0, (), (0,))
    trainer.runner = SimpleNamespace(replayed=True, timeline=lambda: walked, plan=None, plan_of_step=None)  # type: ignore[assignment]
    for step in range(1, 5):
        trainer.step = step
        assert trainer._gather_timeline() is None
    assert trainer.timelines == [walked]
