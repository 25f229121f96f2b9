"""Where checkpoints are and which of them is complete: names, the `latest` marker, and what is removed.

    <dir>/step-000100/           one checkpoint: the tensors, state.json, tokenizer.json, digests.json
    <dir>/step-000200.tmp/       one being written, or left by a run that was killed meanwhile
    <dir>/step-000100.old.tmp/   the one before it of the same step, while a new one takes its place
    <dir>/step-000050.gone.tmp/  one being removed
    <dir>/latest                 the name of the newest complete one
    <dir>/earlier-1/             checkpoints of a run before this one, set aside when a run started again

Touches these folders and nothing else; what is in the tensors is for `stretto.train.checkpoint`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from stretto.errors import UsageError, near_path
from stretto.files.codec import WHERE_SET, Fits
from stretto.files.typed_file import TypedFile
from stretto.files.whole_file import saving
from stretto.saving.digests import METADATA, read_checked
from stretto.saving.folder import recover, sync_folder, write_synced

STATE = "state.json"
TOKENIZER = "tokenizer.json"
LATEST = "latest"
_NAME = re.compile(r"step-([0-9]{6,18})")


Count = Annotated[int, Fits(lambda value: 0 <= value < 2**31, "an integer from 0, of 31 bits")]


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What a checkpoint has beside its tensors.

    step: optimizer steps done. draws: steps that have drawn random numbers. settings: those of the run. data:
    what `Task.state` gave.
    """

    step: Count
    draws: Count
    vocab_size: Count
    settings: dict[str, Any]
    data: dict[str, Any] | None = field(default=None, metadata=WHERE_SET)


FILE = TypedFile(CheckpointState, "stretto checkpoint", 1, "checkpoint", "Take another one")


def name_of(step: int) -> str:
    """`step-000100`."""
    return f"step-{step:06d}"


def is_full(path: Path) -> bool:
    """Whether a folder is a checkpoint that was written to its end."""
    return _NAME.fullmatch(path.name) is not None and (path / STATE).is_file() and (path / METADATA).is_file()


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, by ascending step."""
    complete = [path for path in folder.iterdir() if is_full(path)] if folder.is_dir() else []
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))


def latest_in(folder: Path) -> Path | None:
    """The checkpoint that the marker names, or else the one with the highest step; None without any. The
    marker names one of this folder: a path that leads out of it is none."""
    with suppress(OSError, ValueError):
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
        if _NAME.fullmatch(name) and is_full(folder / name):
            return folder / name
    checkpoints = checkpoints_in(folder)
    return checkpoints[-1] if checkpoints else None


def what_is_left(folder: Path) -> str:
    """What a run that ended early can go on from, in words."""
    last = latest_in(folder)
    return (
        f"last checkpoint {last}; go on with --resume" if last is not None else "there is no checkpoint yet"
    )


def find(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest in it, or in its `checkpoints`.

    Raises UsageError when there is none.
    """
    for candidate in (path, path / "checkpoints"):
        if is_full(candidate):
            return candidate
        latest = latest_in(candidate)
        if latest is not None:
            return latest
    what = "has no complete checkpoint: "
    if not path.exists():
        what = f"does not exist: {near_path(path, '{} ')}"
    raise UsageError(f"{path} {what}name a checkpoint (a folder such as step-000100), or the folder of a run")


def read_state(checkpoint: Path) -> CheckpointState:
    """The state that is beside the tensors. Raises UsageError for a file that is not one of ours."""
    return FILE.from_text(read_kept(checkpoint, STATE), str(checkpoint / STATE))


def read_kept(checkpoint: Path, name: str = TOKENIZER) -> str:
    """A file of text: by default what is kept of the data, the tokenizer. Raises UsageError when it is absent
    or not what was saved."""
    return read_checked(checkpoint, name).decode(errors="replace")


def put_back(folder: Path) -> None:
    """What a run that was killed was about to replace is the checkpoint again. Raises OSError."""
    for left in folder.glob("step-*.old.tmp") if folder.is_dir() else ():
        recover(left.with_name(left.name.removesuffix(".old.tmp")))


def tidy(folder: Path) -> None:
    """Remove what a run that was killed left half written. Raises OSError."""
    put_back(folder)
    for left in folder.glob("step-*.tmp") if folder.is_dir() else ():
        shutil.rmtree(left)


def mark(place: Path, keep: int) -> None:
    """Mark a complete checkpoint as the newest, and keep only the `keep` newest. The old marker and
    checkpoints stay until the new marker is on the disk. Raises OSError."""
    folder = place.parent
    write_synced(folder / f"{LATEST}.tmp", f"{place.name}\n".encode())
    (folder / f"{LATEST}.tmp").replace(folder / LATEST)
    sync_folder(folder)  # what the disk does not have yet must not cost what it has
    older = [path for path in checkpoints_in(folder) if path.name <= place.name and path != place]
    # Renamed first: removed in part, one would still look complete.
    gone = [
        path.rename(path.with_name(f"{path.name}.gone.tmp"))
        for path in older[: max(0, len(older) - (keep - 1))]
    ]
    if gone:
        sync_folder(folder)
    for path in gone:
        shutil.rmtree(path)


def set_aside(folder: Path) -> Path | None:
    """Move the checkpoints of a run before this one into a folder of their own; None if there are none.

    A run that starts again would otherwise mix its steps with theirs. Raises StrettoError.
    """
    with saving(folder):
        kept = keep_earlier(folder, checkpoints_in(folder))
        if kept is not None:
            (folder / LATEST).unlink(missing_ok=True)
    return kept


def keep_earlier(folder: Path, moved: Sequence[Path], copied: Sequence[Path] = ()) -> Path | None:
    """Put what an earlier run left in a folder into the next of `earlier-1`, `earlier-2`, ...; None for
    nothing. Raises OSError."""
    if not moved and not copied:
        return None
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    kept = folder / f"earlier-{number}"
    kept.mkdir()
    for path in moved:
        path.rename(kept / path.name)
    for path in copied:
        shutil.copy2(path, kept / path.name)
    return kept
