"""Batch norms as a graph can have them.

momentum=None     the mean over all batches so far: PyTorch divides by the value of a buffer, a graph by the
                  buffer itself
SyncBatchNorm     sums statistics over processes in its forward, which a plan does not: of one data-parallel
                  copy it is a batch norm, of several it is refused while it trains
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        held = norm.running_mean, norm.running_var
        return F.batch_norm(x, *held, norm.weight, norm.bias, True, share, norm.eps)
    mean, var = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    made = F.batch_norm(x, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
    with torch.no_grad():
        for running, now in ((norm.running_mean, mean), (norm.running_var, var)):
            running.lerp_(now, 1.0 / seen.to(running.dtype))
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
