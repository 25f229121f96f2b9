"""Compute that stands for a step's while transports are measured: products that read as a step does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch

SIDE = {"cpu": 192, "cuda": 4096}
"""Rows and columns of the products: short on a processor, so that the end of a collective is seen soon;
large enough to fill an accelerator."""

WEIGHTS_BYTES = 16 * 2**20
"""The products on a processor read as many bytes in turn, as a step reads weights: what a transport copies
takes caches and memory from them, and what they read takes caches from the transport; products of one small
matrix would notice neither. Assumed."""


def products_on(device: torch.device) -> Callable[[], None]:
    """A function that computes one product; call it under `no_grad`."""
    side = SIDE.get(device.type, SIDE["cuda"])
    count = WEIGHTS_BYTES // (4 * side * side) if device.type == "cpu" else 1
    factors = cycle([torch.full((side, side), 0.01, device=device) for _ in range(count)])
    product = torch.empty((side, side), device=device)

    def compute() -> None:
        factor = next(factors)
        torch.mm(factor, factor, out=product)

    return compute
