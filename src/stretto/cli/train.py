"""`stretto train`, `check` and `export`: train a model, compare a step with the plain model's, write a
checkpoint as safetensors. Thin.

`check` takes threads of this process for ranks, and a batch that is made up: it needs no cluster and no data.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import stretto
from stretto.cli.common import RENEW, Changes, Config, Fresh, command
from stretto.config import TrainSettings, load_settings
from stretto.errors import UsageError
from stretto.train.failure import GOES_ON, PRELOAD, is_worker, watch_launcher
from stretto.train.preload import become_rank, preloaded
from stretto.train.progress import Progress


@command
def train(
    config: Config,
    named: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings to change, as with --set.", show_default=False),
    ] = None,
    changes: Changes = None,
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume/--no-resume",
            help="Go on from the newest checkpoint, which must be there, or start again; by default "
            "checkpoint.resume decides.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Optimizer steps in all; as --set training.steps=N.")
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often all ranks of this machine are started again, from the newest checkpoint, when "
            "one was lost: killed, or its device failed.",
        ),
    ] = 0,
    fresh: Fresh = False,
) -> None:
    """Train a model as a settings file describes, on all ranks of this machine or as a rank of torchrun's."""
    if PRELOAD in os.environ:
        become_rank()
    watch_launcher()
    progress = Progress(os.environ.get("RANK", "0") == "0")
    overrides = [*(changes or []), *(named or [])]
    if fresh:
        overrides.append(RENEW)
    if max_restarts and is_worker():
        raise UsageError(
            "--max-restarts is for ranks that this command starts itself; these were started by another "
            "launcher: let that start the job again"
        )
    if GOES_ON in os.environ:
        overrides.append("checkpoint.resume=auto")
    if resume is not None:
        overrides.append(f"checkpoint.resume={'auto' if resume else 'never'}")
    if steps is not None:
        overrides.append(f"training.steps={steps}")

    command = [sys.executable, "-m", "stretto", "train", str(config)]
    for override in overrides:
        command += ["--set", override]
    with progress:
        settings = load_settings(config, overrides, progress.begin)
        if "torch" not in sys.modules:
            progress.begin("loading PyTorch")
        if resume:
            from stretto.train.checkpoint_files import latest_in

            if latest_in(settings.checkpoint_dir) is None:
                raise UsageError(
                    f"--resume: there is no complete checkpoint in {settings.checkpoint_dir}; without it "
                    "the run starts at its first step"
                )
        with preloaded(settings, command, max_restarts) as ranks:
            gc.disable()  # nothing that is imported is garbage
            from stretto.train.launch import start  # loads PyTorch, which wrong settings need not wait for

            gc.enable()
            status = start(settings, command, progress, ranks, max_restarts)
        sys.stdout.flush()
        if status:
            raise typer.Exit(status)


ROWS = 2
"""Rows of a microbatch, at most: one row is a special case, and more show no more."""


@command
def check(config: Config, changes: Changes = None) -> None:
    """Compare one step, loss and every gradient, with the plain model's, in float64 in this process."""
    typer.echo(str(make(load_settings(config, list(changes or [])))))


def make(settings: TrainSettings) -> stretto.Check:
    """The comparison; raises RunError where the step differs, UsageError and CaptureError as `check`."""
    import torch

    from stretto.train.job import likely_vocab_size, trained

    pieces = settings.parallel.microbatches * settings.parallel.dp
    of = trained(settings)
    batch = of.train(0, min(ROWS, settings.training.global_batch // pieces) * pieces)
    if settings.task is None:
        # The tokenizer would need the text; any vocabulary will do that the model can be built with.
        generator = torch.Generator().manual_seed(settings.training.seed)
        batch = torch.randint(0, likely_vocab_size(settings), batch.shape, generator=generator)
    return stretto.check(of.model(), batch, of.loss, settings.parallel)


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
            help="Of a task of your own, its file: a program, which is run to make the model.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a checkpoint as config.json, model.safetensors and (of text) tokenizer.json, for other tools to
    read."""
    from stretto.train.export import export as write

    written = write(checkpoint, output, task)
    typer.echo(f"wrote {written} as safetensors into {output}")
