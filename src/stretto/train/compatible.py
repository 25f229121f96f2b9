"""Whether a checkpoint can go on under these settings: what must be equal, and what is only told.

Compares; reads what the checkpoint keeps of its data (of text, the tokenizer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.config import TrainSettings
from stretto.errors import UsageError
from stretto.train.checkpoint_files import State, read_kept
from stretto.train.task import Task

UNTOLD = (
    "name",
    "checkpoint",
    "output",
    "parallel",
    "planning",
    "training.steps",
    "training.threads_per_rank",
)
"""What may change from run to run without changing what is learned, or is changed on purpose to go on."""


def check(state: State, checkpoint: Path, settings: TrainSettings, task: Task) -> list[str]:
    """Lines about settings that differ from the checkpoint's and change how training goes on.

    Raises UsageError, with the key, for one that makes another model of it, and when the data is
    another (text is told in other tokens) or the checkpoint does not say which.
    """
    then = dict(flat(state.settings))
    now = dict(flat(settings.model_dump(mode="json")))
    differing = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    for key in differing:
        if key.startswith(("model.", "task.config")):
            raise UsageError(
                f"{key} = {now.get(key)!r}, but the checkpoint {checkpoint} is of a model with {key} = "
                f"{then.get(key)!r}: set it back, or start anew with --no-resume"
            )
    name, content = task.kept
    if read_kept(checkpoint, name) != content:
        data = [key for key in differing if key.startswith("data.")]
        what = f"{data[0]} differs" if data else f"{task.source} has changed"
        raise UsageError(
            f"{what}, so that the {task.unit} are others than those of the checkpoint {checkpoint}: set it "
            "back, or start anew with --no-resume"
        )
    return [
        f"{key} is now {now.get(key)!r}; it was {then.get(key)!r} until step {state.step}"
        for key in differing
        if not any(key == one or key.startswith(one + ".") for one in UNTOLD)
    ]


def flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(`training.steps`, value) for each value in a tree."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
