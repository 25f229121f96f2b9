"""Attention kernels that return the log-sum-exp of their rows: what each has of its own beside its schema.

Arguments go by the names that PyTorch's schemas give them, and these are nearly the same for all kernels.
CUDA's flash attention takes `is_causal` from the lower right (FlashAttention 2.1 and later): the last query
sees all keys, however few queries there are. Others take it from the upper left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.backend.dispatch_adapter import named, overload, positional
from stretto.ir.program import Arg, Op, Ref

SHARED_OP, OVER = "layout.aten.", "over"
"""Attention that members of an axis share, until `context_steps`: how its target begins, and its keyword."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """mask: the argument's name; "" where the kernel takes none. state: the results by which it has drawn.
    lse_multiple: to what number of rows the kernel pads the log-sum-exp; lse_dims: of how many dims it is."""

    mask: str = ""
    state: tuple[int, ...] = ()
    lse_multiple: int = 1
    lse_dims: int = 3


ON_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"
FLASH = "aten._scaled_dot_product_flash_attention.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"
CUDNN = "aten._scaled_dot_product_cudnn_attention.default"

KERNELS = {
    ON_CPU: Kernel("attn_mask"),
    FLASH: Kernel(state=(6, 7)),
    EFFICIENT: Kernel("attn_bias", (2, 3), lse_multiple=32),  # kernel_forward.h
    CUDNN: Kernel("attn_bias", (6, 7), lse_dims=4),
}

MAX_HEAD_DIM = 256
"""Flash attention's largest head (Dao 2023, arXiv 2307.08691; sdp_utils.cpp)."""

ALIGNED_BYTES = 16
"""To which rows of a mask, and heads, are aligned for CUDA's kernels (sdp_utils.cpp, attention.cpp)."""


def backward_of(kernel: str) -> str:
    return kernel.replace(".default", "_backward.default")


BACKWARDS = {backward_of(kernel): kernel for kernel in KERNELS}


def kernel_of(op: Op) -> str:
    """The kernel of an attention, or of its backward, shared or not."""
    target = op.target.removeprefix("layout.")
    return BACKWARDS.get(target, target)


def arguments(op: Op) -> dict[str, Any]:
    """What attention is given, by the names of the kernel's arguments."""
    function = overload(op.target.removeprefix("layout."))
    assert function is not None
    found = named(function, op.args, dict(op.kwargs))
    found.pop(OVER, None)
    return found


def call(target: str, given: Mapping[str, Arg]) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """Arguments of a kernel, or of its backward, by position and by keyword; others are left out."""
    function = overload(target)
    assert function is not None
    return positional(function, given)


def mask_of(op: Op) -> str | None:
    mask = arguments(op).get(KERNELS[kernel_of(op)].mask)
    return mask.name if isinstance(mask, Ref) else None


def gradient_of(given: Mapping[str, Any]) -> str:
    """What a backward is given. Kernels call it by two names."""
    gradient: str = (given["grad_out"] if "grad_out" in given else given["grad_out_"]).name
    return gradient


def heads_fit(size: int) -> bool:
    """Whether CUDA's kernels take heads of this size, of two-byte elements or wider."""
    return size <= MAX_HEAD_DIM and size % (ALIGNED_BYTES // 2) == 0
