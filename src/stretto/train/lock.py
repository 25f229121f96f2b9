"""One run at a time in a folder: a lock that ends with its process, and whose it is.

    <folder>/.lock          locked by the operating system for as long as rank 0 lives, however it ends
    <folder>/.owner         whose it is, for the message that others get

The lock is `filelock`'s, which on file systems of a network is one lock for all hosts that mount them.
"""

from __future__ import annotations

import errno
import os
import socket
import warnings
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from stretto.config import TrainSettings
from stretto.errors import StrettoError, UsageError
from stretto.files.whole_file import write_file

LOCK = ".lock"
OWNER = ".owner"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems that cannot lock, where `filelock` has no way of its own."""


def locked(folders: Iterable[tuple[str, Path]]) -> ExitStack:
    """Lock folders, which are created, until what is returned is closed or the process ends. folders: each
    with the setting that moves it.

    Raises UsageError when another run has one, StrettoError when one cannot be created; none is locked then.
    """
    with ExitStack() as locks:
        for setting, folder in folders:
            _lock(locks, setting, folder)
        return locks.pop_all()


def folders_of(settings: TrainSettings) -> list[tuple[str, Path]]:
    """What a run has to itself."""
    folders = [("output.run_dir", settings.run_dir)]
    if not settings.checkpoint_dir.absolute().is_relative_to(settings.run_dir.absolute()):
        folders.append(("checkpoint.dir", settings.checkpoint_dir))
    return folders


def _lock(locks: ExitStack, setting: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        raise UsageError(
            f"another run is at work in {folder}: {_owner(folder)}. Wait for its end, or set {setting} to a "
            "folder of this run's own"
        ) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, NotImplementedError) or error.errno in WITHOUT_LOCKS:
            warnings.warn(f"{folder} cannot be locked: another run in it would not be noticed", stacklevel=4)
            return
        reason = error.strerror or error
        raise StrettoError(
            f"cannot lock {folder}: {reason}; set {setting} to a folder that can be written to and locked"
        ) from None
    locks.callback(lock.release)

    @locks.callback
    def forget() -> None:
        with suppress(OSError):
            (folder / OWNER).unlink()

    since = datetime.now().astimezone().isoformat(" ", "seconds")
    with suppress(OSError):  # a full disk is reported by what needs it
        write_file(folder / OWNER, f"process {os.getpid()} on host {socket.gethostname()}, since {since}")


def _owner(folder: Path) -> str:
    """Who has the lock; it writes its name just after it has it."""
    try:
        return (folder / OWNER).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return "a process that has not written which"
