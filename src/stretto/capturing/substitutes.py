"""What is computed otherwise than PyTorch computes it, while a model is captured.

Batch norms:

    momentum=None     the mean over all batches so far: PyTorch divides by the value of a buffer, a graph by
                      the buffer itself
    SyncBatchNorm     sums statistics over processes in its forward, which a plan does not: of one
                      data-parallel copy it is a batch norm, of several it is refused while it trains

Losses of a step that computes in bfloat16 are taken in float32, as under PyTorch's autocast (a loss of
bfloat16 has 8 bits: after 5.0 comes 5.03):

    1. Loss functions of `torch.nn.functional` get their arguments of half precision in float32.
    2. So do means and sums of a full tensor, in which a loss that is written out ends.
    3. What the loss function returns is a number in float32, and so the mean over microbatches is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stretto.errors import CaptureError
from stretto.parallelize.functions import put_forward

FORWARDS = (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)
"""Of all of PyTorch's own, whatever their number of dims."""


@contextmanager
def batch_norms_in_ops(model: nn.Module) -> Iterator[None]:
    """While the context lasts, no batch norm that trains reads a value or communicates."""
    with ExitStack() as undo:
        for module in model.modules():
            if (
                module.training
                and getattr(type(module), "forward", None) in FORWARDS
                and "forward" not in module.__dict__
                and (module.momentum is None or isinstance(module, nn.SyncBatchNorm))
            ):
                undo.callback(put_forward(module, MethodType(_forward, module)))
        yield


def _forward(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """The forward of one that trains."""
    if x.dim() < 2:
        raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")
    seen = norm.num_batches_tracked if norm.track_running_stats else None
    if norm.running_mean is None or norm.running_var is None or not norm.track_running_stats:
        return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
    if seen is not None:
        seen.add_(1)
    if norm.momentum is not None or seen is None:
        share = norm.momentum or 0.0
        running = norm.running_mean, norm.running_var
        return F.batch_norm(x, *running, norm.weight, norm.bias, True, share, norm.eps)
    mean, var = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    made = F.batch_norm(x, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
    with torch.no_grad():
        for average, now in ((norm.running_mean, mean), (norm.running_var, var)):
            average.lerp_(now, 1.0 / seen.to(average.dtype))
    return made


def check_synchronised(model: nn.Module, copies: int) -> None:
    """Raises CaptureError for a norm whose statistics would have to be those of several copies."""
    for name, module in model.named_modules():
        if copies > 1 and module.training and isinstance(module, nn.SyncBatchNorm):
            raise CaptureError(
                f"cannot capture {type(model).__name__}\n  {name or 'the model'} is a SyncBatchNorm, whose "
                f"statistics are those of all dp = {copies} copies, and a plan sums none over copies: give "
                "nn.BatchNorm1d (or 2d, 3d), which takes those of each copy's microbatch, a norm of each "
                "row (nn.GroupNorm, nn.LayerNorm), or let it use its running statistics (module.eval())"
            )


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
