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

For CUDA where there is none, tensors stay fake CPU tensors (a PyTorch without CUDA has no autograd for
others), and what PyTorch would choose on CUDA is chosen here: layer norms keep statistics in float32, and

    op                                         for
    _scaled_dot_product_flash_attention        float16 or bfloat16 without a mask
    _scaled_dot_product_efficient_attention    a mask, or float32; as many heads of keys as of queries
    the plain ops                              all else

The first two want four dims, and heads of one dim that is at most 256 and a multiple of 8. Those are the
conditions of PyTorch's sdp_utils.cpp for compute capability 8.0 and later. A device may have another kernel
yet, cuDNN's, which PyTorch finds out by asking it; a capture with the device at hand has that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stretto.errors import CaptureError
from stretto.ir.program import GETITEM, Op, TensorSpec
from stretto.parallelize.unseen import put_forward
from stretto.passes.layout.kernels import heads_fit

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


_ENDS = ("_loss", "cross_entropy", "_with_logits", "kl_div")
LOSSES: frozenset[Callable[..., Any]] = frozenset(
    function
    for name, function in vars(F).items()
    if name.endswith(_ENDS) and not name.startswith(("_", "linear_"))
)
"""Step 1; but for the one that is given a head's weights, whose product would be in float32, too."""
FULL: frozenset[Callable[..., Any]] = frozenset({torch.mean, torch.sum, Tensor.mean, Tensor.sum})
"""Step 2, where they are called with a tensor and nothing else."""


class PyTorchCalls(TorchFunctionMode):
    """While it is entered, `call(function, args, kwargs)` is what calls each PyTorch function."""

    def __init__(self, call: Callable[[Any, Sequence[Any], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, dict(kwargs or {}))


def losses_in_float32(function: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    """Steps 1 and 2 for a call."""
    if function in LOSSES or (function in FULL and len(args) == 1 and not named):
        args = [in_float32(one) for one in args]
        named = {key: in_float32(one) for key, one in named.items()}
    return function(*args, **named)


def in_float32(value: Any) -> Any:
    """A tensor of half precision in float32; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


# --- CUDA where there is none ------------------------------------------------------------------------------

_aten: Any = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)

MODE_MAX = 2
"""Of an embedding bag: each bag's greatest elements."""


def attention_on_cuda(function: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    """A call, for `PyTorchCalls`."""
    return (_attention if function is F.scaled_dot_product_attention else function)(*args, **named)


def _heads_fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether CUDA's kernels of attention take such heads."""
    sizes = {x.shape[-1] for x in (query, key, value)}
    return query.dim() == key.dim() == value.dim() == 4 and len(sizes) == 1 and heads_fit(max(sizes))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    flash = query.dtype in HALF and attn_mask is None
    fits = query.dtype != torch.float64 and _heads_fit(query, key, value)
    if not fits or (key.shape[1] != query.shape[1] and not flash):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if flash:
        made, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return cast(Tensor, made)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill(attn_mask.logical_not(), float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    saves = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    made, *_ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale
    )
    return cast(Tensor, made)


def with_cuda_results(ops: Iterable[Op], given: Mapping[str, TensorSpec]) -> Iterator[Op]:
    """The ops, with results as CUDA's kernels make them where those of a CPU differ: statistics of layer
    norms in float32, of batch norm in evaluation, what an embedding bag keeps. given: specs of inputs."""
    specs: dict[str, TensorSpec | None] = dict(given)
    changed: dict[str, tuple[TensorSpec | None, ...]] = {}
    for op in ops:
        result, *kept = op.outputs
        if op.target == "aten.native_layer_norm.default":
            changed[op.name] = (result, *map(_float32, kept))
        elif op.target == "aten._native_batch_norm_legit_no_training.default" and result is not None:
            changed[op.name] = (result, *(_shaped(spec, result.shape[1:2]) for spec in kept))
        elif op.target.startswith("aten._embedding_bag") and len(kept) == 3:
            ids = specs[op.args[1].name]
            largest = kept[2] if MODE_MAX in op.args[4:5] else _shaped(kept[2], (0,))
            changed[op.name] = (result, ids and _shaped(kept[0], ids.shape), kept[1], largest)
        elif op.target == GETITEM and op.args[0].name in changed:
            changed[op.name] = (changed[op.args[0].name][op.args[1]],)
        if op.name in changed:
            op = replace(op, outputs=changed[op.name])
        if len(op.outputs) == 1:
            specs[op.name] = op.outputs[0]
        yield op


def _shaped(spec: TensorSpec | None, shape: tuple[int, ...]) -> TensorSpec | None:
    return None if spec is None else replace(spec, shape=shape)


def _float32(spec: TensorSpec | None) -> TensorSpec | None:
    half = spec is not None and spec.dtype in ("bfloat16", "float16")
    return replace(spec, dtype="float32") if half and spec is not None else spec
