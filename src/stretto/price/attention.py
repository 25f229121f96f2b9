"""Fused attention: the products that an op stands for, and what part of a product's rate its kernel reaches.

    forward    two products of queries, keys and features
    backward   five (the scores again, and four gradients: Dao et al. 2022, arXiv 2205.14135, algorithm 4)
    causal     tiles above the diagonal are passed over, tiles on it are computed whole

Kernels differ: what flash attention, cuDNN's and the memory-efficient kernel reach is a figure of the device
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from stretto.backend.dispatch_adapter import resolve
from stretto.ir.program import Op, Ref, TensorSpec
from stretto.price.efficiency import Efficiency, Matmul

BACKWARD_PRODUCTS = 5

BACKWARD_PART = 0.8
"""Rate of a backward's products over that of the forward's, in half precision. Measured on one H100, PyTorch
2.11, 16,384 tokens of 16 heads in sequences of 1,024 to 8,192: 0.76 to 0.82, of all three kernels."""

TILE = 256
"""Tokens of a tile: a causal kernel takes as long as this many more tokens that are seen. Fitted to the same:
without a mask over causal, 1.6 at 1,024 tokens, 1.9 at 8,192."""


def attention_product(op: Op, specs: Mapping[str, TensorSpec]) -> tuple[Matmul, float] | None:
    """(one product, how many of its size) of a fused attention, None for other ops."""
    if "scaled_dot_product" not in op.target:
        return None
    backward = "_backward" in op.target
    tensors = [arg.name for arg in op.args if isinstance(arg, Ref)]
    query, key = (specs[name].shape for name in (tensors[1:3] if backward else tensors[:2]))
    batch = 1
    for size in query[:-2]:
        batch *= size
    S, T = query[-2], key[-2]
    count = float(BACKWARD_PRODUCTS if backward else 2)
    # The last query sees the last key, in all kernels that take fewer queries than keys.
    seen = min(1.0, max(0.0, 1.0 - (S - TILE) / (2.0 * T))) if _is_causal(op) else 1.0
    return Matmul(S, T, query[-1], batch), count * seen


def kernel_part(op: Op, reach: Efficiency) -> float:
    """What part of a product's rate the kernel of a fused attention reaches on a device. In float32 none
    falls behind products."""
    kernels = {"_flash_": reach.flash, "_efficient_": reach.efficient, "_cudnn_": reach.cudnn}
    part = next((part for name, part in kernels.items() if name in op.target), None)
    dtype = next((spec.dtype for spec in op.outputs if spec is not None), "")
    if part is None or dtype not in ("bfloat16", "float16"):
        return 1.0
    return part * BACKWARD_PART if "_backward" in op.target else part


def _is_causal(op: Op) -> bool:
    given = dict(op.kwargs).get("is_causal")
    if given is not None:
        return bool(given)
    at = _argument(op.target, "is_causal")
    return at is not None and at < len(op.args) and op.args[at] is True


@cache
def _argument(target: str, name: str) -> int | None:
    """Where an op's schema has an argument."""
    schema = getattr(resolve(target), "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index(name) if name in names else None
