"""The loss of connectionist temporal classification (Graves et al., 2006) as an op whose shapes are known.

PyTorch's `_ctc_loss` keeps probabilities for the longest target of a batch, whose length is data. Here there
is room for the longest that the shape of the targets allows; PyTorch's own backward takes it, of which
PyTorch says no shape.

Uses private names: `torch.ops.aten._ctc_loss` and `_ctc_loss_backward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PYTORCHS: Any = torch.ops.aten._ctc_loss.Tensor

_library: Any = torch.library.Library("stretto_ctc", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, SymInt blank=0, "
    "bool zero_infinity=False) -> (Tensor, Tensor)"
)


def _kept(log_probs: Tensor, targets: Tensor) -> tuple[int, int, int]:
    """The shape of what is kept: sequence, time, and each target's symbols with blanks around each."""
    longest = targets.shape[1] if targets.dim() > 1 else targets.numel()
    return log_probs.shape[1], log_probs.shape[0], 2 * longest + 1


def _loss(log_probs: Tensor, targets: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    result, kept = PYTORCHS(log_probs, targets, *given)
    room = kept.new_full(_kept(log_probs, targets), -torch.inf)
    room[:, :, : kept.shape[2]] = kept
    return result, room


def _like(log_probs: Tensor, targets: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(_kept(log_probs, targets))


_library.impl("loss", _loss, "CPU")
_library.impl("loss", _loss, "CUDA")
torch.library.register_fake("stretto_ctc::loss", _like, lib=_library)

_aten: Any = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
_aten.impl("_ctc_loss_backward.Tensor", lambda grad, log_probs, *_: torch.empty_like(log_probs))

LOSS: Any = torch.ops.stretto_ctc.loss.default
