"""A trained model in one process again, from a checkpoint.

Reads checkpoints. Meant for models that one machine holds.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from stretto.config import TrainSettings
from stretto.errors import UsageError
from stretto.models.build import build_model
from stretto.models.fitting import weights_of
from stretto.models.hub import weights_folder
from stretto.runtime.shards import Part
from stretto.saving.pretrained import read
from stretto.train.checkpoint import names_in, read_tensors
from stretto.train.checkpoint_files import STATE, State, read_state
from stretto.train.task import own_task


def settings_of(state: State, checkpoint: Path) -> TrainSettings:
    """The settings that the checkpoint was trained with. Raises UsageError for what is none."""
    try:
        # As JSON, where lists may become tuples.
        return TrainSettings.model_validate(state.settings, strict=False)
    except ValueError as error:
        raise UsageError(f"{checkpoint / STATE}: the settings cannot be read: {error}") from None


def load_whole(checkpoint: Path) -> tuple[nn.Module, TrainSettings]:
    """The model of a checkpoint with its trained values, on the CPU, in eval() mode, and its settings.

    Raises UsageError for what is no checkpoint, StrettoError for one that cannot be read.
    """
    state = read_state(checkpoint)
    settings = settings_of(state, checkpoint)
    seed = settings.training.seed
    if settings.task is not None:
        model = own_task(settings.task, seed).model()
    else:
        model = build_model(settings.model, state.vocab_size, seed)
    known = names_in(checkpoint)
    # What no stage uses is not in the checkpoint; it has the value that it had at the start.
    saved = model.state_dict()
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {f"buffer.{name}": b for name, b in model.named_buffers()}
    read_tensors(checkpoint, {name: tensor for name, tensor in tensors.items() if name in known})
    absent = {
        name: one for name, one in tensors.items() if name not in known and name.partition(".")[2] in saved
    }
    if absent and settings.task is None and settings.model.pretrained is not None:
        weights = weights_of(model, weights_folder(settings.model.pretrained))
        read(weights, {name: Part.all_of(tensor) for name, tensor in absent.items()})
    return model.eval(), settings
