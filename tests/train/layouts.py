"""Runs of several ranks, one after the other, in processes that are started once: `layouts.py FOLDER RUN...`.

A run is a settings file in FOLDER. After each, what ranks have alike must be the same bits on all of them.
Plans come from a description of a machine: measuring one takes longer than these runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from tests.train.tiny import described

from stretto.config import load_settings
from stretto.ir.kept import part_number
from stretto.train import trainer as trainer_room
from stretto.train.trainer import Trainer
from stretto.train.world import environment, join, leave


def check_copies(trainer: Trainer) -> int:
    """Ranks whose parts are the same have the same bits; returns how many parameters were compared."""
    runner = trainer.runner
    known = {p.name: p for p in runner.plan.job.parameters}
    mine = {}
    for name, parameter in runner.named_parameters():
        spread = tuple(s.part(runner.coordinates[s.axis]) for s in known[name].shards)
        state = trainer.optimizer.state[parameter]
        rows = part_number(runner.plan.job, known[name], runner.coordinates)
        mine[known[name].tied_to, spread, rows] = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
    compared = 0
    for rank, theirs in enumerate(runner.transport.all_gather(mine)):
        for key in mine.keys() & theirs.keys():
            assert all(map(torch.equal, mine[key], theirs[key])), f"{key} differs from rank {rank}'s"
            compared += rank != runner.rank
    return compared


def main(folder: Path, runs: list[str]) -> None:
    """Every rank trains every run."""
    torch.set_num_threads(1)
    trainer_room.make_plan = described
    trainer_room.leave = lambda _: None  # the processes stay together for the next run
    world = join(environment())
    for run in runs:
        trainer = Trainer(load_settings(folder / f"{run}.toml"), world)
        trainer.run()
        print(run, "copies", check_copies(trainer), flush=True)
    leave(world)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
