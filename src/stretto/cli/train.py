"""`stretto train`: train a model as a settings file describes. Thin: `stretto.train` does it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.common import RENEW, Changes, Config, Fresh, command
from stretto.config import TrainSettings, load_settings
from stretto.errors import UsageError
from stretto.train.failure import watch_launcher
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
            help="Go on from the newest checkpoint, which must be there, or start anew; by default "
            "checkpoint.resume decides.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Optimizer steps in all; as --set training.steps=N.")
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Train a model as a settings file describes, on all ranks of this machine or as a rank of torchrun's."""
    watch_launcher()
    progress = Progress(os.environ.get("RANK", "0") == "0")
    overrides = [*(changes or []), *(named or [])]
    if fresh:
        overrides.append(RENEW)
    if resume is not None:
        overrides.append(f"checkpoint.resume={'auto' if resume else 'never'}")
    if steps is not None:
        overrides.append(f"training.steps={steps}")

    with progress:
        settings = load_settings(config, overrides, progress.begin)
        progress.begin("loading PyTorch")
        if resume:
            _refuse_without_checkpoint(settings)
        _started(settings, config, overrides, progress)


def _refuse_without_checkpoint(settings: TrainSettings) -> None:
    from stretto.train.checkpoint_files import latest_in

    if latest_in(settings.checkpoint_dir) is None:
        raise UsageError(
            f"--resume: there is no whole checkpoint in {settings.checkpoint_dir}; without --resume the run "
            "starts at its first step"
        )


def _started(settings: TrainSettings, config: Path, overrides: Sequence[str], progress: Progress) -> None:
    from stretto.train.launch import start  # loads PyTorch, which wrong settings need not wait for

    command = [sys.executable, "-m", "stretto", "train", str(config)]
    for override in overrides:
        command += ["--set", override]
    status = start(settings, command, progress)
    sys.stdout.flush()
    if status:
        raise typer.Exit(status)
