"""Starts a run's ranks on this machine through torchrun's own launcher, and words how it ended.

    1. What can be wrong with settings, text or model is found before any process is started; what the model
       says without its text, first.
    2. `torch.distributed.launcher` starts one process a rank, each the same command again, over 127.0.0.1.
    3. When ranks fail, the first cause is told once: a rank that died without a word is named by its
       signal, else the earliest note counts that is not about somebody else.

A single rank needs no process of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stretto.config import TrainSettings
from stretto.files.say import Say, unheard
from stretto.train.checkpoint_files import find, what_is_left
from stretto.train.interrupt import Interrupted, Interrupts, end_at_once
from stretto.train.launched import LAUNCHER_PID, NOTES_DIR, is_worker
from stretto.train.layout import refuse_early, spread
from stretto.train.lock import folders_of, refuse_if_held
from stretto.train.metrics import check_tensorboard
from stretto.train.notes import Cause, Note, read_notes
from stretto.train.reuse import kept_by
from stretto.train.starting import STARTED, Starting
from stretto.train.stopped import watching_ranks
from stretto.train.text_task import task_of
from stretto.train.world import (
    World,
    check_graph,
    crowding,
    device_for,
    device_note,
    threads,
)

RANKS_STUCK_S = 40.0
"""How long the launcher has to end by itself after a signal while there are ranks, of whose end it
tells. They have `STUCK_S` from when they hear of it, and torchrun's launcher kills those left after 30 s."""


def start(settings: TrainSettings, command: Sequence[str], starting: Starting | None = None) -> int:
    """Train: as a rank if a launcher started this process, else with all ranks on this machine.

    command: the program and arguments that a rank is started with. starting: what tells of the run until its
    first step, or until rank 0 does. Returns the exit status. Raises
    StrettoError and its kin for what is found before ranks are started, or by a single rank.
    """
    check_tensorboard(settings.output.tensorboard)
    if settings.checkpoint.resume not in ("auto", "never"):
        find(Path(settings.checkpoint.resume))
    if not is_worker():
        refuse_if_held(folders_of(settings))
    kept_by(settings)
    if is_worker():
        return _work(settings, starting)
    if settings.parallel.world == 1:
        refuse_early(settings)
        return _work(settings, starting)
    starting = starting or Starting()

    def stuck(interrupted: Interrupted) -> None:
        with suppress(Exception):
            starting.let_go()
        end_at_once(interrupted)

    with Interrupts(stuck) as interrupts, starting:
        try:
            starting.begin("looking at settings, data and model")
            refuse_early(settings)
            _check(settings, starting.say)
            interrupts.stuck_s = RANKS_STUCK_S
            starting.begin(f"starting {settings.parallel.world} ranks")
            starting.end()  # rank 0 tells of the rest
            return _launch(settings, command, starting.started_at_s)
        except Interrupted as error:
            starting.end()
            print("stretto: interrupted before the first step", file=sys.stderr)
            return error.status


def _work(settings: TrainSettings, starting: Starting | None) -> int:
    from stretto.train.worker import work  # loads what ranks need: their launcher does without

    return work(settings, starting)


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
    spread(model, settings, unheard)  # the first rank will say it
    note = device_note(settings.training.device, here)
    if note is not None:
        say(f"note: {note}")
    if device.type != "cpu":
        return
    crowd = crowding(ranks, threads(settings.training.threads_per_rank, ranks))
    if crowd is not None:
        say(f"note: {crowd}")


def _launch(settings: TrainSettings, command: Sequence[str], started_at_s: float) -> int:
    """Step 2."""
    ranks = settings.parallel.world
    with (
        tempfile.TemporaryDirectory(prefix="stretto-") as folder,
        _environment(settings, Path(folder), started_at_s),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=f"stretto-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "logs")),
        )
        with _quiet(), watching_ranks(Path(folder)):
            try:
                elastic_launch(config, command[0])(*command[1:])
                return 0
            except ChildFailedError as error:
                exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
                status, message = explain(settings, read_notes(Path(folder)), exits)
            except (SignalException, Interrupted) as error:
                signum = error.sigval if isinstance(error, SignalException) else error.signum
                step = max((note.step for note in read_notes(Path(folder))), default=0)
                status = 128 + int(signum)
                message = f"stretto: interrupted at step {step}; {what_is_left(settings.checkpoint_dir)}"
    print(message, file=sys.stderr)
    return status


def explain(settings: TrainSettings, notes: Sequence[Note], exits: Mapping[int, int]) -> tuple[int, str]:
    """Step 3: the exit status and the one message for ranks that ended with `exits` and left `notes`."""
    step = max((note.step for note in notes), default=None)
    rest = what_is_left(settings.checkpoint_dir)
    killed = {rank: -code for rank, code in exits.items() if code < 0 and rank not in {n.rank for n in notes}}
    if killed:
        rank, signum = next(iter(sorted(killed.items())))
        name = signal.Signals(signum).name
        when = f" after step {step}" if step is not None else ""
        why = "; if nobody did that, the machine may have run out of memory" if name == "SIGKILL" else ""
        others = "the other rank was" if settings.parallel.world == 2 else "the others were"
        return (
            1,
            f"stretto: rank {rank} was lost{when}: {name} ended it{why}; {others} stopped. {rest}",
        )
    own = [note for note in notes if note.cause in (Cause.REFUSED, Cause.CRASHED)]
    if own:
        first = own[0]
        return first.status, f"stretto: {first.message}" if first.cause is Cause.REFUSED else first.message
    silent = sorted(rank for rank in exits if rank not in {note.rank for note in notes})
    if silent:
        return (
            1,
            f"stretto: rank {silent[0]} ended with status {exits[silent[0]]}; see above. {rest}",
        )
    if notes:
        first = notes[0]
        ended = f"rank {first.rank} was ended by {first.message} after step {step}"
        said = ended if first.cause is Cause.INTERRUPTED else first.message
        return first.status, f"stretto: {said}. {rest}"
    return 1, f"stretto: the ranks ended, and none said why. {rest}"


@contextmanager
def _environment(settings: TrainSettings, folder: Path, started_at_s: float) -> Iterator[None]:
    """What ranks find in their environment beside what the launcher gives them."""
    added = {
        NOTES_DIR: str(folder),
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
    before: dict[str, Any] = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """The launcher logs what ranks do when they fail, in many lines; ours is one."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
