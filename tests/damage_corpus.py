"""Sound files of all kinds that Stretto reads, and what reads each kind: for `tests.strangers` to damage."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

import stretto
from stretto.cli.main import app
from stretto.config import load_settings
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.models.pretrained import load_gpt, save_gpt
from stretto.price.calibration import save_calibration
from stretto.price.cluster import describe, described
from stretto.saving import digests
from stretto.saving.digests import identity
from stretto.schedule.csv import to_csv
from stretto.schedule.families import make_schedule
from stretto.train.checkpoint import load_model, settings_of
from stretto.train.checkpoint_files import find, read_kept, read_state
from stretto.train.trainer import Trainer
from stretto.train.world import World
from tests.clusters import cores
from tests.price import test_nccl_tests
from tests.price.test_calibration import calibration
from tests.saving import test_face
from tests.train.tiny import write_settings

# What reads which files.

Read = Callable[[Path, Path], None]
"""(the damaged file or folder, a folder to write into)."""


def command(*words: str) -> Read:
    """A command line, in which PATH is the file and OUT a folder."""

    def read(path: Path, out: Path) -> None:
        line = [one.replace("PATH", str(path)).replace("OUT", str(out)) for one in words]
        error = CliRunner().invoke(app, line).exception
        if error is not None and not isinstance(error, SystemExit):
            raise error

    return read


@dataclass
class Kind:
    """sound: a file, or a folder of which one file is damaged. readers: what reads it."""

    sound: Path
    readers: tuple[Read, ...]
    weight: int = 1


PLAN: tuple[Read, ...] = (
    command("verify", "PATH"),
    command("simulate", "PATH", "--json", "OUT/t.json"),
    command("show", "PATH", "--stage", "0", "--phase", "B"),
    command("cost", "PATH"),
    command("report", "PATH", "-o", "OUT/r.html"),
    command("rehearse", "PATH", "--rank", "0", "--steps", "1"),
    command("calibrate", "PATH", "--ops-only", "--device", "cpu", "-o", "OUT/c.json"),
)


def corpus(folder: Path, runs: bool = True) -> dict[str, Kind]:
    """Sound files of all kinds. runs: also what a run of training leaves, which takes longer to make."""
    folder.mkdir(parents=True, exist_ok=True)
    model = GPT(GPTConfig(vocab_size=32, layers=1, hidden=16, heads=2, context=8))
    parallel = stretto.Parallel(pp=2, tp=2, microbatches=2)
    job = stretto.capture(model, torch.zeros(4, 9, dtype=torch.int64), next_token_loss, parallel)
    plan = stretto.plan(job, cores())
    plan.save(folder / "plan.json")
    (folder / "schedule.csv").write_text(to_csv(make_schedule("zb-h1", 3, 5)))
    save_calibration(calibration(), folder / "calibration.json")
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / "flat.toml").write_text(FLAT)
    (folder / "weights").mkdir()
    save_gpt(model, folder / "weights")
    settings = write_settings(folder / "runs", steps=2, every=2, run="run")
    shutil.copy(settings, folder / "settings.toml")
    run_one(partial(save_from, folder / "saved"))
    write_trace(folder / "trace.json")
    (folder / "trace.json.gz").write_bytes(gzip.compress((folder / "trace.json").read_bytes()))
    (folder / "measured").mkdir()
    (folder / "measured" / "c.toml").write_text(CLUSTER.replace("[]", '["a.txt", "b.json"]'))
    (folder / "measured" / "a.txt").write_text(test_nccl_tests.NEW)
    (folder / "measured" / "b.json").write_text(json.dumps(test_nccl_tests.whole_json()))

    def priced(path: Path, out: Path) -> None:
        found = describe(str(path))
        assert found is not None
        described(job, plan.schedule, found)

    shown = command("cluster", "show", "PATH")
    traced = command("calibrate", "--from-profile", "PATH", "--ops-only", "-o", "OUT/c.json")
    times = ("--times", "F=1,I=1,W=1,message=0.1")
    found = {
        "plan": Kind(folder / "plan.json", PLAN, 6),
        "schedule": Kind(
            folder / "schedule.csv",
            (
                command("verify", "PATH"),
                command("schedule", "--csv", "PATH", *times),
                command("schedule", "--csv", "PATH", "-o", "OUT/s.svg"),
            ),
            3,
        ),
        "settings": Kind(folder / "settings.toml", (lambda path, out: void(load_settings(path)),), 4),
        "cluster": Kind(folder / "cluster.toml", (shown, priced), 2),
        "flat cluster": Kind(folder / "flat.toml", (shown, priced), 1),
        "calibration": Kind(folder / "calibration.json", (shown, priced), 3),
        "trace": Kind(folder / "trace.json", (traced,)),
        "packed trace": Kind(folder / "trace.json.gz", (traced,)),
        "measured": Kind(folder / "measured", (lambda path, out: void(describe(f"{path}/c.toml")),), 3),
        "saved": Kind(folder / "saved", (lambda path, out: run_one(partial(load_into, path)),), 3),
        "weights": Kind(folder / "weights", (lambda path, out: void(load_gpt(path)),), 1),
    }
    if runs:
        Trainer(load_settings(settings), World()).run()
        run = folder / "runs" / "run"
        exported = command("export", "PATH", "-o", "OUT/exported")
        found["checkpoint"] = Kind(run / "checkpoints", (exported, full, resumed), 5)
        found["run"] = Kind(run, (command("report", "PATH", "-o", "OUT/r.html"), command("cost", "PATH")), 2)
    return found


def void(_: object) -> None:
    """Of what reads a file nothing but that it reads counts."""


def full(path: Path, out: Path) -> None:
    load_model(path / "step-000002")


def resumed(path: Path, out: Path) -> None:
    """As a run looks at what it goes on from."""
    found = find(path)
    state = read_state(found)
    identity(found)
    read_kept(found)
    settings_of(state, found)


def run_one(work: Callable[[stretto.Runner], Any]) -> Any:
    """On one rank, of the model of `tests.saving.test_face`."""
    return test_face.run("one", work)[0]


def save_from(path: Path, runner: stretto.Runner) -> None:
    optimizer = test_face.adamw(runner.named_parameters())
    test_face.train(runner, optimizer, 1)
    stretto.save(path, runner, optimizer, {"epoch": 3, "seen": torch.arange(4)})


def load_into(path: Path, runner: stretto.Runner) -> None:
    stretto.load(path, runner, test_face.adamw(runner.named_parameters()))


def write_trace(path: Path) -> None:
    a = torch.ones(8, 8)
    with torch.profiler.profile(record_shapes=True) as found:
        (a @ a + a).sum()
    found.export_chrome_trace(str(path))


def resealed(folder: Path) -> None:
    """As one does who means harm: the digests of a checkpoint are those of its damaged files."""
    table, seals = folder / digests.TABLE, folder / digests.NAME
    try:
        data = json.loads(table.read_text())
        for one in data["tensors"].values():
            for box in one["boxes"]:
                with (folder / box[2]).open("rb") as file:
                    file.seek(box[3])
                    box[5] = digests.digest_of(file.read(box[4]))
        table.write_text(json.dumps(data))
    except Exception:
        pass  # it is the table that is damaged
    names = [path.name for path in folder.iterdir() if path.suffix != ".distcp" and path != seals]
    seals.write_bytes(digests.sealed({name: (folder / name).read_bytes() for name in names}))


CLUSTER = """device = "h100"
count = 64
node_devices = 8
[figures]
nic_gbit = 200
peak_tflops = 900.5
[measured]
nccl_tests = []
"""
FLAT = """peak_tflops = 1.0
memory_gbps = 10.0
link_gbps = 1.0
latency_us = 50.0
memory_bytes = 1000000000
"""
