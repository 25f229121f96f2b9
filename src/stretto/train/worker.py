"""One rank's process: train, and however it ends, end with one message and the right status.

A rank of our own launcher leaves a note and stays silent: the launcher makes one message of all notes. A
rank that was started by something else speaks for itself.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import replace

from stretto.config import TrainSettings
from stretto.train.checkpoint_files import what_is_left
from stretto.train.heartbeat import LOST_AFTER_S
from stretto.train.interrupt import Interrupted, Interrupts
from stretto.train.lost import agree, is_first_to_say, keeps_store_elsewhere, wait_for_askers
from stretto.train.notes import Cause, Note, leave_note, note_of
from stretto.train.starting import Starting
from stretto.train.stopped import lost_words
from stretto.train.trainer import Trainer
from stretto.train.world import (
    World,
    check_graph,
    check_size,
    device_for,
    environment,
    join,
    threads,
    use_threads,
)

LINGER_S = 3.0
"""How long rank 0 keeps the job's store up after a failure, for the others to read who was lost first, or
whether what they refuse has been said."""


def work(settings: TrainSettings, starting: Starting | None = None) -> int:
    """Train as the rank that the environment names, or alone. Returns the exit status. starting: what tells
    of the run until its first step.

    Alone, errors are raised as they are. As one of several ranks the process ends here when it fails:
    connections to ranks that are gone cannot be closed in order.
    """
    place = environment()
    check_size(place, settings.parallel)
    place = replace(place, device=device_for(settings.training.device, place))
    check_graph(settings.cuda_graph, place.device)
    trainer = Trainer(settings, place, starting)

    def stuck(interrupted: Interrupted) -> None:
        # Another thread's view: the main one is inside a library, and the rank must end without it.
        _end(trainer.world, trainer, note_of(interrupted, place.rank, trainer.step, interrupted))

    def missed(rank: int, phase: str) -> None:
        # Another thread's view, too: the main one waits for a rank that gives no sign of life.
        message = f"rank {place.rank}: {lost_words(rank, LOST_AFTER_S, phase)}"
        note = Note(place.rank, Cause.LOST, message, 1, trainer.step, time.time(), rank)
        _end(trainer.world, trainer, note)

    trainer.missed = missed
    with Interrupts(stuck) as interrupts:
        try:
            use_threads(threads(settings.training.threads_per_rank, place.local_size))
            trainer.world = join(place)
            trainer.run()
            if place.size > 1:
                # The interpreter's end would stop threads that are inside the communication library, which
                # takes that for a crash (SIGABRT). All files are closed, and the ranks have parted.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
            return 0
        except BaseException as error:
            # A launcher that has seen another rank die stops this one, which may be about to say the same.
            try:
                interrupts.ending()
            except Interrupted:
                interrupts.ending()
            trainer.progress.stop()
            note = note_of(error, place.rank, trainer.step, interrupts.received)
            if place.size == 1 and note.cause is not Cause.INTERRUPTED:
                raise
            if place.size > 1:
                _end(trainer.world, trainer, note)
            print(interrupted_message(trainer, note), file=sys.stderr)
            return note.status


def interrupted_message(trainer: Trainer, note: Note) -> str:
    """What to say when the user stopped the run."""
    rest = what_is_left(trainer.settings.checkpoint_dir)
    return f"stretto: interrupted at step {note.step}; {rest}"


def _end(world: World, trainer: Trainer, note: Note) -> None:
    """End a rank that failed, without waiting for the others, even where nothing can be said."""
    try:
        with suppress(OSError):  # nobody reads it any more, or the disk is full
            sys.stdout.flush()
        if not leave_note(note):
            note = agree(world, note)
            if note.cause is Cause.INTERRUPTED:
                if world.rank == 0:
                    print(interrupted_message(trainer, note), file=sys.stderr)
            elif note.cause is Cause.CRASHED:
                print(note.message, file=sys.stderr)
            elif is_first_to_say(world, note):
                print(f"stretto: {note.message}", file=sys.stderr)
            if world.rank == 0 and not keeps_store_elsewhere():
                sys.stderr.flush()
                if note.cause is Cause.REFUSED:
                    wait_for_askers(world, note, LINGER_S)
                elif world.size > 2:
                    time.sleep(LINGER_S)
        sys.stderr.flush()
    finally:
        with suppress(Exception):
            trainer.progress.let_go()
        os._exit(note.status)
