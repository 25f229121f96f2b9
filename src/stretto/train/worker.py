"""One rank's process: train, and however it ends, end with one message and the right status.

A rank of our own launcher records its failure and prints nothing: the launcher makes one message of all. A
rank that was started by something else prints its own.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import replace

import torch

from stretto.config import TrainSettings
from stretto.train.checkpoint_files import what_is_left
from stretto.train.failure import Cause, RankFailure, failure_of, lost_words, record_failure
from stretto.train.interrupt import Interrupted, Interrupts
from stretto.train.peers import LOST_AFTER_S, is_first_to_print, lost_first, part
from stretto.train.progress import Progress
from stretto.train.trainer import Trainer
from stretto.train.world import check_graph, check_size, device_for, environment, join, threads


def work(settings: TrainSettings, progress: Progress | None = None) -> int:
    """Train as the rank that the environment names, or as a single rank. Returns the exit status.

    A single rank raises errors as they are. One of several ends its process here when it fails: connections
    to ranks that are gone cannot be closed in order.
    """
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
        try:
            torch.set_num_threads(threads(settings.training.threads_per_rank, world.local_size))
            trainer.world = join(world)
            trainer.run()
            if world.size > 1:
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
            if world.size > 1:
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
        with suppress(OSError):  # nobody reads it any more, or the disk is full
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
