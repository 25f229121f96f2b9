"""Matrix products, plain or of a batch, that are added where their sum is kept, while they are multiplied."""

from __future__ import annotations

import torch


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(N, K) and (K, M) to (N, M), or (B, N, K) and (B, K, M) to (B, N, M)."""
    return torch.mm(left, right) if left.dim() == 2 else torch.bmm(left, right)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`total`, to which the product is added: BLAS reads and writes it once, and there is no other tensor."""
    added = torch.addmm if left.dim() == 2 else torch.baddbmm
    return added(total, left, right, out=total)
