"""Writes a file in full or not at all: what was there before stays until the new one is on the disk."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from stretto.errors import StrettoError


def write_file(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write `data` (text as UTF-8) into a temporary file beside `path`, and rename that onto it.

    Raises OSError, and `path` is then as it was; UnicodeEncodeError for text that is not UTF-8's.
    """
    content = data.encode() if isinstance(data, str) else data
    given = Path(path)
    if given.exists() and not given.is_file():
        given.write_bytes(content)  # a pipe or a terminal: nothing to rename onto
        return
    target = Path(os.path.realpath(path))  # write through a symbolic link instead of replacing it
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def saving(what: str | os.PathLike[str]) -> Iterator[None]:
    """Around what writes a file: turns OSError into StrettoError that names it."""
    try:
        yield
    except OSError as error:
        raise StrettoError(
            f"cannot write {os.fspath(what)}: {error.strerror}. Free space or choose another place"
        ) from None
