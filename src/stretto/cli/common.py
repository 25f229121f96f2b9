"""What several commands share: options, files that are checked first and written before anything is printed,
and signals that end a command as Ctrl-C does."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any

import typer

from stretto.errors import StoppedError, UsageError
from stretto.files.whole_file import saving

# --- options ------------------------------------------------------------------------------------------

Config = Annotated[Path, typer.Argument(help="The settings, a TOML file.", show_default=False)]
PlanFile = Annotated[
    Path, typer.Argument(help="A plan file, as `stretto plan` writes it.", show_default=False)
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as parallel.pp=4."),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh", help="Measure and plan again, whatever earlier runs kept; as --set planning.reuse=renew."
    ),
]
RENEW = "planning.reuse=renew"
"""What `Fresh` sets."""

Edited = Annotated[
    bool,
    typer.Option(
        "--edited",
        help="The plan's programs were edited on purpose. What can be proved of them still is.",
    ),
]
Trace = Annotated[
    Path | None, typer.Option(help="Write the timeline as a trace for ui.perfetto.dev (.perfetto-trace).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def command(function: Callable[..., None]) -> typer.Typer:
    """The program of one command: its options are the function's parameters."""
    program = typer.Typer(add_completion=False)
    program.command()(function)
    return program


# --- output -------------------------------------------------------------------------------------------

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


def _trouble(path: Path) -> str | None:
    """Why nothing can be written there."""
    if path.is_dir():
        return "is a folder; name a file in it"
    if path.exists() and not os.access(path, os.W_OK):
        return "may not be written; name another file"
    if path.exists() and not path.is_file():
        return None  # a pipe or a terminal is written as it is
    # A file is renamed onto its path, which takes the permission of the folder that it is in.
    folder = Path(os.path.realpath(path)).parent
    if not folder.exists():
        return f"the folder {folder} does not exist; create it"
    if not folder.is_dir():
        return f"{folder} is no folder; name another path"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} may not be written; name another path"
    return None


def write_and_print(
    files: Sequence[tuple[Path | None, Callable[[Path], object]]],
    show: Callable[[], object],
    note: Callable[[Path], str] = lambda path: "",
) -> None:
    """Write files, then print, then name the files that were written. Whichever of writing and printing
    fails, the other is done: a reader that has seen enough (`| head`) costs no file, a full disk no table.

    files: paths, None for one that is not wanted, and what writes each. note: what is printed behind a path.
    """
    written: list[Path] = []
    try:
        for path, write in files:
            if path is not None:
                with saving(path):
                    write(path)
                written.append(path)
    finally:
        show()
        for path in written:
            typer.echo(f"wrote {path}{note(path)}")


def echo_file(text: str) -> None:
    """Print what is a file's content, as UTF-8 whatever the terminal's encoding is."""
    typer.echo(text.encode(), nl=False)


# --- signals ------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stops:
    """While it is entered, SIGTERM and a lost terminal (SIGHUP) end a command as Ctrl-C does: by
    KeyboardInterrupt, wherever it is, in the main thread. What takes the best so far, writes what it has, or
    cleans up, then does so for all three. received: their numbers, in order: who is interrupted may take that
    for the end of a search, and print nothing.

    What the caller ignores stays ignored: `nohup stretto plan` outlives its terminal.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def status(self) -> int:
        """The exit status by custom: 128 and the number of the signal that came first."""
        return 128 + self.received[0] if self.received else StoppedError.exit_status

    def ignore(self) -> None:
        """From here on there is little left to do."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        raise KeyboardInterrupt
