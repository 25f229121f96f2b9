"""What several commands share: options, files that are checked first and written before anything is printed,
and signals that end a command as Ctrl-C does."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stretto.errors import UsageError, meant
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


class NamedGroup(TyperGroup):
    """Commands of which a wrong name is refused as a wrong setting is: with the nearest that there is."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not ctx.resilient_parsing and not args[0].startswith("-"):
            raise UsageError(
                f"there is no command `{ctx.command_path} {args[0]}`; "
                + (meant(args[0], known, "{}") or f"known are {', '.join(known)}")
            )
        return super().resolve_command(ctx, args)


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
    trouble = ""
    try:
        # A file is renamed onto its path, which takes the permission of the folder that it is in. A pipe or a
        # terminal is written as it is.
        folder = Path(os.path.realpath(path)).parent
        written = path if path.exists() and not path.is_file() else folder
        if path.is_dir():
            trouble = "is a folder; name a file in it"
        elif not folder.is_dir():
            trouble = f"the folder {folder} does not exist; create it"
        elif not os.access(written, os.W_OK):
            trouble = f"{written} may not be written; name another path"
    except (OSError, ValueError) as error:  # the latter of a null byte
        trouble = f"cannot be looked at: {error}"
    if trouble:
        raise UsageError(f"{option} {path}: {trouble}; nothing was begun")


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
