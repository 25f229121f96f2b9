"""Rows that are gathered there and back: values, gradients, and who is served within a capacity."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.models.dispatch import inverse, rows_at, with_nothing, within_capacity


def test_gradients_of_gathered_rows_are_those_of_indexing() -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    at = torch.tensor([4, 5, 0, 2, 5, 4])  # 5: nothing
    back = torch.tensor([[2, 6, 3, 6, 0], [6, 6, 6, 6, 5]])  # 6: nowhere
    g = torch.randn(6, 3, dtype=torch.float64)
    made = rows_at(x, at, back)
    (got,) = torch.autograd.grad(made, x, g)
    plain = with_nothing(x)[at]
    (want,) = torch.autograd.grad(plain, x, g)
    assert torch.equal(made, plain)
    assert torch.equal(got, want)


def test_an_order_and_its_inverse() -> None:
    order = torch.randperm(17, generator=torch.Generator().manual_seed(2))
    assert torch.equal(inverse(order), order.argsort())


def test_first_choices_and_earlier_tokens_are_served_first() -> None:
    """Two slots an expert; all tokens choose expert 1 first and expert 0 second."""
    x = torch.arange(1.0, 5.0, dtype=torch.float64).unsqueeze(1)
    chosen = torch.tensor([[1, 0]] * 4)
    weights = torch.tensor([[10.0, 1.0]] * 4, dtype=torch.float64)
    seen: list[Tensor] = []

    def of_slots(x_ECD: Tensor) -> Tensor:
        seen.append(x_ECD)
        return x_ECD

    made = within_capacity(x, chosen, weights, 3, 2, of_slots)
    assert seen[0].flatten(1).tolist() == [[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]
    assert made.flatten().tolist() == [11.0, 22.0, 0.0, 0.0]
