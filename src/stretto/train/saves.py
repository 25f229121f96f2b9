"""A run's saves: each with the run's state, written beside steps where settings say so, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from stretto.config import TrainSettings
from stretto.errors import LostRankError
from stretto.runtime import Runner
from stretto.saving.beside import Saving
from stretto.train import checkpoint
from stretto.train.checkpoint_files import CheckpointState, name_of
from stretto.train.failure import is_lost_connection
from stretto.train.task import Task


class Saves:
    """One rank's; every rank does the same with its own. step: of the last one, 0 before."""

    def __init__(
        self,
        settings: TrainSettings,
        task: Task,
        runner: Runner,
        optimizer: torch.optim.Optimizer,
        saved: Callable[[Path], None],
    ) -> None:
        """saved: called with a checkpoint once it is complete, by the thread that trains."""
        self.step = 0
        self._settings, self._task = settings, task
        self._runner, self._optimizer = runner, optimizer
        self._saved = saved
        self._under_way: Saving | None = None

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What ends a run early lets the save that is under way come to its end, unless a rank is gone, or
        all are to end at once. It is reported, and not how that save failed."""
        alone = self._runner.transport.size == 1
        lost = not isinstance(error, Exception) or isinstance(error, LostRankError)
        if error is not None and (alone or not (lost or is_lost_connection(error))):
            with suppress(Exception):
                self.wait()

    def save(self, step: int, beside: bool) -> None:
        """Save the state after `step`. beside: other steps follow. Raises StrettoError on all ranks, also for
        the save before."""
        self.wait()
        settings, at = self._settings, self._settings.checkpoint
        data = None if self._task.state is None else self._task.state()
        of, draws = settings.model_dump(mode="json"), self._runner.state.steps
        state = CheckpointState(step, draws, self._task.vocab_size, of, data)
        self._under_way = checkpoint.save(
            *(settings.checkpoint_dir, state, self._task.kept, self._runner, self._optimizer, at.keep),
            beside=beside and at.asynchronous,
        )
        self.step = step
        if self._under_way is None:
            self._saved(settings.checkpoint_dir / name_of(step))

    def look(self) -> bool:
        """Whether this rank knows that its save has failed, which `wait` then raises on all ranks. Calls
        `saved` for one that is complete."""
        if self._under_way is None or not self._under_way.done:
            return False
        if self._under_way.failed:
            return True
        self.wait()
        return False

    def wait(self) -> None:
        """Until the save that is under way is complete. Raises StrettoError on all ranks."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.wait()
            self._saved(self._settings.checkpoint_dir / name_of(self.step))
