"""Before a run begins: it has its folders to itself, and all ranks are about to train the same.

Each rank reads its own files. On machines that do not share them, ranks may read others, train side by side
on different things, and no loss shows it; or write parts of a checkpoint onto their own disks, for hours.

    1. Rank 0 locks the run's folders, and puts back what a killed run was about to replace.
    2. Every rank gathers what it is about to train: settings, tokens, the checkpoint that it goes on from, or
       why there is none. All come to one verdict, and refuse with the same words.
    3. Rank 0 leaves a file in the folder of checkpoints, and every rank looks for it.

Uses the process group; no Runner is there yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.config import TrainSettings
from stretto.errors import UsageError
from stretto.files.settings_file import flat
from stretto.files.whole_file import saving
from stretto.runtime.all_or_none import on_first
from stretto.saving.digests import identity
from stretto.saving.folder import PROBE, look, refuse_apart, write_probe
from stretto.train.checkpoint_files import put_back
from stretto.train.going_on import Checkpoint
from stretto.train.lock import folders_of, locked
from stretto.train.task import Task
from stretto.train.world import World

OWN = (
    *("name", "data.paths", "data.tokenizer", "data.cache_dir", "model.pretrained", "task.file"),
    *("checkpoint.dir", "checkpoint.resume", "output.run_dir", "training.threads_per_rank"),
)
"""Settings that each machine may have to itself: where things are, and how fast it computes. What is read
there is compared instead."""


def take_folders(world: World, settings: TrainSettings, locks: ExitStack) -> None:
    """Step 1, until `locks` is closed; every rank must call it. Raises the same StrettoError on all ranks."""

    def take() -> None:
        locks.enter_context(locked(folders_of(settings)))
        with saving(settings.checkpoint_dir):
            put_back(settings.checkpoint_dir)

    on_first(world, take)


@dataclass(frozen=True, slots=True)
class RankView:
    """What one rank is about to train. tokens: its data's digest. checkpoint: its name, step and digest; None
    starts again. fault: why the rank cannot use its checkpoint."""

    settings: dict[str, Any]
    tokens: str
    where: str
    checkpoint: tuple[str, int, str] | None
    folder: str
    fault: str = ""


def agreed_checkpoint(
    world: World, settings: TrainSettings, task: Task, find: Callable[[], Checkpoint | None]
) -> Checkpoint | None:
    """Step 2: what `find` gives, the checkpoint to go on from, the same on all ranks; None starts again.

    Every rank must call it. Raises the same UsageError on all ranks when two differ, or when `find` refuses
    on one of them.
    """
    every = settings.model_dump(mode="json", exclude={"data": {"sources": {"__all__": {"paths"}}}})
    common = {key: value for key, value in flat(every) if key not in OWN}
    checkpoint, at, folder, fault = None, None, settings.checkpoint_dir, ""
    try:
        checkpoint = find()
        if checkpoint is not None:
            state, path = checkpoint
            at, folder = (path.name, state.step, identity(path)), path.parent
    except UsageError as error:
        fault = str(error)
    mine = RankView(common, task.digest, task.where, at, str(folder), fault)
    difference = _difference(world.all_gather(mine), task)
    if difference:
        raise UsageError(difference)
    return checkpoint


def _difference(views: Sequence[RankView], task: Task) -> str:
    """ "" when all views, by rank, are the same."""
    first = views[0]
    for rank, other in enumerate(views):
        keys = {**first.settings, **other.settings}
        differing = [key for key in keys if first.settings.get(key) != other.settings.get(key)]
        if differing:
            mine, its = (view.settings.get(differing[0]) for view in (first, other))
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            return (
                f"{differing[0]} = {its!r} on rank {rank}, but {mine!r} on rank 0{more}: start all ranks "
                "with the same settings"
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
                "to a folder that all machines share, or start again with --no-resume"
            )
    return first.fault


def _aim(view: RankView) -> str:
    if view.checkpoint is None:
        return f"finds no checkpoint in {view.folder}"
    name, step, _ = view.checkpoint
    return f"goes on from {view.folder}/{name}, after step {step}"


def check_shared(world: World, folder: Path) -> None:
    """Step 3; every rank must call it. Raises the same StrettoError on all ranks."""
    if world.size == 1:
        return

    def begin() -> str:
        with saving(f"{folder} (checkpoint.dir)"):
            folder.mkdir(parents=True, exist_ok=True)
            return write_probe(folder)

    text = on_first(world, begin)
    try:
        refuse_apart(world.all_gather(look(folder, text)), "checkpoint.dir")
    finally:
        if world.rank == 0:
            with suppress(OSError):
                (folder / PROBE).unlink()
