"""`stretto plan`: plan a training step as a settings file describes it, and save the plan.

Nothing is trained. The model is built without values, so that it may be larger than this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import stretto
from stretto.cli.outputs import check_output
from stretto.config import TrainSettings, load_settings
from stretto.errors import UsageError
from stretto.price.cluster import Description, describe

plan = typer.Typer(add_completion=False)


@plan.command()
def run(
    config: Annotated[Path, typer.Argument(help="The settings, a TOML file.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where the plan is saved; without it, it is only printed."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as parallel.pp=4."),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help='"local" measures this machine; a name such as h100x64, a cluster file (.toml) or a '
            "calibration (.json) stands for another."
        ),
    ] = "local",
    overlap: Annotated[
        str | None,
        typer.Option(
            help='What hides communication: "off", "local" or "window"; parallel.overlap of the settings '
            "without it."
        ),
    ] = None,
    order: Annotated[
        str, typer.Option(help='How ops are ordered in windows: "improve", "list", "exact" or "captured".')
    ] = "improve",
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Measure and plan anew, whatever earlier runs kept; as --set planning.reuse=renew.",
        ),
    ] = False,
) -> None:
    """Plan a training step for this machine, or for one that is described; print the plan and save it."""
    check_output("--output", output)
    wishes = list(changes or [])
    if overlap is not None:
        wishes.append(f"parallel.overlap={overlap}")
    if fresh:
        wishes.append("planning.reuse=renew")
    # Shown on terminals alone.
    with Console(stderr=True).status("planning") as status:
        made = make(load_settings(config, wishes), read_cluster(cluster), order, say=status.update)
    # First the summary, then the file: whichever of the two cannot be written, the other is not lost.
    try:
        typer.echo(str(made))
    finally:
        if output is not None:
            made.save(output)
    if output is not None:
        typer.echo(f"wrote {output}")


def make(
    settings: TrainSettings,
    cluster: str | Description,
    order: str = "improve",
    *,
    say: Callable[[str], None] | None = None,
) -> stretto.Plan:
    """The plan of one training step; order: the policy that orders ops in windows. say: as in
    `stretto.plan`.

    Raises UsageError, CaptureError and PlanError as its parts do.
    """
    import torch

    from stretto.train.job import device_of, trained
    from stretto.train.reuse import kept_by
    from stretto.train.world import threads, use_threads

    # As in training: the measured times are those of as many threads.
    use_threads(threads(settings.training.threads_per_rank, settings.parallel.world))
    of = trained(settings)
    with torch.device("meta"):
        model = of.model()
    device = None if isinstance(cluster, str) else device_of(cluster)
    job = stretto.capture(
        model, of.batch, of.loss, settings.parallel, precision=settings.precision, device=device
    )
    kept = kept_by(settings, partial(typer.echo, err=True)) if cluster == "local" else None
    return stretto.plan(job, cluster, order=order, say=say, kept=kept)


def read_cluster(cluster: str) -> str | Description:
    """What --cluster stands for. Raises UsageError that names the option, the file and the key."""
    try:
        return describe(cluster) or "local"
    except UsageError as error:
        raise UsageError(f"--cluster {cluster}: {error}") from None
