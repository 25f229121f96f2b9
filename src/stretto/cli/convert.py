"""`stretto convert`: a command line of Megatron-LM or MindSpeed becomes settings. Thin: all in `convert`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.common import check_output, command, echo_file, write_and_print
from stretto.convert.megatron import Conversion
from stretto.convert.megatron import convert as of_texts
from stretto.errors import StrettoError, UsageError
from stretto.files.typed_file import read_text
from stretto.files.whole_file import write_file
from stretto.ir.limits import MOST_RANKS
from stretto.report.grid import Grid, console_of

FATES = {
    "taken": "becomes",
    "not needed": "why",
    "lacking": "what happens without",
    "unknown": "what it may be",
}
"""What became of a flag, and what is printed of it, in the order of the list."""


@command
def convert(
    megatron: Annotated[
        list[str] | None,
        typer.Option(
            "--megatron",
            metavar="ARGS",
            help="A command, or its flags alone, without variables; the last of a flag counts.",
            show_default=False,
        ),
    ] = None,
    megatron_file: Annotated[
        Path | None,
        typer.Option(
            "--megatron-file",
            help="A file of flags, with one training command, or with the table of arguments that Megatron "
            "prints; - is standard input. Of a flag that --megatron gives too, that one counts.",
            show_default=False,
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(
            "--world", min=1, max=MOST_RANKS, help="Ranks of the run; without it, what the launcher has."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The settings file to write; without it, standard output."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write --out over a file that is there.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Write nothing where a flag is lacking or unknown.")
    ] = False,
) -> None:
    """Make settings of a Megatron-LM or MindSpeed command line, and list what became of each flag.

    A flag is taken (it became settings), not needed (and why), lacking (and what happens without), or
    unknown.
    """
    check_output("--out", out)
    if out is not None and out.exists() and not force:
        raise UsageError(f"--out {out}: the file is there; name another, or give --force to replace it")
    texts = [*([_text(megatron_file)] if megatron_file is not None else []), *(megatron or [])]
    if not texts:
        raise UsageError('give a command line, --megatron "--num-layers 12 ...", or --megatron-file log.txt')
    made = of_texts(texts, ranks=world)
    missed = len(made.of("lacking")) + len(made.of("unknown"))
    refused = strict and missed > 0

    try:
        # The settings come first, so that a reader of the list that has seen enough (`| head`) costs none.
        if out is None and not refused:
            echo_file(made.text)
    finally:
        write_and_print(
            [(None if refused else out, lambda path: write_file(path, made.text))],
            partial(_list, made, to_error=out is None),
            lambda path: f"; train with: stretto train {path}",
        )
    if refused:
        raise StrettoError(f"--strict: {missed} flags are lacking or unknown; nothing was written")


def _text(path: Path) -> str:
    if str(path) != "-":
        return read_text(path, "file of flags")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--megatron-file -: not a text ({error})") from None


def _list(made: Conversion, to_error: bool) -> None:
    """Every flag. It goes to standard error where the settings go to standard output."""
    console = console_of(stderr=to_error, markup=False, highlight=False, emoji=False)
    for fate, head in FATES.items():
        if rows := made.of(fate):
            flags = [(row.flag, row.what) for row in rows]
            Grid(f"{fate}: {len(flags)}", ("flag", head), flags, (0, 1)).print(console)
    for note in made.notes:
        console.print(f"note: {note}")
