"""Tokens to experts and back: rows are brought to the chosen experts, and their results are weighed.

    within_capacity    each expert has a fixed number of slots. First choices are served before second ones,
                       earlier tokens before later (GShard, arXiv 2006.16668; DeepSpeed-MoE); what finds no
                       slot is dropped, and adds nothing to its token.
    dropless           every choice is served: rows are sorted by expert (MegaBlocks, arXiv 2211.15841).

Shapes depend on no values. Rows are only ever gathered, in the backward too, where PyTorch would add them one
by one to where they came from. Results are of the tokens' dtype. Dims of tensors, as suffixes:
  N tokens   K choices of a token   D hidden   E experts   C slots of an expert   R rows, N x K of them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.backend.observe_adapter import observe
from stretto.ir.metrics import DROPPED, ROWS

OfSlots = Callable[[Tensor], Tensor]
"""(E, C, D) to (E, C, D): each expert's slots."""

OfRows = Callable[..., Tensor]
"""Rows (R, D) that are sorted by expert, the number of each expert's (E,), and the rows' weights (R, 1) where
these are used inside, to (R, D). Rows beyond the numbers' sum belong to none; their results are not used."""


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
    counts_E = counts_of(chosen_R, E)
    observe(ROWS, counts_E)
    observe(DROPPED, (counts_E - C).clamp(min=0))
    first_E = counts_E.cumsum(dim=0) - counts_E
    at_R = inverse(chosen_R.argsort(stable=True)) - first_E[chosen_R]
    # A row's slot among all; one more, behind them, is where dropped rows go.
    slot_R = torch.where(at_R < C, chosen_R * C + at_R, E * C)
    row_R = torch.arange(N * K, device=x_ND.device)
    row_of_slot = torch.full((E * C + 1,), N * K, device=x_ND.device).scatter(0, slot_R, row_R)[:-1]
    token_of_slot = torch.where(row_of_slot < N * K, row_of_slot % N, N)
    y_ECD = of_slots(rows_at(x_ND, token_of_slot, slot_R.view(K, N)).view(E, C, D))
    y_KND = rows_at(y_ECD.reshape(E * C, -1), slot_R, row_of_slot.unsqueeze(0)).view(K, N, -1)
    return (y_KND * weights_NK.t().unsqueeze(-1)).sum(dim=0).to(x_ND.dtype)


def dropless(
    x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, experts: int, of_rows: OfRows, inside: bool = False
) -> Tensor:
    """(N, D): the weighed results of each token's experts, all of which are served. inside: `of_rows` gets
    the weights too, and applies them itself."""
    N, K = chosen_NK.shape
    chosen_R = chosen_NK.flatten()
    order_R = chosen_R.argsort(stable=True)
    place_R = inverse(order_R)
    x_RD = rows_at(x_ND, order_R // K, place_R.view(N, K).t())
    counts_E = counts_of(chosen_R, experts)
    observe(ROWS, counts_E)
    place_1R = order_R.unsqueeze(0)
    given = (rows_at(weights_NK.reshape(-1, 1), order_R, place_R.unsqueeze(0)),) if inside else ()
    y_NKD = rows_at(of_rows(x_RD, counts_E, *given), place_R, place_1R).view(N, K, -1)
    return (y_NKD if inside else y_NKD * weights_NK.unsqueeze(-1)).sum(dim=1).to(x_ND.dtype)


def rows_at(x_RD: Tensor, at_S: Tensor, back_MR: Tensor) -> Tensor:
    """(S, D): the rows of x at `at_S`, zeros at R. back_MR: for each row of x the M places where it went, S
    for none."""
    made: Tensor = _RowsAt.apply(x_RD, at_S, back_MR)  # type: ignore[no-untyped-call]
    return made


class _RowsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, at_S: Tensor, back_MR: Tensor) -> Tensor:
        ctx.save_for_backward(back_MR)
        return with_nothing(x_RD)[at_S]

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> Any:
        (back_MR,) = ctx.saved_tensors
        places, rows = back_MR.shape
        went = with_nothing(grad_SD)[back_MR.reshape(-1)]
        return went.view(places, rows, -1).sum(dim=0) if places > 1 else went, None, None


def inverse(order_R: Tensor) -> Tensor:
    """Where each row went that is now in this order."""
    rows = torch.arange(order_R.shape[0], device=order_R.device)
    return torch.empty_like(order_R).scatter(0, order_R, rows)


def with_nothing(x_RD: Tensor) -> Tensor:
    """One row of zeros behind the others: what is read where there is nothing."""
    return torch.cat((x_RD, x_RD.new_zeros(1, x_RD.shape[1])))
