"""The file that a bench command writes its figures to: checked before the work, written after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stretto.cli.outputs import check_output, saving
from stretto.errors import UsageError
from stretto.files.whole_file import write_file

JsonOut = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
"""The option, which every bench command has."""

KeepOut = Annotated[
    Path | None,
    typer.Option(
        "--keep", help="Keep plans and measured steps in this folder, each as a run that `report` can show."
    ),
]
"""The option of those that run plans."""


def check_json(out: Path | None) -> None:
    """Raises UsageError when figures could not be written there in the end."""
    check_output("--json", out)


def make_folder(out: Path) -> Path:
    """The folder that `--keep` names, made if it is not there. Raises UsageError when it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--keep {out}: the folder cannot be made: {error.strerror}") from None
    return out


def write_json(result: Any, out: Path | None) -> None:
    """Write the figures, if they are wanted. Raises StrettoError when that fails."""
    if out is not None:
        with saving(out):
            write_file(out, json.dumps(result, indent=1) + "\n")
        Console(stderr=True).print(f"wrote {out}")
