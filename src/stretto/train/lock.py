"""One run at a time in a folder: a lock that ends with its process, and who holds it.

    <folder>/.lock          locked by the operating system for as long as rank 0 lives, however it ends
    <folder>/.owner.json    whose it is, for the message that others get

The lock is `filelock`'s, which on file systems of a network holds among all hosts that mount them. Touches
these files and nothing else.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from stretto.config import TrainSettings
from stretto.errors import StrettoError, UsageError
from stretto.files.parse import parse_json
from stretto.files.whole_file import write_file

LOCK = ".lock"
OWNER = ".owner.json"
MOMENT_S = 0.3
"""How long to try: one that only looks (`refuse_if_held`) holds a lock for a moment."""
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""What file systems say that cannot lock, where `filelock` has no way of its own."""


class RunLock:
    """Locks on folders, from `take` to `release` or the process' end."""

    def __init__(self) -> None:
        self._held = ExitStack()

    def take(self, folders: Iterable[tuple[str, Path]]) -> None:
        """Lock each folder, which is made. folders: (the setting that moves it, folder).

        Raises UsageError when another run holds one, StrettoError when one cannot be made; none is held then.
        """
        with ExitStack() as held:
            for setting, folder in folders:
                _lock(held, setting, folder)
            self._held = held.pop_all()

    def release(self) -> None:
        """Others may have the folders; to call it twice is harmless."""
        self._held.close()


def folders_of(settings: TrainSettings) -> list[tuple[str, Path]]:
    """What a run has to itself."""
    found = [("output.run_dir", settings.run_dir)]
    if not settings.checkpoint_dir.absolute().is_relative_to(settings.run_dir.absolute()):
        found.append(("checkpoint.dir", settings.checkpoint_dir))
    return found


def refuse_if_held(folders: Iterable[tuple[str, Path]]) -> None:
    """Raise UsageError when another run holds one of the folders now. Makes none of them."""
    lock = RunLock()
    with suppress(OSError):  # of a folder that cannot be looked into, the run itself will tell
        lock.take([(setting, folder) for setting, folder in folders if (folder / LOCK).exists()])
    lock.release()


def _lock(held: ExitStack, setting: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=MOMENT_S, thread_local=False)
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
    held.callback(lock.release)
    held.callback(_forget, folder)
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    said = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with suppress(OSError):  # a full disk is told by what needs it
        write_file(folder / OWNER, json.dumps(said) + "\n")


def _forget(folder: Path) -> None:
    with suppress(OSError):
        (folder / OWNER).unlink(missing_ok=True)


def _owner(folder: Path) -> str:
    """Who holds the lock; it writes its name just after it has it."""
    for _ in range(10):
        try:
            said = parse_json((folder / OWNER).read_text(encoding="utf-8"))
            return f"process {said['pid']} on host {said['host']}, since {said['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(0.05)
    return "a process that has not said which"
