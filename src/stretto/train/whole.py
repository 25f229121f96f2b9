"""A trained model in one process again, from a checkpoint.

Reads checkpoints. Meant for models that one machine holds.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from stretto.config import TrainSettings
from stretto.errors import UsageError
from stretto.models.build import build_model
from stretto.models.fitting import weights_of
from stretto.models.weight_files import weights_folder
from stretto.runtime.shards import Part
from stretto.saving.pretrained import read
from stretto.train.checkpoint import check_tensors, read_tensors
from stretto.train.checkpoint_files import STATE, State, read_state
from stretto.train.task import own_task


def settings_of(state: State, checkpoint: Path) -> TrainSettings:
    """The settings that the checkpoint was trained with. Raises UsageError for what is none."""
    try:
        # As JSON, where lists may become tuples.
        return TrainSettings.model_validate(state.settings, strict=False)
    except ValueError as error:
        raise UsageError(f"{checkpoint / STATE}: the settings cannot be read: {error}") from None


def load_whole(checkpoint: Path, task_file: str | None = None) -> tuple[nn.Module, TrainSettings]:
    """The model of a checkpoint with its trained values, on the CPU, in eval() mode, and its settings.

    task_file: of a task of one's own, the file that makes the model, which is run. What the checkpoint says
    of it is not: it may be a stranger's. Raises UsageError for what is no checkpoint, and for one of a task
    without its file; StrettoError for one that cannot be read, before a model of another size is made.
    """
    state = read_state(checkpoint)
    settings = settings_of(state, checkpoint)
    seed, task = settings.training.seed, settings.task
    if task is not None:
        if task_file is None:
            raise UsageError(
                f"{checkpoint} is of a task of one's own, whose file is a program that makes the model: name "
                f"it with --task FILE, if you trust it (it was trained with {task.file!r})"
            )
        make = own_task(task.model_copy(update={"file": task_file}), seed).model
    else:
        make = partial(build_model, settings.model, state.vocab_size, seed)
    with torch.device("meta"):
        check_tensors(checkpoint, _tensors(make()))
    model = make()
    tensors, saved = _tensors(model), model.state_dict()
    # What no stage uses is not in the checkpoint; it has the value that it had at the start.
    absent = read_tensors(checkpoint, tensors)
    absent = {name: one for name, one in absent.items() if name.partition(".")[2] in saved}
    if absent and task is None and settings.model.pretrained is not None:
        weights = weights_of(model, weights_folder(settings.model.pretrained))
        read(weights, {name: Part.all_of(tensor) for name, tensor in absent.items()})
    return model.eval(), settings


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's, under their names in checkpoints."""
    found = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return found | {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}
