"""Tokens to experts and back: rows are brought to the experts that were chosen, and their results are
weighed.

    within_capacity    each expert has a fixed number of slots. First choices are served before second ones,
                       earlier tokens before later (GShard, arXiv 2006.16668; DeepSpeed-MoE); what finds no
                       slot is dropped, and adds nothing to its token.
    dropless           every choice is served: rows are sorted by expert (MegaBlocks, arXiv 2211.15841).

Shapes depend on no values. Dims of tensors, as suffixes:
  N tokens   K choices of a token   D hidden   E experts   C slots of an expert   R rows, N x K of them
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.backend.observe_adapter import observe
from stretto.ir.metrics import DROPPED, ROWS

OfSlots = Callable[[Tensor], Tensor]
"""(E, C, D) to (E, C, D): each expert's slots."""

OfRows = Callable[[Tensor, Tensor], Tensor]
"""Rows (R, D) that are sorted by expert, and the number of each expert's (E,), to (R, D). Rows beyond their
sum belong to none, and their results are not used."""


def counts_of(chosen: Tensor, experts: int) -> Tensor:
    """How many choices each of `experts` has: (E,) integers."""
    return F.one_hot(chosen.flatten(), experts).sum(dim=0)


def within_capacity(
    x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, experts: int, slots: int, of_slots: OfSlots
) -> Tensor:
    """(N, D): the weighed results of each token's experts, of which each has so many slots."""
    (N, D), K, E, C = x_ND.shape, chosen_NK.shape[1], experts, slots
    # Rows in the order in which they are served: all first choices, then all second ones.
    chosen_R = chosen_NK.t().flatten()
    taken_RE = F.one_hot(chosen_R, E)
    so_far_RE = taken_RE.cumsum(dim=0)
    at_R = ((so_far_RE - 1) * taken_RE).sum(dim=1)
    observe(ROWS, so_far_RE[-1])
    observe(DROPPED, (so_far_RE[-1] - C).clamp(min=0))
    # A row's slot among all; one more, behind them, is where dropped rows go.
    slot_R = torch.where(at_R < C, chosen_R * C + at_R, E * C)
    token_R = torch.arange(N, device=x_ND.device).repeat(K)
    token_of_slot = torch.full((E * C + 1,), N, device=x_ND.device).scatter(0, slot_R, token_R)[:-1]
    y_ECD = of_slots(with_nothing(x_ND)[token_of_slot].view(E, C, D))
    y_KND = with_nothing(y_ECD.reshape(E * C, -1))[slot_R].view(K, N, -1)
    return (y_KND * weights_NK.t().unsqueeze(-1)).sum(dim=0)


def dropless(x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, experts: int, of_rows: OfRows) -> Tensor:
    """(N, D): the weighed results of each token's experts, all of which are served."""
    N, K = chosen_NK.shape
    chosen_R = chosen_NK.flatten()
    order_R = chosen_R.argsort(stable=True)
    counts_E = counts_of(chosen_R, experts)
    observe(ROWS, counts_E)
    y_RD = of_rows(x_ND[order_R // K], counts_E)
    y_NKD = y_RD[order_R.argsort()].view(N, K, -1)
    return (y_NKD * weights_NK.unsqueeze(-1)).sum(dim=1)


def with_nothing(x_RD: Tensor) -> Tensor:
    """One row of zeros behind the others: what is read where there is nothing."""
    return torch.cat((x_RD, x_RD.new_zeros(1, x_RD.shape[1])))
