"""Ranks agree on what they are about to train: settings, tokens, and the checkpoint that they go on from.

Each reads its own files. On machines that do not share them, ranks may find others, train side by side on
different things, and no loss tells. Compares, and changes nothing:

    1. Every rank tells what it found, or why it found nothing, before it builds anything on it.
    2. All come to one verdict, and refuse with the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.config import TrainSettings
from stretto.errors import UsageError
from stretto.saving.digests import identity
from stretto.train.checkpoint_files import State
from stretto.train.compatible import flat
from stretto.train.task import Task
from stretto.train.world import World

OWN = (
    "name",
    "data.paths",
    "data.cache_dir",
    "model.pretrained",
    "task.file",
    "checkpoint.dir",
    "checkpoint.resume",
    "output.run_dir",
    "training.threads_per_rank",
)
"""Settings that each machine may have to itself: where things are, and how fast it computes. What is found
there is compared instead."""


Checkpoint = tuple[State, Path]
"""What it says of itself, and where it is."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank is about to train. tokens: its data's digest. checkpoint: its name, step and digest; None
    starts anew. fault: why the rank cannot use its checkpoint."""

    settings: dict[str, Any]
    tokens: str
    where: str
    checkpoint: tuple[str, int, str] | None
    folder: str
    fault: str = ""


def agreed_checkpoint(
    world: World, settings: TrainSettings, task: Task, find: Callable[[], Checkpoint | None]
) -> Checkpoint | None:
    """What `find` gives: the checkpoint to go on from, the same on all ranks; None starts anew.

    Every rank must call it. Raises the same UsageError on all ranks when two found different things, or when
    `find` refuses on one of them.
    """
    kept = {key: value for key, value in flat(settings.model_dump(mode="json")) if key not in OWN}
    found, at, folder, fault = None, None, settings.checkpoint_dir, ""
    try:
        found = find()
        if found is not None:
            state, path = found
            at, folder = (path.name, state.step, identity(path)), path.parent
    except UsageError as error:
        fault = str(error)
    mine = Found(kept, task.digest, task.where, at, str(folder), fault)
    told = _difference(world.all_gather(mine), task)
    if told:
        raise UsageError(told)
    return found


def _difference(found: Sequence[Found], task: Task) -> str:
    """Step 2: "" when all found the same. found: by rank."""
    first = found[0]
    for rank, other in enumerate(found):
        keys = {**first.settings, **other.settings}
        apart = [key for key in keys if first.settings.get(key) != other.settings.get(key)]
        if apart:
            key = apart[0]
            more = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
            return (
                f"{key} = {other.settings.get(key)!r} on rank {rank}, but {first.settings.get(key)!r} on "
                f"rank 0{more}: start all ranks with the same settings"
            )
        if other.tokens != first.tokens:
            return (
                f"{task.key}: the {task.unit} on rank {rank} ({other.where}) are others than those on rank 0 "
                f"({first.where}): {task.differing}; bring both to every machine"
            )
        if other.fault != first.fault:
            return f"{other.fault or first.fault} (on rank {rank if other.fault else 0})"
        if other.checkpoint != first.checkpoint:
            return (
                f"checkpoint.resume: rank {rank} {_aim(other)}, but rank 0 {_aim(first)}: set checkpoint.dir "
                "to a folder that all machines share, or start anew with --no-resume"
            )
    return first.fault


def _aim(found: Found) -> str:
    if found.checkpoint is None:
        return f"finds no checkpoint in {found.folder}"
    name, step, _ = found.checkpoint
    return f"goes on from {found.folder}/{name}, after step {step}"
