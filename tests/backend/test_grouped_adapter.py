"""Products of groups of rows, and the check of room: both ways that there are, on a processor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from stretto.backend import grouped_adapter as adapter
from stretto.errors import UsageError
from stretto.models.dispatch import dropless, within_capacity

ENDS = {
    "uneven": [1, 1, 6, 8],
    "rows behind": [2, 3, 3, 5],
    "none": [0, 0, 0, 0],
    "one has all": [0, 8, 8, 8],
}


def plain(x: Tensor, w: Tensor, ends: list[int]) -> Tensor:
    rows = torch.arange(x.shape[0])
    made = x.new_zeros(x.shape[0], w.shape[2])
    for e, (start, end) in enumerate(zip([0, *ends], ends)):
        made = made + ((rows >= start) & (rows < end)).to(x.dtype)[:, None] * (x @ w[e])
    return made


@pytest.mark.parametrize("name", ENDS)
def test_products_and_their_gradients(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 5, dtype=torch.float64)
    made = adapter.grouped_mm(x, w, torch.tensor(ENDS[name]))
    want = plain(x, w, ENDS[name])
    assert torch.allclose(made, want, rtol=1e-12)
    for one, other in zip(
        *(torch.autograd.grad((y * weight).sum(), (x, w)) for y in (made, want)), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("name", ENDS)
def test_the_one_kernel_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator's way in bfloat16, which a processor has too."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 16).bfloat16(), torch.randn(4, 16, 24).bfloat16()
    y = torch.randn(8, 24).bfloat16()
    ends = torch.tensor(ENDS[name])
    want = adapter._mm(x, w, ends), adapter._mm_t(x, y, ends)
    monkeypatch.setattr(adapter, "_one_kernel", lambda _: True)
    found = adapter._mm(x, w, ends), adapter._mm_t(x, y, ends)
    for one, other in zip(found, want, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2)


def test_what_no_graph_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert adapter._bounds(torch.tensor([1, 3])) == [(0, 1), (1, 3)]
    with pytest.raises(UsageError, match=r"cuda_graph=True .* \(precision = 'bf16'\)"):
        adapter._bounds(SimpleNamespace(is_cuda=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["dropless", "capacity"])
def test_results_are_of_the_tokens_dtype(kind: str) -> None:
    """Routers of `transformers` give weights in float32 to tokens in bfloat16."""
    x, chosen, weights = torch.randn(6, 4).bfloat16(), torch.zeros(6, 2, dtype=torch.int64), torch.rand(6, 2)
    if kind == "dropless":
        made = dropless(x, chosen, weights, 3, lambda rows, _: rows)
    else:
        made = within_capacity(x, chosen, weights, 3, 12, lambda slots: slots)
    assert made.dtype == torch.bfloat16
    assert torch.allclose(made.float(), x.float() * weights.sum(1, keepdim=True), rtol=2e-2)
