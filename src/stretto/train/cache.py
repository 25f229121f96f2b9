"""A folder that is built once and then found again, by any number of processes at once.

It is built beside its place and renamed into it, under a lock, so that what is in the place is whole. A
manifest of sizes and checksums tells when it no longer is. This room writes below the given folder only;
what is in the files is for their owner.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from stretto.errors import StrettoError, UsageError
from stretto.files.parse import parse_json
from stretto.files.say import Say

MANIFEST = "manifest.json"
READ_BYTES = 1 << 20
"""How much is read at once for a checksum."""


def built_folder(cache_dir: Path, key: str, build: Callable[[Path], None], say: Say) -> Path:
    """The folder `cache_dir/key`; when it is absent or damaged, `build(folder)` first writes its files.

    One process builds and the others wait. A damaged folder is built anew, and `say` is told. Raises
    StrettoError when the disk is full, UsageError when `cache_dir` cannot be written; other errors of
    `build` go through. Nothing half-built stays.
    """
    place = cache_dir / key
    # Looked at without the lock first, so that a cache can be used by those who may not write it.
    if fault(place) is None:
        return place
    partial = cache_dir / f"{key}.partial"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache_dir / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting for another process that prepares {place}")
            lock.acquire()
        try:
            damage = fault(place)
            if damage is None:
                return place
            if place.exists():
                say(f"{place} is damaged ({damage}); it is built anew")
                shutil.rmtree(place)
            shutil.rmtree(partial, ignore_errors=True)  # Left by a process that was killed.
            partial.mkdir()
            build(partial)
            _write_manifest(partial)
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.release()
    except OSError as error:
        raise _explained(error, cache_dir) from error
    return place


def fault(folder: Path) -> str | None:
    """What is wrong with a built folder, or None when every file is as it was written."""
    try:
        files = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, (size_bytes, checksum) in files.items():
            path = folder / name
            found_bytes = path.stat().st_size
            if found_bytes != size_bytes:
                return f"{name} has {found_bytes} bytes, not {size_bytes}"
            if _checksum(path) != checksum:
                return f"the bytes of {name} have changed"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def contents(folder: Path, names: Sequence[str]) -> str:
    """A digest of what is in these files of a built folder, by its manifest; equal in any place."""
    files = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps([files[name] for name in names]).encode()).hexdigest()[:16]


def _write_manifest(folder: Path) -> None:
    files = {path.name: (path.stat().st_size, _checksum(path)) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _explained(error: OSError, cache_dir: Path) -> StrettoError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StrettoError(
            f"{cache_dir}: the disk is full, and the tokens of the text cannot be kept there; "
            "free some space, or set data.cache_dir to a folder on another disk"
        )
    return UsageError(
        f"data.cache_dir: {cache_dir} cannot be used ({error.strerror or error}); set it to a folder that "
        "you may write"
    )
