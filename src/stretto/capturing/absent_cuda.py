"""Capture for CUDA where there is no CUDA: the choices that PyTorch makes by looking at the device.

Tensors stay fake CPU tensors (a PyTorch without CUDA has no autograd for others). What PyTorch would choose
otherwise on CUDA is chosen here. Attention, `scaled_dot_product_attention`:

    op                                         for
    _scaled_dot_product_flash_attention        float16 or bfloat16 without a mask
    _scaled_dot_product_efficient_attention    a mask, or float32
    the plain ops                              all else

The first two want four dims, and heads of one dim in query, key and value that is at most 256 and a multiple
of 8; the second also as many heads of keys as of queries. Those are the conditions of PyTorch's sdp_utils.cpp
for compute capability 8.0 and later (A100, H100, H200, B200). A device may have another kernel yet, cuDNN's,
which PyTorch finds out by asking it (an H100 takes it for all of half precision); a capture with the device
at hand holds that one. Layer norms keep mean and deviation in float32, as CUDA's kernels do. A model that
asks for the type of its tensors' device is told "cpu"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stretto.ir.program import GETITEM, Op, TensorSpec
from stretto.parallelize.lower_right_adapter import HALF, heads_fit

_aten: Any = torch.ops.aten

MODE_MAX = 2
"""Of an embedding bag: each bag's greatest elements."""


class CudaChoices(TorchFunctionMode):
    """While it is entered, attention is that of CUDA."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        return _attention(*args, **given) if func is F.scaled_dot_product_attention else func(*args, **given)


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
    fits = query.dtype != torch.float64 and heads_fit(query, key, value)
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
