"""What commands write: files are checked before the work begins, and written before anything is printed."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from stretto.errors import UsageError

LEAST_COLUMNS = 60
"""Tables and timelines are made for no fewer: a narrower terminal breaks their lines itself. Assumed."""


@contextmanager
def printable() -> Iterator[None]:
    """While it lasts, what a command prints fits every terminal: characters that the output's encoding lacks
    become question marks, and no table is made for fewer columns than it can be drawn in."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    before = os.environ.get("COLUMNS")
    if shutil.get_terminal_size().columns < LEAST_COLUMNS:
        os.environ["COLUMNS"] = str(LEAST_COLUMNS)
    try:
        yield
    finally:
        if before is not None:
            os.environ["COLUMNS"] = before
        else:
            os.environ.pop("COLUMNS", None)


def check_output(option: str, path: Path | None) -> None:
    """Raises UsageError where no file could be written in the end. Does nothing without a path.

    Call it before any work, so that none is lost.
    """
    if path is None:
        return
    try:
        trouble = _trouble(path)
    except OSError as error:
        trouble = f"cannot be looked at: {error.strerror}"
    except ValueError as error:  # a null byte
        trouble = f"is no path: {error}"
    if trouble:
        raise UsageError(f"{option} {path}: {trouble}; nothing was begun")


def write_and_tell(write: Callable[[], object], tell: Callable[[], object]) -> None:
    """Write files, then print: whichever of the two fails, the other is done. A reader that has seen enough
    (`| head`) costs no file, and a full disk no table."""
    try:
        write()
    finally:
        tell()


def echo_file(text: str) -> None:
    """Print what is a file's content, as UTF-8 whatever the terminal's encoding is."""
    typer.echo(text.encode(), nl=False)


def _trouble(path: Path) -> str | None:
    """Why nothing can be written there."""
    if path.is_dir():
        return "is a folder; name a file in it"
    if path.exists() and not os.access(path, os.W_OK):
        return "may not be written; name another file"
    if path.exists() and not path.is_file():
        return None  # a pipe or a terminal is written as it is
    # A file is renamed onto its place, which takes the permission of the folder that it is in.
    folder = Path(os.path.realpath(path)).parent
    if not folder.exists():
        return f"the folder {folder} does not exist; create it"
    if not folder.is_dir():
        return f"{folder} is no folder; name another place"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} may not be written; name another place"
    return None
