"""`stretto calibrate`: measure this machine, or under torchrun this cluster, for later planning. Thin: the
measuring is done in `stretto.measure.calibrate`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stretto.cli.cluster import print_communication
from stretto.cli.common import check_output, command
from stretto.errors import StrettoError, UsageError
from stretto.ir.program import Job

if TYPE_CHECKING:
    from stretto.measure.calibrate import Outcome
    from stretto.price.calibration import Calibration, Machine

SHOWN = 12
"""Warnings that are printed; of the others the count."""


@command
def calibrate(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Plans (.json) or settings (.toml) whose ops are measured, each distinct one once; without "
            "any, a sweep of sizes.",
            show_default=False,
        ),
    ] = None,
    cluster_out: Annotated[
        Path, typer.Option("--cluster-out", "-o", help="The calibration file; one that is there is added to.")
    ] = Path("calibration.json"),
    from_profile: Annotated[
        list[Path] | None,
        typer.Option(help="A PyTorch profiler's trace with shapes (.json, .json.gz), read for op times."),
    ] = None,
    ops_only: Annotated[bool, typer.Option(help="Measure no collectives and no messages.")] = False,
    fresh: Annotated[bool, typer.Option(help="Measure again what is known.")] = False,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="What the inputs were captured for if unset.")
    ] = None,
) -> None:
    """Measure op times, collectives, messages and contention, and write them for `stretto plan --cluster`.

    Ctrl-C or SIGTERM keeps what is there and ends with status 1; the next run goes on from it. Under
    torchrun, all ranks measure at once and rank 0 writes.
    """
    if cluster_out.suffix != ".json":
        raise UsageError(f"--cluster-out {cluster_out}: a calibration is a .json file")
    check_output("--cluster-out", cluster_out)
    jobs = [job_of(path) for path in inputs or []]
    path, traces = cluster_out, from_profile or []
    import torch
    import torch.distributed as dist

    from stretto.measure.calibrate import Outcome, calibrate_communication, calibrate_ops
    from stretto.measure.time_ops import machine_of
    from stretto.price.calibration import Machine, save_calibration
    from stretto.price.profiler_trace import read_trace

    result = [read_trace(trace) for trace in traces]
    # A trace by itself is an input as good as a plan. Nothing is measured then: it may be of another machine.
    traces_only = bool(traces) and not jobs
    captured_for = [one.kind for one in result if traces_only] + [job.device for job in jobs]
    captured_for.append("cuda" if torch.cuda.is_available() else "cpu")
    kind: str = device or captured_for[0]
    for trace, name in zip(result, traces, strict=True):
        if trace.kind != kind:
            raise UsageError(
                f"--from-profile {name}: was recorded on a {trace.kind} device, and the rest is for {kind}: "
                "give each kind a file of its own"
            )
    if kind == "cuda" and not torch.cuda.is_available() and not traces_only:
        raise UsageError(
            "the ops are for cuda, and this machine has no such device: run it where there is one"
        )
    started = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    on = torch.device("cpu" if traces_only else kind)
    if on.type == "cuda":
        on = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(on)
    if started:
        dist.init_process_group("nccl" if on.type == "cuda" else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    console = Console(stderr=True)
    machine = machine_of(on)
    if traces_only and kind == "cuda":
        machine = Machine(result[0].device, machine.torch, machine.threads, kind)
    outcome = Outcome(_begun(path, machine, fresh, rank, traces_only))
    for trace in result:
        outcome.calibration.traced.update(trace.op_us)
    stopped = False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=rank != 0, transient=True) as bar:
        task = bar.add_task("calibrating")

        def keep() -> None:
            if rank == 0:
                save_calibration(outcome.calibration, path)

        def progress(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)
            keep()  # so that a run that is killed has lost little

        try:
            if not traces_only:
                calibrate_ops(outcome, jobs, on, progress)
            if not traces_only and not ops_only:
                calibrate_communication(outcome, jobs, on, progress)
        except KeyboardInterrupt:
            stopped = True
        finally:
            keep()
    if rank == 0:
        _report(console, outcome)
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if stopped:
        raise StrettoError(
            f"stopped before the end: {path} has what was measured; run the same command to go on"
        )
    if started:
        dist.destroy_process_group()


def job_of(path: Path) -> Job:
    """The job of a plan file, or of a settings file, which is captured. Raises UsageError, CaptureError, and
    PlanError for a plan that is not proved."""
    if path.suffix == ".json":
        from stretto.ir.serialize import load_plan
        from stretto.verifying import verify

        plan = load_plan(path)
        verify(plan)  # its ops are run, with its shapes
        return plan.job
    if path.suffix != ".toml":
        raise UsageError(f"{path}: give a plan (.json) or settings (.toml)")
    from stretto.cli.plan import make
    from stretto.config import load_settings
    from stretto.price.cluster import Cluster

    # Of the plan only the job is read: any cluster will do.
    return make(load_settings(path, []), Cluster(peak_tflops=1, memory_gbps=1, link_gbps=1)).job


def _begun(path: Path, machine: Machine, fresh: bool, rank: int, traces_only: bool) -> Calibration:
    """What a run before this one has measured on the same machine, the same on all ranks. traces_only: a
    trace is added, which may name no more of its machine than the kind of its device."""
    from stretto.backend.collectives import gather_all
    from stretto.price.calibration import Calibration, load_calibration

    result = Calibration(machine, path.name)
    if rank == 0 and path.exists() and not fresh:
        before = load_calibration(path)
        if before.machine != machine and not (traces_only and before.machine.kind == machine.kind):
            raise UsageError(
                f"{path} is of another machine ({before.machine}; this is {machine}): give another file, or "
                "--fresh to write it again"
            )
        result = before
    return gather_all(result)[0]


def _report(console: Console, outcome: Outcome) -> None:
    result, more = outcome.calibration, len(outcome.warnings) - SHOWN
    console.print(f"{result.machine}", highlight=False)
    console.print(
        f"{len(result.ops)} ops ({outcome.measured} measured now, {outcome.cached} known), "
        f"{len(result.traced)} traced",
        highlight=False,
    )
    print_communication(console, result)
    for warning in outcome.warnings[:SHOWN]:
        console.print(f"warning: {warning}", highlight=False, markup=False, soft_wrap=True)
    if more > 0:
        console.print(f"and {more} more warnings", highlight=False)
