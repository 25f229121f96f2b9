"""Digests of a checkpoint's files, in `digests.json`, so that what was written is what is read.

It has every file that is read in full. Of the files of tensors a rank reads some boxes: each box has its
digest in `tensors.json` (`stretto.saving.tensors`). Digests show damage, and not who wrote a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from stretto.errors import UsageError
from stretto.files.codec import Fits
from stretto.files.typed_file import TypedFile

NAME = "digests.json"
TABLE = "tensors.json"
METADATA = ".metadata"
"""The table as PyTorch's distributed checkpoints name it."""
ELSE = "take another checkpoint (of a run, by checkpoint.resume), or start again without (--no-resume)"
"""What to do about one that cannot be read."""
BYTES = 16
"""Of a digest: two checkpoints of different content never share one by accident."""

T = TypeVar("T")

FileName = Annotated[
    str,
    Fits(
        lambda name: name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name),
        "a file's name without a folder",
    ),
]
Digest = Annotated[
    str,
    Fits(lambda one: len(one) == 2 * BYTES, f"a digest of {2 * BYTES} digits"),
]


@dataclass(frozen=True, slots=True)
class Digests:
    """files: name -> digest of its bytes."""

    files: Mapping[FileName, Digest]


FILE = TypedFile(Digests, "stretto-digests", 1, "digests", "Take another checkpoint")


def digest_of(data: bytes | memoryview) -> str:
    """BLAKE2b, which every Python has; 1 GB/s or more."""
    return hashlib.blake2b(data, digest_size=BYTES).hexdigest()


def sealed(files: Mapping[str, bytes]) -> bytes:
    """The content of `digests.json` for these files."""
    return FILE.to_text(Digests({name: digest_of(data) for name, data in files.items()})).encode()


def identity(folder: Path) -> str:
    """A digest that two checkpoints share only when they are equal. Raises UsageError for one that cannot be
    read."""
    return digest_of(_read(folder, NAME))


def refuse_others(digests: Sequence[str], folder: Path) -> None:
    """Raise UsageError unless all ranks, by whose place the digests are, read the same there."""
    other = next((rank for rank, one in enumerate(digests) if one != digests[0]), None)
    if other is not None:
        raise UsageError(
            f"{folder} is another on rank {other} than on rank 0: all must read one folder, which all hosts "
            "mount, or the same on every machine"
        )


def read_checked(folder: Path, name: str) -> bytes:
    """A file of a checkpoint, as it was written. Raises UsageError where it is absent or has changed."""
    known = parsed(folder, FILE, NAME, _read(folder, NAME)).files
    data = _read(folder, name)
    if name not in known:
        raise unusable(folder, f"{NAME} has no digest of {name}")
    if digest_of(data) != known[name]:
        raise unusable(folder, f"{name} is not what was saved: its digest differs")
    return data


def parsed(folder: Path, kind: TypedFile[T], name: str, data: bytes) -> T:
    """What a file of a checkpoint has. Raises UsageError."""
    try:
        return kind.from_text(data.decode(), name)
    except (UsageError, ValueError) as error:  # the latter of what is no text
        raise unusable(folder, str(error)) from None


def unusable(folder: Path, why: str) -> UsageError:
    """That a checkpoint cannot be read, in the user's words."""
    return UsageError(f"{folder} cannot be read ({why}); {ELSE}")


def reason(error: Exception) -> str:
    """Why it is so, where a library failed to read."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[-1]}"


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise unusable(folder, f"{name}: {error.strerror}") from None
