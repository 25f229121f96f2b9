"""Before a run begins: it has its folders to itself, and all ranks see the one where checkpoints will be.

    1. Rank 0 locks the run's folders, and puts back what a killed run was about to replace.
    2. Rank 0 leaves a file in the folder of checkpoints, and every rank looks for it.

Ranks on machines of their own would else each write a part onto their own disks, for hours, and nobody could
read the whole. Speaks through the process group; no Runner is there yet.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from stretto.config import TrainSettings
from stretto.errors import StrettoError
from stretto.runtime.all_or_none import on_first
from stretto.saving.folder import PROBE, look, refuse_apart, write_probe
from stretto.train.checkpoint_files import put_back
from stretto.train.lock import RunLock, folders_of
from stretto.train.world import World


def take_folders(world: World, settings: TrainSettings, lock: RunLock) -> None:
    """Step 1; every rank must call it. Raises the same StrettoError on all ranks."""

    def take() -> None:
        lock.take(folders_of(settings))
        try:
            put_back(settings.checkpoint_dir)
        except OSError as error:
            raise StrettoError(
                f"cannot put back a checkpoint in {settings.checkpoint_dir}: {error.strerror}"
            ) from None

    on_first(world, take)


def check_shared(world: World, folder: Path) -> None:
    """Step 2; every rank must call it. Raises the same StrettoError on all ranks."""
    if world.size == 1:
        return

    def begin() -> str:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return write_probe(folder)
        except OSError as error:
            raise StrettoError(
                f"cannot write into {folder}: {error.strerror}; set checkpoint.dir elsewhere"
            ) from None

    text = on_first(world, begin)
    try:
        refuse_apart(world.all_gather(look(folder, text)), "checkpoint.dir")
    finally:
        if world.rank == 0:
            with suppress(OSError):
                (folder / PROBE).unlink()
