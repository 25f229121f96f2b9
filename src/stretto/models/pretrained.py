"""A GPT, with experts or without, as a folder that others can read: its shape as config.json, its weights
as model.safetensors.

Touches that folder. Models of `transformers` have their own way (`save_pretrained`, `from_pretrained`).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model

from stretto.config.pretrained import CONFIG
from stretto.errors import UsageError
from stretto.files.parse import parse_json
from stretto.files.settings_file import faults_of
from stretto.models.gpt import GPT, GPTConfig
from stretto.models.moe import MoEConfig, MoEGPT
from stretto.models.weight_files import WEIGHTS, weights_of

KINDS: dict[str, tuple[type[GPT], type[GPTConfig]]] = {
    "stretto-moe": (MoEGPT, MoEConfig),
    "stretto-gpt": (GPT, GPTConfig),
}
"""What config.json calls a kind of model -> its class and that of its shape; the more special kind first."""
NOT_OF_THE_SHAPE = {"kind", "pretrained"}


def save_gpt(model: GPT, folder: Path) -> None:
    """Write `model` into an existing folder, a tied weight once. Raises OSError or SafetensorError."""
    kind = next(name for name, (made, _) in KINDS.items() if isinstance(model, made))
    text = json.dumps({"model_type": kind, **model.config.model_dump(exclude=NOT_OF_THE_SHAPE)}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    save_model(model, str(folder / WEIGHTS))


def load_gpt(folder: str | Path) -> GPT:
    """The GPT that `save_gpt` wrote, in eval() mode, in float32 on the CPU.

    Raises UsageError that names the file which is absent, or is of another kind of model.
    """
    folder = Path(folder)
    try:
        data = parse_json((folder / CONFIG).read_text(encoding="utf-8-sig"))
        result = KINDS.get(data.pop("model_type", None))
        if result is None:
            raise UsageError(f"{folder / CONFIG}: is of another kind of model; expected {' or '.join(KINDS)}")
        kind, config = result
        if faults := faults_of(config, data, str(folder / CONFIG), {}):
            raise UsageError("\n".join(f"{source}: {line}" for source, line in faults))
        with torch.device("meta"):
            weights_of(kind(config(**data)), folder)  # before it takes memory
        model = kind(config(**data))
        load_model(model, str(folder / WEIGHTS))
    except UsageError:
        raise
    except Exception as error:  # whatever files of others make of it
        raise UsageError(f"{folder}: no GPT can be read from it: {error}") from None
    return model.eval()
