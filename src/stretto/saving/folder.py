"""Where one checkpoint is: written beside its place, looked for by every rank, then renamed at once.

<place>            a complete checkpoint, or nothing
<place>.tmp        one being written, or left by a run that was killed meanwhile
<place>.old.tmp    the one before, between the two renames of a commit; it counts while <place> is absent
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import StrettoError, UsageError, listed

PROBE = ".written-by-rank-0"
"""The file in a folder that is being written by which other ranks know it."""
SEEN_WITHIN_S = 10.0
"""How long a file of another host may take to show on a network file system. Assumed: above the few seconds
for which their clients keep what they know of a folder."""
POLL_S = 0.1
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of the system for a disk, or a user's share of one, that is full."""


def partial_of(place: Path) -> Path:
    """Where a checkpoint is written before it is one."""
    return place.with_name(f"{place.name}.tmp")


def old_of(place: Path) -> Path:
    """Where the one before it is until the new one is in its place."""
    return place.with_name(f"{place.name}.old.tmp")


def begin(place: Path) -> str:
    """On rank 0: an empty folder to write into, with a probe. Returns the probe's text. Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    recover(place)
    partial = partial_of(place)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    return write_probe(partial)


def recover(place: Path) -> None:
    """Put back what a commit that was killed between its two renames had moved away. Raises OSError."""
    old = old_of(place)
    if old.exists():
        if place.exists():
            shutil.rmtree(old)
        else:
            old.rename(place)


def commit(place: Path, probe: str) -> None:
    """On rank 0, once all have written: make it the checkpoint, at once. probe: what `begin` gave. Raises
    OSError, also where another save has begun at this place meanwhile: what is there is not all of one."""
    partial = partial_of(place)
    path = partial / PROBE
    if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != probe:
        raise OSError(errno.EBUSY, "another save wrote to the same place meanwhile")
    path.unlink()
    sync_folder(partial)
    had = place.exists()
    if had:
        place.rename(old_of(place))
    partial.rename(place)
    sync_folder(place.parent)  # what the disk does not have yet must not cost what it has
    if had:
        shutil.rmtree(old_of(place))


# Whether all ranks see one folder.


@dataclass(frozen=True, slots=True)
class ProbeView:
    """What a rank sees of a probe. why: "" when it is there with the right text."""

    host: str
    folder: str
    why: str


def write_probe(folder: Path) -> str:
    """Leave a file that no one else can have made. Returns its text. Raises OSError."""
    text = uuid.uuid4().hex
    write_synced(folder / PROBE, text.encode())
    return text


def look(folder: Path, text: str) -> ProbeView:
    """Whether this rank sees the probe; waits for it where the folder may be of a network file system."""
    until_s = time.monotonic() + SEEN_WITHIN_S
    why = ""
    while True:
        try:
            text_there = (folder / PROBE).read_text(encoding="utf-8", errors="replace")
            why = "" if text_there == text else "has another run's files"
        except FileNotFoundError:
            why = "does not have what rank 0 wrote there" if folder.is_dir() else "does not exist"
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        if not why or time.monotonic() >= until_s:
            break
        time.sleep(POLL_S)
    return ProbeView(socket.gethostname(), str(folder.absolute()), why)


def refuse_apart(looks: Sequence[ProbeView], setting: str) -> None:
    """Raise UsageError unless every rank (by place) sees the folder. setting: what to set to another one."""
    blind = [rank for rank, one in enumerate(looks) if one.why]
    if not blind:
        return
    rank, one = blind[0], looks[blind[0]]
    more = f" (and ranks {listed(blind[1:])})" if blind[1:] else ""
    raise UsageError(
        f"the ranks do not share the folder of checkpoints: {one.folder} on rank {rank}, host {one.host}, "
        f"{one.why}{more}; rank 0, host {looks[0].host}, wrote into {looks[0].folder}. Each would keep its "
        f"own part on its own disk. Set {setting} to a folder that all hosts mount (NFS, Lustre)"
    )


# Words and bytes.


@dataclass(frozen=True, slots=True)
class Writing:
    """Around work that writes `what`: a failure becomes a StrettoError in the user's words. remedy: what else
    to do about a full disk; rest: what is left."""

    what: str
    remedy: str
    rest: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, StrettoError):
            return
        if is_full(error):
            why = f"the disk is full; free some space, or {self.remedy}"
        else:
            text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            why = f"{text.strip().splitlines()[-1] if text.strip() else type(error).__name__}; see to it"
        raise StrettoError(f"{self.what} could not be written: {why}. {self.rest}") from None


def is_full(error: BaseException) -> bool:
    """Whether a failure comes of a full disk. `torch.save` raises an error of its own while it handles the
    system's, without its number."""
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        # The text of what has no number; what has one may name a folder that is called so.
        if number in FULL or (number is None and any(os.strerror(one) in str(cause) for one in FULL)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(number)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and put it on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
