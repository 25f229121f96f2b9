"""`stretto plan`: plan a training step as a settings file describes it, and save the plan.

Nothing is trained. The model is built without values, so that it may be larger than this machine. Ctrl-C, and
SIGTERM as well, takes the best plan so far, which is saved and printed; the status is 130 (143) with one and
without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import stretto
from stretto.cli.common import RENEW, Changes, Config, Fresh, check_output, command, write_and_print
from stretto.config import TrainSettings, load_settings
from stretto.errors import StoppedError, UsageError
from stretto.price.cluster import Description, describe
from stretto.report.grid import fitted
from stretto.train.interrupt import Stops
from stretto.train.progress import Progress


@command
def plan(
    config: Config,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where the plan is saved; without it, it is only printed."),
    ] = None,
    changes: Changes = None,
    cluster: Annotated[
        str,
        typer.Option(
            help='"local" measures this machine; a name such as h100x64, a cluster file (.toml) or a '
            "calibration (.json) describes another."
        ),
    ] = "local",
    overlap: Annotated[
        str | None,
        typer.Option(
            help='What hides communication: "off", "local" or "window"; parallel.overlap of the settings '
            "without it."
        ),
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Plan a training step for this machine, or for one that is described; print the plan and save it.

    Ctrl-C or SIGTERM takes the best plan so far and ends with status 130 or 143, with it or without."""
    check_output("--output", output)
    wishes = list(changes or [])
    if overlap is not None:
        wishes.append(f"parallel.overlap={overlap}")
    if fresh:
        wishes.append(RENEW)
    settings, description = load_settings(config, wishes), read_cluster(cluster)
    with Stops() as stops:
        try:
            with Progress(console=Console(stderr=True, soft_wrap=True)) as shown:
                shown.begin("planning")
                made = make(settings, description, say=shown.detail, note=shown.say)
                stops.ignore()
        except KeyboardInterrupt:
            why = "interrupted before there was a plan; nothing was written"
            raise StoppedError(why, stops.status) from None

        def show() -> None:
            if stops.numbers:
                typer.echo("interrupted: this is the best plan so far", err=True)
            typer.echo(fitted(str(made)))

        write_and_print([(output, made.save)], show)
    if stops.numbers:
        sys.stdout.flush()
        raise typer.Exit(stops.status)


def make(
    settings: TrainSettings,
    cluster: str | Description,
    *,
    say: Callable[[str], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> stretto.Plan:
    """The plan of one training step. say: as in `stretto.plan`. note: takes lines of what is reused,
    which go to the errors' stream without it.

    Raises UsageError, CaptureError and PlanError as its parts do.
    """
    import torch

    from stretto.order.policies import policy_of
    from stretto.train.job import device_of, kept_by, trained
    from stretto.train.optimizer import state_of
    from stretto.train.preload import threads

    # As in training: the measured times are those of as many threads.
    torch.set_num_threads(threads(settings.training.threads_per_rank, settings.parallel.world))
    if say is not None:
        say("the model's ops")
    of = trained(settings)
    policy_of(settings.planning.order)  # which a task may have registered
    with torch.device("meta"):
        model = of.model()
    device = None if isinstance(cluster, str) else device_of(cluster)
    job = stretto.capture(
        *(model, of.train(0, settings.training.global_batch), of.loss, settings.layout),
        precision=settings.precision,
        device=device,
    )
    return stretto.plan(
        job,
        cluster,
        order=settings.planning.order,
        steps=settings.training.steps,
        search_s=settings.planning.search_s,
        optimizer=state_of(settings.optimizer),
        say=say,
        kept=kept_by(settings, note or partial(typer.echo, err=True)) if cluster == "local" else None,
    )


def read_cluster(cluster: str) -> str | Description:
    """The cluster that --cluster names. Raises UsageError that names the option, the file and the key."""
    try:
        return describe(cluster) or "local"
    except UsageError as error:
        raise UsageError(f"--cluster {cluster}: {error}") from None
