"""How a run's model is spread over tensor-parallel ranks, and what the user is told of it.

Reads the model's modules; touches nothing.
"""

from __future__ import annotations

import warnings

from torch import nn

from stretto.capture import tensor_of
from stretto.config import GPTSettings, TrainSettings
from stretto.parallelize.tensor import TensorParallel
from stretto.train.text import Say


def spread(model: nn.Module, settings: TrainSettings, say: Say) -> TensorParallel | None:
    """Which modules are spread, and how; None without tensor parallelism. `say` takes what is left whole.

    Raises UsageError for a model, a plan or sizes that do not fit.
    """
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        tensor = tensor_of(model, settings.parallel)
    for told in dict.fromkeys(str(warning.message) for warning in found):
        say(f"note: {told}{_padding(model, settings)}")
    return tensor


def _padding(model: nn.Module, settings: TrainSettings) -> str:
    """The setting that pads the vocabulary."""
    rows = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(rows, int):
        return ""
    size = settings.parallel.tp
    key = "model.vocab_size" if isinstance(settings.model, GPTSettings) else "model.config.vocab_size"
    return f" ({key} = {-(-rows // size) * size})"
