"""Our own ops on an accelerator."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from stretto.backend import grouped_adapter

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_grouped_products(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ends = torch.tensor([5, 5, 21, 24], device="cuda")
    x = torch.randn(32, 48, device="cuda", dtype=dtype, requires_grad=True)
    w = torch.randn(4, 48, 64, device="cuda", dtype=dtype, requires_grad=True)
    made = grouped_adapter.grouped_mm(x, w, ends)
    g = torch.randn_like(made)
    made.backward(g)
    got = made.detach(), x.grad, w.grad
    x2, w2 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    parts = x2[:24].split([5, 0, 16, 3])
    want = torch.cat([part @ w2[k] for k, part in enumerate(parts)] + [x2.new_zeros(8, 64)])
    want.backward(g.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for one, other in zip(got, (want.detach(), x2.grad, w2.grad), strict=True):
        assert one is not None
        assert other is not None
        assert (one.double() - other).norm() <= tolerance * other.norm()


def test_an_overflow_ends_the_process() -> None:
    code = (
        "import torch; from stretto.backend.grouped_adapter import within;"
        "within(torch.tensor([5, 1], device='cuda'), 4, 2.0); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    print(done.stderr[-1500:])
