"""From settings to the checkpoint that a run goes on from, and whether there is anything left to do.

The launcher asks before it starts ranks, and each rank by itself; `agreement` compares what they find. Loads
nothing of what only ranks need.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stretto.config import TrainSettings
from stretto.errors import UsageError
from stretto.files.parse import parse_json
from stretto.files.settings_file import flat
from stretto.report.rundir import SUMMARY
from stretto.train.checkpoint_files import CheckpointState, find, latest_in, read_kept, read_state
from stretto.train.task import Task

UNREPORTED = (
    *("name", "checkpoint", "output", "parallel", "planning"),
    *("training.steps", "training.threads_per_rank"),
)
"""What may change from run to run without changing what is learned, or is changed on purpose to go on."""

Checkpoint = tuple[CheckpointState, Path]
"""Its state, and where it is."""


def find_checkpoint(settings: TrainSettings) -> Checkpoint | None:
    """What `checkpoint.resume` says to go on from; None starts again. Raises UsageError if there is none."""
    resume = settings.checkpoint.resume
    if resume == "never":
        return None
    path = latest_in(settings.checkpoint_dir) if resume == "auto" else find(Path(resume))
    return None if path is None else (read_state(path), path)


def check_compatible(
    state: CheckpointState, checkpoint: Path, settings: TrainSettings, task: Task
) -> list[str]:
    """Lines about settings that differ from the checkpoint's and change how training goes on.

    Raises UsageError, with the key, for one that makes another model of it, and when the data is
    another (text has other tokens) or the checkpoint does not have its digest.
    """
    then = dict(flat(_as_now(state.settings)))
    now = dict(flat(settings.model_dump(mode="json")))
    differing = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    for key in differing:
        if key.startswith(("model.", "task.config")):
            raise UsageError(
                f"{key} = {now.get(key)!r}, but the checkpoint {checkpoint} is of a model with {key} = "
                f"{then.get(key)!r}: set it back, or start again with --no-resume"
            )
        was = then.get(key, "AdamW")  # of checkpoints from before there were others
        if key == "optimizer.name" and now[key] != was:
            raise UsageError(
                f"{key} = {now[key]!r}, but the checkpoint {checkpoint} has the state of {was}: set it "
                "back, or start again with --no-resume"
            )
    name, content = task.kept
    if read_kept(checkpoint, name) != content:
        data = [key for key in differing if key.startswith("data.")]
        what = f"{data[0]} differs" if data else f"{task.source} has changed"
        raise UsageError(
            f"{what}, so that the {task.unit} are others than those of the checkpoint {checkpoint}: set it "
            "back, or start again with --no-resume"
        )
    changed = state.data is not None and state.data["digest"] != task.digest
    notes = [f"{task.source} has changed since step {state.step}: rows go on by their number"] * changed
    return notes + [
        f"{key} is now {now.get(key)!r}; it was {then.get(key)!r} until step {state.step}"
        for key in differing
        if not any(key == one or key.startswith(one + ".") for one in UNREPORTED)
    ]


def _as_now(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of a checkpoint, with the defaults of keys that there were none of then."""
    try:
        return TrainSettings.model_validate(settings).model_dump(mode="json")
    except ValidationError:  # of keys that are no more
        return settings


def is_finished(settings: TrainSettings, start: Checkpoint | None) -> bool:
    """Whether this very run has done all its steps and left its summary. start: what it would go on from."""
    steps = settings.training.steps
    if start is None or start[1].parent.absolute() != settings.checkpoint_dir.absolute():
        return False
    try:
        summary = parse_json((settings.run_dir / SUMMARY).read_text(encoding="utf-8"))
        return start[0].step >= steps and int(summary["steps"]) >= steps
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError):
        return False


def finished_words(settings: TrainSettings) -> str:
    """What is said of such a run, which stays as it is."""
    return (
        f"all {settings.training.steps} steps are done, and {settings.run_dir} stays as it is: set "
        "training.steps higher to go on, start again with --no-resume, which keeps what is there, or "
        "set output.run_dir to another folder"
    )
