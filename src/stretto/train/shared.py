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
from stretto.errors import StrettoError, UsageError
from stretto.saving.folder import PROBE, look, refuse_apart, write_probe
from stretto.train.checkpoint_files import put_back
from stretto.train.lock import RunLock, folders_of
from stretto.train.world import World, tell_all


def take_folders(world: World, settings: TrainSettings, lock: RunLock) -> None:
    """Step 1; every rank must call it. Raises the same StrettoError on all ranks."""
    fault: tuple[int, str] | None = None
    if world.rank == 0:
        try:
            lock.take(folders_of(settings))
            put_back(settings.checkpoint_dir)
        except StrettoError as error:
            fault = (error.exit_status, str(error))
        except OSError as error:
            fault = (1, f"cannot put back a checkpoint in {settings.checkpoint_dir}: {error.strerror}")
    _raise(tell_all(world, fault)[0])


def check_shared(world: World, folder: Path) -> None:
    """Step 2; every rank must call it. Raises the same StrettoError on all ranks."""
    if world.size == 1:
        return
    text, fault = "", None
    if world.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = write_probe(folder)
        except OSError as error:
            fault = (1, f"cannot write into {folder}: {error.strerror}; set checkpoint.dir elsewhere")
    text, fault = tell_all(world, (text, fault))[0]
    _raise(fault)
    try:
        refuse_apart(tell_all(world, look(folder, text)), "checkpoint.dir")
    finally:
        if world.rank == 0:
            with suppress(OSError):
                (folder / PROBE).unlink()


def _raise(fault: tuple[int, str] | None) -> None:
    if fault is not None:
        status, message = fault
        raise (UsageError if status == UsageError.exit_status else StrettoError)(message)
