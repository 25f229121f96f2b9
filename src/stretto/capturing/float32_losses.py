"""Losses of a step that computes in bfloat16 are taken in float32, as under PyTorch's autocast.

    1. Loss functions of `torch.nn.functional` are given what they are given of half precision in float32.
    2. So are means and sums of a whole tensor, in which a loss that is written out ends.
    3. What the loss function returns is a number in float32, and so the mean over microbatches is one.

A loss of bfloat16 has 8 bits: after 5.0 comes 5.03. All else is computed as the model's code says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

HALF = (torch.bfloat16, torch.float16)

LOSSES: frozenset[Callable[..., Any]] = frozenset(
    {
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.cosine_embedding_loss,
        F.cross_entropy,
        F.ctc_loss,
        F.gaussian_nll_loss,
        F.hinge_embedding_loss,
        F.huber_loss,
        F.kl_div,
        F.l1_loss,
        F.margin_ranking_loss,
        F.mse_loss,
        F.multi_margin_loss,
        F.multilabel_margin_loss,
        F.multilabel_soft_margin_loss,
        F.nll_loss,
        F.poisson_nll_loss,
        F.smooth_l1_loss,
        F.soft_margin_loss,
        F.triplet_margin_loss,
        F.triplet_margin_with_distance_loss,
    }
)
"""Step 1."""
WHOLE: frozenset[Callable[..., Any]] = frozenset({torch.mean, torch.sum, Tensor.mean, Tensor.sum})
"""Step 2, where they are called with a tensor and nothing else."""


class LossesInFloat32(TorchFunctionMode):
    """Steps 1 and 2, while it is entered."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in LOSSES or (func in WHOLE and len(args) == 1 and not named):
            args = [in_float32(one) for one in args]
            named = {key: in_float32(one) for key, one in named.items()}
        return func(*args, **named)


def in_float32(value: Any) -> Any:
    """A tensor of half precision in float32; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value
