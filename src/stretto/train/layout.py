"""How a run's model is spread over ranks, and what the user is told of it.

Reads the model's modules; touches nothing.
"""

from __future__ import annotations

import warnings

from torch import nn

from stretto.config import DecoderSettings, TrainSettings
from stretto.parallelize.layout import Layout, layout_of
from stretto.train.text import Say


def spread(model: nn.Module, settings: TrainSettings, say: Say) -> Layout:
    """How it is laid out. `say` takes what is left whole.

    Raises UsageError for a model, a plan or sizes that do not fit.
    """
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        layout = layout_of(model, settings.parallel)
    for told in dict.fromkeys(str(warning.message) for warning in found):
        say(f"note: {told}{_padding(model, settings)}")
    return layout


def _padding(model: nn.Module, settings: TrainSettings) -> str:
    """The setting that pads the vocabulary."""
    rows = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(rows, int):
        return ""
    size = settings.parallel.tp
    key = "model.vocab_size" if isinstance(settings.model, DecoderSettings) else "model.config.vocab_size"
    return f" ({key} = {-(-rows // size) * size})"
