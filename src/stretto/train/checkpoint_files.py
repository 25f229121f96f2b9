"""Where checkpoints are and which of them is whole: names, the `latest` marker, and what is removed.

    <dir>/step-000100/           one checkpoint: the tensors, state.json, tokenizer.json
    <dir>/step-000200.tmp/       one being written, or left by a run that was killed meanwhile
    <dir>/step-000050.old.tmp/   one being removed
    <dir>/latest                 the name of the newest whole one
    <dir>/earlier-1/             checkpoints of a run before this one, set aside when a run started anew

Touches these folders and nothing else; what is in the tensors is for `stretto.train.checkpoint`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, UsageError
from stretto.parse import parse_json

FORMAT = "stretto checkpoint"
VERSION = 1
STATE = "state.json"
TOKENIZER = "tokenizer.json"
METADATA = ".metadata"
"""Written by PyTorch's distributed checkpoints."""
LATEST = "latest"
_NAME = re.compile(r"^step-(\d{6,})$")


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint says beside its tensors.

    step: optimizer steps done. draws: steps that have drawn random numbers. settings: those of the run.
    """

    step: int
    draws: int
    vocab_size: int
    settings: dict[str, Any]


def name_of(step: int) -> str:
    """`step-000100`."""
    return f"step-{step:06d}"


def is_whole(path: Path) -> bool:
    """Whether a folder is a checkpoint that was written to its end."""
    return _NAME.match(path.name) is not None and (path / STATE).is_file() and (path / METADATA).is_file()


def checkpoints_in(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, by ascending step."""
    found = [path for path in folder.iterdir() if is_whole(path)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest_in(folder: Path) -> Path | None:
    """The checkpoint that the marker names, or else the one with the highest step; None without any."""
    try:
        marked = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
        if is_whole(marked):
            return marked
    except (OSError, UnicodeDecodeError):
        pass
    found = checkpoints_in(folder)
    return found[-1] if found else None


def find(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest in it, or in its `checkpoints`.

    Raises UsageError when there is none.
    """
    for candidate in (path, path / "checkpoints"):
        if is_whole(candidate):
            return candidate
        found = latest_in(candidate)
        if found is not None:
            return found
    what = "holds no whole checkpoint" if path.exists() else "does not exist"
    raise UsageError(
        f"{path} {what}: name a checkpoint (a folder such as step-000100), or the folder of a run"
    )


def read_state(checkpoint: Path) -> State:
    """What the checkpoint says of itself. Raises UsageError for a file that is not one of ours."""
    path = checkpoint / STATE
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise UsageError(
                f"{path}: format {data['format']!r}, version {data['version']}; this Stretto reads "
                f"{FORMAT!r}, version {VERSION}"
            )
        return State(int(data["step"]), int(data["draws"]), int(data["vocab_size"]), dict(data["settings"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be read ({type(error).__name__}: {error}); take another checkpoint"
        ) from None


def identity(checkpoint: Path) -> str:
    """A digest that tells it from other checkpoints of the same step: of its state, of the table of its
    tensors and of its tokenizer, if that is there. Raises UsageError when one of them cannot be read."""
    digest = hashlib.sha256()
    for name in (STATE, METADATA, TOKENIZER):
        path = checkpoint / name
        try:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        except FileNotFoundError:
            digest.update(b"absent")
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}); take another checkpoint") from None
    return digest.hexdigest()


def read_tokenizer(checkpoint: Path) -> str:
    """The tokenizer's file. Raises UsageError when it is absent, empty or no text."""
    path = checkpoint / TOKENIZER
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read ({type(error).__name__}: {error}); take another checkpoint"
        ) from None
    if not text:
        raise UsageError(f"{path} is empty; take another checkpoint")
    return text


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into. Raises StrettoError when it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # What a run that was killed left half written is of no use to anyone.
        for left in folder.glob("step-*.tmp"):
            shutil.rmtree(left)
        partial = folder / f"{name_of(step)}.tmp"
        partial.mkdir()
    except OSError as error:
        raise failed(folder, step, error) from None
    return partial


def commit(partial: Path, state: State, tokenizer: str, keep: int) -> Path:
    """Make a written folder a checkpoint, mark it as the newest, and keep only the `keep` newest.

    The old marker and checkpoint stay valid until the new ones are whole. Raises StrettoError.
    """
    folder = partial.parent
    place = folder / partial.name.removesuffix(".tmp")
    try:
        _write_synced(partial / TOKENIZER, tokenizer)
        head = {"format": FORMAT, "version": VERSION, "step": state.step, "draws": state.draws}
        data = {**head, "vocab_size": state.vocab_size, "settings": state.settings}
        _write_synced(partial / STATE, json.dumps(data, indent=1) + "\n")
        _sync_folder(partial)
        gone = [_hide(place)] if place.exists() else []
        partial.rename(place)
        _write_synced(folder / f"{LATEST}.tmp", place.name + "\n")
        (folder / f"{LATEST}.tmp").replace(folder / LATEST)
        _sync_folder(folder)  # what the disk does not have yet must not cost what it has
        older = [path for path in checkpoints_in(folder) if path.name <= place.name and path != place]
        gone += [_hide(path) for path in older[: max(0, len(older) - (keep - 1))]]
        if gone:
            _sync_folder(folder)
        for path in gone:
            shutil.rmtree(path)
    except OSError as error:
        raise failed(folder, state.step, error) from None
    return place


def abandon(partial: Path) -> None:
    """Remove what a failed write left, so that it does not fill the disk."""
    shutil.rmtree(partial, ignore_errors=True)


def set_aside(folder: Path) -> Path | None:
    """Move the checkpoints of a run before this one into a folder of their own; None if there are none.

    A run that starts anew would otherwise mix its steps with theirs. Raises StrettoError.
    """
    old = checkpoints_in(folder)
    if not old:
        return None
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    place = folder / f"earlier-{number}"
    try:
        place.mkdir()
        for path in old:
            path.rename(place / path.name)
        (folder / LATEST).unlink(missing_ok=True)
    except OSError as error:
        raise StrettoError(f"cannot set aside the checkpoints in {folder}: {error.strerror}") from None
    return place


def failed(folder: Path, step: int, error: BaseException) -> StrettoError:
    """A failed write in the user's words, with what is still there to go on from."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error) or "quota" in str(error):
        why = "the disk is full; free some space, or set checkpoint.dir to a folder on another disk"
    else:
        text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        why = f"{text.strip().splitlines()[-1] if text.strip() else type(error).__name__}; see to it"
    last = latest_in(folder)
    rest = f"the last whole checkpoint is {last}" if last is not None else "there is no checkpoint yet"
    return StrettoError(
        f"the checkpoint of step {step} in {folder} could not be written: {why}. Then resume: {rest}"
    )


def _hide(path: Path) -> Path:
    """Rename a checkpoint that is to be removed: removed in part, it would still look whole."""
    return path.rename(path.with_name(f"{path.name}.old.tmp"))


def _sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(number)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
