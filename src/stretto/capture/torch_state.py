"""PyTorch's global state while a model is traced, and back as it was when that is over.

Like `torch_adapter`, a room for private corners of PyTorch (2.11 to 2.13):

    torch.compiler._is_compiling_flag, _is_exporting_flag   what `torch.export` tells model code
    torch._C._set_mkldnn_enabled                            recurrent layers as plain ops
    torch.utils.checkpoint._checkpoint_hook                 whether the model asks to recompute
    loggers of torch._functorch and torch._subclasses       tracebacks of the exporter's own
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint


@contextmanager
def tracing_state() -> Iterator[None]:
    """Everything that this room sets, for as long as the context lasts."""
    with _checkpoints_told(), _exporting(), _plain_ops():
        yield


@contextmanager
def _exporting() -> Iterator[None]:
    """Tell model code that it is being exported, as `torch.export` does: models (Hugging Face's among them)
    ask `torch.compiler.is_compiling()` before they look at the values of tensors."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags


@contextmanager
def _plain_ops() -> Iterator[None]:
    """Keep the exporter's log out of the user's terminal, compiled code eager, and oneDNN's recurrent layers,
    which save nothing for their backward when they run without autograd, in their plain form."""
    loggers = [logging.getLogger(name) for name in ("torch._functorch", "torch._subclasses.fake_tensor")]
    levels = [logger.level for logger in loggers]
    mkldnn = torch._C._get_mkldnn_enabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _checkpoints_told() -> Iterator[None]:
    """Warn once when the model asks for activation checkpointing, of which a graph keeps no trace."""
    hook = torch.utils.checkpoint._checkpoint_hook
    enter = hook.__init__
    asked: list[bool] = []

    def noted(self: Any, frame: Any) -> None:
        asked.append(True)
        enter(self, frame)

    hook.__init__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        hook.__init__ = enter  # type: ignore[method-assign]
        if asked:
            warnings.warn(
                "the model asks for activation checkpointing (torch.utils.checkpoint), which has no effect: "
                "activations are kept from the forward to the backward, and the plan's peak memory counts "
                "them. Give recompute='full', 'selective' or a limit to Parallel (parallel.recompute in "
                "a settings file) instead",
                stacklevel=2,
            )
