"""`stretto export`: write a checkpoint as safetensors. Thin: everything is done in `stretto.train.export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.common import command
from stretto.train.export import export as write


@command
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="A checkpoint, or a run's folder, whose newest is taken.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write; new or empty.", show_default=False)
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="Of a task of one's own, its file: a program, which is run to make the model.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a checkpoint as config.json, model.safetensors and (of text) tokenizer.json, for other tools to
    read."""
    written = write(checkpoint, output, task)
    typer.echo(f"wrote {written} as safetensors into {output}")
