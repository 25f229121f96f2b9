"""The file that a bench command writes its figures to: checked before the work, written after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stretto.errors import UsageError

JsonOut = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
"""The option, which every bench command has."""


def check_json(out: Path | None) -> None:
    """Raises UsageError when figures could not be written there in the end."""
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--json {out}: the folder {out.parent} does not exist")


def write_json(result: Any, out: Path | None) -> None:
    """Write the figures, if they are wanted."""
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
        Console(stderr=True).print(f"wrote {out}")
