"""Starts the ranks of a run on this machine through torchrun's own launcher, or is one of them. However a run
ends, it ends with one message and the right status.

    1. What can be wrong with settings, text or model is refused before any process is started; what needs no
       text, first.
    2. `torch.distributed.launcher` starts one process a rank, each the same command again, over 127.0.0.1.
       Where the system can do it, they are forks of a process that has imported what they need (`preload`).
    3. SIGTERM and SIGUSR1 are passed on to ranks, which save and end (`stretto.train.interrupt`).
    4. When ranks fail, the first cause is printed once: a rank that died without a record is named by its
       signal, else the earliest failure counts that is not about another rank.
    5. Where a rank was lost, all may be started again, from the newest checkpoint.

A single rank needs no process of its own. A rank of our own launcher records its failure and prints nothing;
one that was started by something else prints its own.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stretto.config import HuggingFaceSettings, TrainSettings
from stretto.errors import UsageError
from stretto.models.build import shapes_alone
from stretto.train.callbacks import classes_of
from stretto.train.checkpoint_files import find, latest_in, what_is_left
from stretto.train.failure import (
    GOES_ON,
    LAUNCHER_PID,
    RECORDS_DIR,
    Cause,
    RankFailure,
    failure_of,
    is_launched,
    is_worker,
    lost_words,
    record_failure,
    recorded_failures,
    watching_ranks,
)
from stretto.train.going_on import check_compatible, find_checkpoint, finished_words, is_finished
from stretto.train.interrupt import Interrupted, Interrupts
from stretto.train.job import kept_by, refuse_early
from stretto.train.launch_adapter import forking
from stretto.train.optimizer import state_of
from stretto.train.peers import LOST_AFTER_S, is_first_to_print, lost_first, part
from stretto.train.preload import Preloaded, threads
from stretto.train.progress import STARTED, Progress
from stretto.train.task import Task, task_of
from stretto.train.world import (
    World,
    check_graph,
    check_size,
    crowding,
    device_for,
    device_note,
    environment,
    join,
)

if TYPE_CHECKING:
    from stretto.train.trainer import Trainer

HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Environment variable: signals at which torchrun's launcher ends its ranks and itself."""
RANKS_STUCK_S = 40.0
"""How long the launcher has to end by itself after a signal while there are ranks, whose end it reports.
They have `STUCK_S` from when they get it, and torchrun's launcher kills those left after 30 s."""


def start(
    settings: TrainSettings,
    command: Sequence[str],
    progress: Progress | None = None,
    preloaded: Preloaded | None = None,
    max_restarts: int = 0,
) -> int:
    """Train: as a rank if a launcher started this process, else with all ranks on this machine.

    command: the program and arguments that a rank is started with. progress: shows the run until rank 0 does.
    preloaded: a process of which ranks can be forks. max_restarts: how often all ranks are started again when
    one was lost.
    Returns the exit status. Raises StrettoError and its kin for what is refused before ranks are started, or
    by a single rank.
    """
    if settings.output.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "output.tensorboard = true needs the package tensorboard: pip install 'stretto[tensorboard]'"
        )
    if settings.checkpoint.resume not in ("auto", "never"):
        find(Path(settings.checkpoint.resume))
    kept_by(settings)
    classes_of(settings)
    if settings.optimizer.name != "AdamW" or settings.optimizer.options:
        state_of(settings.optimizer)
    if is_worker() or (settings.parallel.world == 1 and not max_restarts):
        if not is_worker():
            refuse_early(settings)
        return _work(settings, progress)
    progress = progress or Progress()

    def stuck(interrupted: Interrupted) -> None:
        with suppress(Exception):
            progress.let_go()
        os._exit(interrupted.status)

    with Interrupts(stuck) as interrupts, progress:
        try:
            transformers = isinstance(settings.model, HuggingFaceSettings) and settings.task is None
            progress.begin("looking at the model" + (", with transformers" if transformers else ""))
            refuse_early(settings)
            task = _check(settings, progress)
            if (start := find_checkpoint(settings)) is not None and is_finished(settings, start):
                for line in check_compatible(*start, settings, task):
                    progress.say(f"note: {line}")
                progress.say(finished_words(settings))
                return 0
            interrupts.stuck_s = RANKS_STUCK_S
            count = settings.parallel.world
            progress.begin(f"starting {count} rank{'s' if count > 1 else ''}")
            if preloaded is not None and not preloaded.wait():
                preloaded = None
            progress.stop()  # rank 0 shows the rest
            return _launch(settings, command, preloaded, interrupts, progress.started_at_s, max_restarts)
        except Interrupted as error:
            progress.stop()
            left = what_is_left(settings.checkpoint_dir)
            print(f"stretto: interrupted before ranks had started; {left}", file=sys.stderr)
            return error.status


def _check(settings: TrainSettings, progress: Progress) -> Task:
    """Step 1: make the tokens, which every rank then finds ready, and for which the model must have room."""
    ranks = settings.parallel.world
    here = World(size=ranks, local_size=ranks)
    device = device_for(settings.training.device, here)
    check_graph(settings.cuda_graph, device)
    task = task_of(settings, progress.say, progress.begin)
    with shapes_alone():
        task.model()
    notes = [device_note(settings.training.device, here)]
    if device.type == "cpu":
        notes.append(crowding(ranks, threads(settings.training.threads_per_rank, ranks)))
    for note in notes:
        if note is not None:
            progress.say(f"note: {note}")
    return task


def _launch(
    settings: TrainSettings,
    command: Sequence[str],
    preloaded: Preloaded | None,
    interrupts: Interrupts,
    started_at_s: float,
    max_restarts: int,
) -> int:
    """Steps 2 to 5."""
    before = _newest(settings)
    for restart in range(max_restarts + 1):
        # What this run has written counts, and nothing that was there before.
        goes_on = _newest(settings) != before
        with (
            tempfile.TemporaryDirectory(prefix="stretto-") as name,
            _environment(settings, records := Path(name), started_at_s, goes_on),
        ):
            status, message, lost = _launch_once(settings, command, preloaded, interrupts, records)
        if not lost or restart == max_restarts:
            break
        print(f"{message}\nstretto: restart {restart + 1} of {max_restarts}", file=sys.stderr, flush=True)
    if message:
        print(message, file=sys.stderr)
    return status


def _newest(settings: TrainSettings) -> tuple[Path, int] | None:
    """The newest checkpoint, and when it was written."""
    path = latest_in(settings.checkpoint_dir)
    return None if path is None else (path, path.stat().st_mtime_ns)


def _launch_once(
    settings: TrainSettings,
    command: Sequence[str],
    preloaded: Preloaded | None,
    interrupts: Interrupts,
    records: Path,
) -> tuple[int, str, bool]:
    """The exit status, the one message, and whether a rank was lost, so that others may do better."""
    world = settings.parallel.world
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=f"stretto-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(records / "logs")),
    )
    if hasattr(config, "signals_to_handle"):  # of PyTorch 2.13, which no longer reads the variable
        config.signals_to_handle = os.environ[HANDLED]

    def pass_on(signum: int) -> None:
        if len(ranks) < world:
            raise Interrupted(signum)
        for rank in ranks:
            if rank.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signum)

    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torchrun's launcher has many lines on a failure; ours is one
    try:
        with watching_ranks(records), forking(preloaded) as ranks, interrupts.noting(pass_on):
            elastic_launch(config, command[0])(*command[1:])
        return 0, "", False
    except ChildFailedError as error:
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        failures = recorded_failures(records)
        status, message = explain(settings, failures, exits)
        own = any(one.cause in (Cause.REFUSED, Cause.CRASHED) for one in failures)
        if not interrupts.asked or own:
            lost = any(one.cause is Cause.LOST for one in failures) or min(exits.values()) < 0
            return status, message, lost and not own
        signum = interrupts.asked
    except (SignalException, Interrupted) as error:
        signum = error.sigval if isinstance(error, SignalException) else error.signum
    finally:
        logging.disable(logged)
    step = max((failure.step for failure in recorded_failures(records)), default=0)
    message = f"stretto: interrupted at step {step}; {what_is_left(settings.checkpoint_dir)}"
    return 128 + int(signum), message, False


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
        why = "; if no one did that, the machine may have run out of memory" if name == "SIGKILL" else ""
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
def _environment(
    settings: TrainSettings, records: Path, started_at_s: float, goes_on: bool = False
) -> Iterator[None]:
    """What ranks find in their environment besides what the launcher gives them. goes_on: from the newest
    checkpoint, whatever settings say."""
    added = {
        RECORDS_DIR: str(records),
        LAUNCHER_PID: str(os.getpid()),
        STARTED: f"{started_at_s:.3f}",
        # Of PyTorch's launcher; the others are ours.
        HANDLED: "SIGINT,SIGQUIT,SIGHUP",
        "OMP_NUM_THREADS": str(threads(settings.training.threads_per_rank, settings.parallel.world)),
    }
    if sys.platform == "linux":
        # Gloo otherwise looks the host's name up, which on many machines leads nowhere.
        added["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Under `nohup`, whose ignored signal torchrun's launcher would take.
        added[HANDLED] = "SIGINT,SIGQUIT"
    if goes_on:
        added[GOES_ON] = "1"
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# A rank.


def _work(settings: TrainSettings, progress: Progress | None = None) -> int:
    """Train as the rank that the environment names, or as a single rank. Returns the exit status.

    A single rank raises errors as they are. One of several ends its process here when it fails: connections
    to ranks that are gone cannot be closed in order.
    """
    from stretto.train.trainer import Trainer  # loads what ranks need: their launcher does without

    world = environment()
    check_size(world, settings.parallel)
    world = replace(world, device=device_for(settings.training.device, world))
    check_graph(settings.cuda_graph, world.device)
    trainer = Trainer(settings, world, progress)

    # Both are called by other threads: the main one is inside a library, and the rank must end without it.
    def stuck(interrupted: Interrupted) -> None:
        _end(trainer, failure_of(interrupted, world.rank, trainer.step, interrupted))

    def missed(rank: int, phase: str) -> None:
        message = f"rank {world.rank}: {lost_words(rank, LOST_AFTER_S, phase)}"
        _end(trainer, RankFailure(world.rank, Cause.LOST, message, 1, trainer.step, time.time(), rank))

    trainer.missed = missed
    with Interrupts(stuck) as interrupts:
        trainer.interrupts = interrupts
        try:
            torch.set_num_threads(threads(settings.training.threads_per_rank, world.local_size))
            trainer.world = join(world)
            trainer.run()
            if world.size > 1 or is_launched():
                # The interpreter's end would stop threads that are inside the communication library, which
                # takes that for a crash (SIGABRT). All files are closed, and the ranks have parted.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
            return 0
        except BaseException as error:
            # A launcher that has seen another rank die stops this one, which may be about to report the same.
            try:
                interrupts.ending()
            except Interrupted:
                interrupts.ending()
            trainer.progress.stop()
            failure = failure_of(error, world.rank, trainer.step, interrupts.received)
            if world.size > 1 or is_launched():
                _end(trainer, failure)
            if failure.cause is not Cause.INTERRUPTED:
                raise
            print(_message(trainer, failure), file=sys.stderr)
            return failure.status


def _message(trainer: Trainer, failure: RankFailure) -> str:
    if failure.cause is Cause.INTERRUPTED:
        rest = what_is_left(trainer.settings.checkpoint_dir)
        return f"stretto: interrupted at step {failure.step}; {rest}"
    return failure.message if failure.cause is Cause.CRASHED else f"stretto: {failure.message}"


def _end(trainer: Trainer, failure: RankFailure) -> None:
    """End a rank that failed, without waiting for the others, even where nothing can be printed."""
    world = trainer.world
    try:
        with suppress(OSError):  # no one reads it any more, or the disk is full
            sys.stdout.flush()
        if not record_failure(failure):
            failure = lost_first(world, failure)
            # Ctrl-C reaches all ranks.
            shown = (
                world.rank == 0 if failure.cause is Cause.INTERRUPTED else is_first_to_print(world, failure)
            )
            if shown:
                print(_message(trainer, failure), file=sys.stderr)
            sys.stderr.flush()
            part(world, failure)
        sys.stderr.flush()
    finally:
        with suppress(Exception):
            trainer.progress.let_go()
        os._exit(failure.status)
