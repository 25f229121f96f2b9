"""A rank of `stretto train` that ends itself by SIGKILL at a named place, in float64:
`killed.py PLACE STEP RANK COMMAND...`. STEP is the one after which the place counts; "nowhere" is no place.

Plans come from a description of a machine: measuring one takes longer than these runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from tests.train.tiny import described

from stretto.cli.main import main as stretto
from stretto.runtime.torch_transport import TorchTransport
from stretto.saving import folder, tensors
from stretto.train import checkpoint
from stretto.train import trainer as trainer_room
from stretto.train.trainer import Trainer

OWNERS: dict[str, tuple[Any, str]] = {
    "gather": (TorchTransport, "collective"),
    "scatter": (TorchTransport, "collective"),
    "update": (torch.optim.AdamW, "step"),
    "tensors": (tensors, "write"),
    "rename": (folder, "commit"),
    "marker": (checkpoint, "mark"),
}
"""Place -> what is called there; rank 0 alone renames and marks."""
KINDS = {"gather": "all_gather", "scatter": "reduce_scatter"}

_steps_done = [0]


def end_at(place: str, step: int, behind: bool) -> None:
    """behind: at the end of what is called, in place of its beginning."""
    owner, name = OWNERS[place]
    called: Callable[..., Any] = getattr(owner, name)

    def ending(*args: Any, **more: Any) -> Any:
        here = _steps_done[0] >= step and (place not in KINDS or args[2] == KINDS[place])
        made = called(*args, **more) if behind or not here else None
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    setattr(owner, name, ending)


def main(place: str, step: int, rank: int, command: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
    trainer_room.make_plan = described
    one_step = Trainer._one_step

    def counted(self: Trainer, batch: Any) -> tuple[float, float, float]:
        _steps_done[0] = self.step
        made = one_step(self, batch)
        _steps_done[0] = self.step
        return made

    Trainer._one_step = counted  # type: ignore[method-assign]
    what, _, where = place.partition(" ")
    if what != "nowhere" and rank == int(os.environ["RANK"]):
        end_at(what, step, where == "done")
    sys.argv = ["stretto", *command]
    stretto()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
