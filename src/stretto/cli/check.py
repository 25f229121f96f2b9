"""`stretto check`: compare the step that a settings file describes with the plain model's. Thin.

Ranks are threads of this process and the batch is made up: no cluster and no data are needed.
"""

from __future__ import annotations

from typing import Annotated

import typer

import stretto
from stretto.cli.common import Changes, Config, command
from stretto.config import HuggingFaceSettings, TrainSettings, load_settings

ROWS = 2
"""Rows of a microbatch, at most: one row is a special case, and more show no more."""


@command
def check(
    config: Config,
    changes: Changes = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="The largest relative difference; 1e-9 without it, or 1e-4 where the model's own code "
            "computes in float32."
        ),
    ] = None,
) -> None:
    """Compare one step, loss and every gradient, with the plain model's, in float64 in this process."""
    typer.echo(str(make(load_settings(config, list(changes or [])), tolerance)))


def make(settings: TrainSettings, tolerance: float | None = None) -> stretto.Check:
    """The comparison; raises RunError where the step differs, UsageError and CaptureError as `check`."""
    import torch

    from stretto.models.build import build_model, counted_loss_function
    from stretto.train.task import own_task

    pieces = settings.parallel.microbatches * settings.parallel.dp
    rows = min(ROWS, settings.training.global_batch // pieces) * pieces
    if settings.task is not None:
        task = own_task(settings.task, settings.training.seed)
        return stretto.check(
            task.model(), task.train(0, rows), task.loss, settings.parallel, tolerance=tolerance
        )
    sizes = settings.model.config if isinstance(settings.model, HuggingFaceSettings) else {}
    # The tokenizer would need the text; any vocabulary will do that the model can be built with.
    asked = sizes.get("vocab_size") or getattr(settings.model, "vocab_size", None)
    vocab_size = int(asked) if asked else settings.data.vocab_size
    model = build_model(settings.model, vocab_size, settings.training.seed)
    generator = torch.Generator().manual_seed(settings.training.seed)
    batch = torch.randint(0, vocab_size, (rows, settings.data.sequence_length + 1), generator=generator)
    return stretto.check(
        model, batch, counted_loss_function(settings.model), settings.parallel, tolerance=tolerance
    )
