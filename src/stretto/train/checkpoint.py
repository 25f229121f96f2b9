"""A run's checkpoints: what `stretto.saving` writes, a folder for each step, with the run's state beside it.

A checkpoint counts once every rank has finished; until then the one before it stays. The position in the data
is a pure function of the step. `load_model` makes one model of a checkpoint again, in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from stretto.config import OptimizerSettings, TrainSettings
from stretto.errors import StrettoError, UsageError
from stretto.models.build import build_model
from stretto.models.weight_files import weights_folder, weights_of
from stretto.runtime import Runner
from stretto.runtime.all_or_none import on_first
from stretto.runtime.rank_tensors import Part
from stretto.saving import face, pretrained, tensors
from stretto.saving.beside import Saving, copies_of
from stretto.saving.digests import ELSE
from stretto.saving.folder import Writing
from stretto.saving.optimizer import name_and_key
from stretto.train.checkpoint_files import (
    FILE,
    STATE,
    CheckpointState,
    latest_in,
    mark,
    name_of,
    read_state,
    tidy,
)
from stretto.train.optimizer import states_after_a_step
from stretto.train.task import own_task


def save(
    folder: Path,
    state: CheckpointState,
    kept: tuple[str, str],
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    keep: int,
    beside: bool = False,
) -> Saving | None:
    """Write the checkpoint of `state.step` into `folder`; every rank must call it.

    kept: name and content of a file about the data, such as the tokenizer. keep: how many of the newest stay.
    beside: whether it is written beside steps, once its tensors are copied; every rank must wait for what is
    returned. Both raise the same StrettoError on all ranks when a rank could not write; the checkpoints from
    before stay as they were.
    """
    copies = copies_of(runner) if beside else None
    ranks = runner.transport if copies is None else copies.ranks
    last = latest_in(folder)
    rest = f"the last complete checkpoint is {last}" if last is not None else "there is no checkpoint yet"
    writing = Writing(
        f"the checkpoint of step {state.step} in {folder}",
        "set checkpoint.dir to a folder on another disk",
        f"Then resume: {rest}",
    )
    place = folder / name_of(state.step)

    def begin() -> None:
        with writing:
            tidy(folder)

    def end() -> None:
        with writing:
            mark(place, keep)

    files = {kept[0]: kept[1].encode(), STATE: FILE.to_text(state).encode()}
    setting = "checkpoint.dir"
    write = face.prepare(
        place, runner, optimizer, None, writing=writing, setting=setting, files=files, copies=copies
    )

    def work() -> None:
        on_first(ranks, begin)
        write()
        on_first(ranks, end)

    if copies is not None:
        return copies.start(work)
    work()
    return None


def check_state(checkpoint: Path, settings: OptimizerSettings) -> None:
    """Raises UsageError where the optimizer needs more of a parameter's state than the checkpoint has. What
    has no state at all there begins without."""
    stored = tensors.stored_in(checkpoint)
    saved: dict[str, set[str]] = {}
    for full in stored:
        name, key = name_and_key(full)
        if full.startswith("optimizer.") and f"model.{name}" in stored:
            saved.setdefault(name, set()).add(key)
    of_matrix, of_vector = (
        {key for key, value in state.items() if isinstance(value, torch.Tensor)}
        for state in states_after_a_step(settings)
    )
    for name, keys in saved.items():
        needed = of_matrix if len(stored[f"model.{name}"].shape) > 1 else of_vector
        if absent := sorted(needed - keys):
            raise UsageError(
                f"optimizer.options = {settings.options}: {settings.name} needs the state {absent[0]!r} with "
                f"them, and the checkpoint {checkpoint} has none of {name!r}: set the options back, or start "
                "again with --no-resume"
            )


MOST_ABSENT = 8
"""How much larger than what a checkpoint has of a model may be what it lacks: parameters that no stage uses.
Assumed: the part of a model that is trained is not smaller."""
FEW = 2**20
"""Elements that are never too many."""


def read_tensors(
    checkpoint: Path, values: Mapping[str, torch.Tensor], check_only: bool = False
) -> dict[str, torch.Tensor]:
    """Fill `values` in place with what the checkpoint has under their names; returns those that it does not
    have. check_only: read nothing, and refuse a checkpoint that has little of the values, which may be on
    "meta". Raises StrettoError for one that cannot be read, or has other shapes under their names."""
    stored = tensors.stored_in(checkpoint)
    known = {name: Part.all_of(tensor) for name, tensor in values.items() if name in stored}
    absent = {name: tensor for name, tensor in values.items() if name not in known}
    tensors.check_fit(checkpoint, known, stored)
    if not check_only:
        tensors.read(checkpoint, stored, known)
    elif sum(one.numel() for one in absent.values()) > FEW + MOST_ABSENT * sum(
        values[name].numel() for name in known
    ):
        largest = max(absent, key=lambda name: absent[name].numel())
        raise StrettoError(f"{checkpoint} lacks most of its model, such as {largest}; {ELSE}")
    return absent


def settings_of(state: CheckpointState, checkpoint: Path) -> TrainSettings:
    """The settings that the checkpoint was trained with. Raises UsageError for what is none."""
    try:
        # As JSON, where lists may become tuples.
        return TrainSettings.model_validate(state.settings, strict=False)
    except ValueError as error:
        raise UsageError(f"{checkpoint / STATE}: the settings cannot be read: {error}") from None


def load_model(checkpoint: Path, task_file: str | None = None) -> tuple[nn.Module, TrainSettings]:
    """The model of a checkpoint with its trained values, on the CPU, in eval() mode, and its settings.

    task_file: of a task of your own, the file that makes the model, which is run. The file that the
    checkpoint names is not: it may be a stranger's. Raises UsageError for what is no checkpoint, and for one
    of a task without its file; StrettoError for one that cannot be read, before a model of another size is
    made.
    """
    state = read_state(checkpoint)
    settings = settings_of(state, checkpoint)
    seed, task = settings.training.seed, settings.task
    if task is not None:
        if task_file is None:
            raise UsageError(
                f"{checkpoint} is of a task of your own, whose file is a program that makes the model: name "
                f"it with --task FILE, if you trust it (it was trained with {task.file!r})"
            )
        make = own_task(task.model_copy(update={"file": task_file}), seed).model
    else:
        make = partial(build_model, settings.model, state.vocab_size, seed)
    with torch.device("meta"):
        read_tensors(checkpoint, _tensors_of(make()), check_only=True)
    model = make()
    tensors, saved = _tensors_of(model), model.state_dict()
    # What no stage uses is not in the checkpoint; it has the value that it had at the start.
    absent = read_tensors(checkpoint, tensors)
    absent = {name: one for name, one in absent.items() if name.partition(".")[2] in saved}
    if absent and task is None and settings.model.pretrained is not None:
        weights = weights_of(model, weights_folder(settings.model.pretrained))
        pretrained.read(weights, {name: Part.all_of(tensor) for name, tensor in absent.items()})
    return model.eval(), settings


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's, under their names in checkpoints."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return tensors | {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}
