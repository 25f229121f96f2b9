"""A trained model in one process again, from a checkpoint; and a text that it writes.

Reads checkpoints. Meant for models that one machine holds.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from stretto.config import TrainSettings
from stretto.errors import UsageError
from stretto.models.build import build_model
from stretto.models.gpt import generate
from stretto.train.checkpoint import names_in, read_tensors
from stretto.train.checkpoint_files import STATE, State, read_state

SAMPLE_PROMPT_TOKENS = 16
"""How much held-out text a sample continues: a line or two of code, enough to see whether it goes on well."""
SAMPLE_TEMPERATURE = 0.8
"""Below 1, so that small models stay readable. Assumed."""


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
    model = build_model(settings.model, state.vocab_size, settings.training.seed)
    known = names_in(checkpoint)
    # What no stage uses is not in the checkpoint; it has the value that it had at the start.
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {f"buffer.{name}": b for name, b in model.named_buffers()}
    read_tensors(checkpoint, {name: tensor for name, tensor in tensors.items() if name in known})
    return model.eval(), settings


def write_sample(
    model: nn.Module, tokenizer: Tokenizer, prompt_ids: torch.Tensor, tokens: int, context: int, seed: int
) -> tuple[str, str]:
    """The text of `prompt_ids` (S,) and the `tokens` tokens that the model continues it with."""
    generator = torch.Generator().manual_seed(seed)
    ids = generate(model, prompt_ids, tokens, SAMPLE_TEMPERATURE, generator, context).tolist()
    start = len(prompt_ids)
    return tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:])
