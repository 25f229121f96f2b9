"""Starts a run's ranks on this machine through torchrun's own launcher, and explains how it ended.

    1. What can be wrong with settings, text or model is refused before any process is started; what needs no
       text, first.
    2. `torch.distributed.launcher` starts one process a rank, each the same command again, over 127.0.0.1.
    3. When ranks fail, the first cause is printed once: a rank that died without a record is named by its
       signal, else the earliest failure counts that is not about another rank.

A single rank needs no process of its own.

    stretto train           ends its ranks (SIGTERM, after 30 s SIGKILL) when one fails or it gets a signal;
      |  starts, watches    kills a rank that is stopped (`failure`); prints the one message
      v
    rank 0 .. n-1           each watches the launcher (`failure`), beats for its neighbour (`peers`), records
                            its failure (`failure`), and ends at a signal (`interrupt`)
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stretto.config import TrainSettings
from stretto.errors import UsageError
from stretto.files.say import Say, unheard
from stretto.train.checkpoint_files import find, what_is_left
from stretto.train.failure import (
    LAUNCHER_PID,
    RECORDS_DIR,
    Cause,
    RankFailure,
    is_worker,
    recorded_failures,
    watching_ranks,
)
from stretto.train.interrupt import Interrupted, Interrupts, end_at_once
from stretto.train.job import kept_by, layout_of_run, refuse_early
from stretto.train.lock import folders_of, refuse_if_locked
from stretto.train.progress import STARTED, Progress
from stretto.train.text_task import task_of
from stretto.train.world import World, check_graph, crowding, device_for, device_note, threads

RANKS_STUCK_S = 40.0
"""How long the launcher has to end by itself after a signal while there are ranks, whose end it reports.
They have `STUCK_S` from when they get it, and torchrun's launcher kills those left after 30 s."""


def start(settings: TrainSettings, command: Sequence[str], progress: Progress | None = None) -> int:
    """Train: as a rank if a launcher started this process, else with all ranks on this machine.

    command: the program and arguments that a rank is started with. progress: shows the run until rank 0 does.
    Returns the exit status. Raises StrettoError and its kin for what is refused before ranks are started, or
    by a single rank.
    """
    check_tensorboard(settings.output.tensorboard)
    if settings.checkpoint.resume not in ("auto", "never"):
        find(Path(settings.checkpoint.resume))
    if not is_worker():
        refuse_if_locked(folders_of(settings))
    kept_by(settings)
    if is_worker() or settings.parallel.world == 1:
        if not is_worker():
            refuse_early(settings)
        from stretto.train.worker import work  # loads what ranks need: their launcher does without

        return work(settings, progress)
    progress = progress or Progress()

    def stuck(interrupted: Interrupted) -> None:
        with suppress(Exception):
            progress.let_go()
        end_at_once(interrupted)

    with Interrupts(stuck) as interrupts, progress:
        try:
            progress.begin("looking at settings, data and model")
            refuse_early(settings)
            _check(settings, progress.say)
            interrupts.stuck_s = RANKS_STUCK_S
            progress.begin(f"starting {settings.parallel.world} ranks")
            progress.stop()  # rank 0 shows the rest
            return _launch(settings, command, progress.started_at_s)
        except Interrupted as error:
            progress.stop()
            print("stretto: interrupted before the first step", file=sys.stderr)
            return error.status


def check_tensorboard(wanted: bool) -> None:
    """Raise UsageError, before anything is started, if TensorBoard was asked for and is not there."""
    if wanted and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "output.tensorboard = true needs the package tensorboard: pip install 'stretto[tensorboard]'"
        )


def _check(settings: TrainSettings, say: Say) -> None:
    """Step 1: make the tokens, which every rank then finds ready, and build the model without values, to see
    whether its layout fits it."""
    ranks = settings.parallel.world
    here = World(size=ranks, local_size=ranks)
    device = device_for(settings.training.device, here)
    check_graph(settings.cuda_graph, device)

    task = task_of(settings, say)
    with torch.device("meta"):
        model = task.model()
    layout_of_run(model, settings, unheard)  # rank 0 prints its notes
    notes = [device_note(settings.training.device, here)]
    if device.type == "cpu":
        notes.append(crowding(ranks, threads(settings.training.threads_per_rank, ranks)))
    for note in notes:
        if note is not None:
            say(f"note: {note}")


def _launch(settings: TrainSettings, command: Sequence[str], started_at_s: float) -> int:
    """Step 2."""
    with (
        tempfile.TemporaryDirectory(prefix="stretto-") as name,
        _environment(settings, records := Path(name), started_at_s),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=settings.parallel.world,
            run_id=f"stretto-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(records / "logs")),
        )
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # torchrun's launcher has many lines on a failure; ours is one
        try:
            with watching_ranks(records):
                elastic_launch(config, command[0])(*command[1:])
            return 0
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            status, message = explain(settings, recorded_failures(records), exits)
        except (SignalException, Interrupted) as error:
            signum = error.sigval if isinstance(error, SignalException) else error.signum
            step = max((failure.step for failure in recorded_failures(records)), default=0)
            status = 128 + int(signum)
            message = f"stretto: interrupted at step {step}; {what_is_left(settings.checkpoint_dir)}"
        finally:
            logging.disable(before)
    print(message, file=sys.stderr)
    return status


def explain(
    settings: TrainSettings, failures: Sequence[RankFailure], exits: Mapping[int, int]
) -> tuple[int, str]:
    """Step 3: the exit status and the one message for ranks that ended with `exits` and recorded
    `failures`."""
    step = max((failure.step for failure in failures), default=None)
    rest = what_is_left(settings.checkpoint_dir)
    silent = sorted(exits.keys() - {failure.rank for failure in failures})
    killed = [rank for rank in silent if exits[rank] < 0]
    if killed:
        name = signal.Signals(-exits[killed[0]]).name
        when = f" after step {step}" if step is not None else ""
        why = "; if nobody did that, the machine may have run out of memory" if name == "SIGKILL" else ""
        others = "the other rank was" if settings.parallel.world == 2 else "the others were"
        cause = f"rank {killed[0]} was lost{when}: {name} ended it{why}; {others} stopped"
        return 1, f"stretto: {cause}. {rest}"
    for failure in failures:
        if failure.cause in (Cause.REFUSED, Cause.CRASHED):
            prefix = "stretto: " if failure.cause is Cause.REFUSED else ""
            return failure.status, prefix + failure.message
    if silent:
        return 1, f"stretto: rank {silent[0]} ended with status {exits[silent[0]]}; see above. {rest}"
    if failures:
        first = failures[0]
        words = first.message
        if first.cause is Cause.INTERRUPTED:
            words = f"rank {first.rank} was ended by {words} after step {step}"
        return first.status, f"stretto: {words}. {rest}"
    return 1, f"stretto: the ranks ended, and none recorded why. {rest}"


@contextmanager
def _environment(settings: TrainSettings, records: Path, started_at_s: float) -> Iterator[None]:
    """What ranks find in their environment beside what the launcher gives them."""
    added = {
        RECORDS_DIR: str(records),
        LAUNCHER_PID: str(os.getpid()),
        STARTED: f"{started_at_s:.3f}",
        "OMP_NUM_THREADS": str(threads(settings.training.threads_per_rank, settings.parallel.world)),
    }
    if sys.platform == "linux":
        # Gloo otherwise looks the host's name up, which on many machines leads nowhere.
        added["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Under `nohup`, whose ignored signal torchrun's launcher would take.
        added["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGQUIT"
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
