"""What is captured for CUDA without CUDA is what is captured on it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from stretto.capturing.graph import Traced
from stretto.capturing.trace import trace
from stretto.models.gpt import next_token_sum
from stretto.models.moe import moe_token_sum
from tests.gpu.test_numbers import CONTEXT, gpt, moe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gpt", "dropless", "capacity"])
def test_the_ops_are_the_same(monkeypatch: Any, dtype: torch.dtype, kind: str) -> None:
    model, loss = {
        "gpt": (gpt, next_token_sum),
        "dropless": (lambda: moe(None), moe_token_sum),
        "capacity": (lambda: moe(1.0), moe_token_sum),
    }[kind]
    here = model().to("cuda", dtype)
    batch = torch.zeros(4, CONTEXT + 1, dtype=torch.int64)
    found = trace(here, batch.cuda(), loss, microbatches=2, device="cuda")
    with torch.device("meta"):
        empty = model().to(dtype)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    absent = trace(empty, batch.to("meta"), loss, microbatches=2, device="cuda")
    # Which of its kernels of attention a device takes, PyTorch finds out by asking it.
    one, other = (
        Counter(op.target.replace("_cudnn_", "_flash_") for op, _ in of.program.ops) for of in (found, absent)
    )
    assert one - other == other - one == Counter(), (one - other, other - one)
    assert made_by(found) == made_by(absent)


def made_by(traced: Traced) -> list[list[tuple[tuple[int, ...], str] | None]]:
    """Shapes and dtypes of what each op makes, but for what a kernel of attention keeps for its backward."""
    ops = [op for op, _ in traced.program.ops]
    kernels = {op.name for op in ops if "scaled_dot_product" in op.target}
    own = [op for op in ops if not kernels & {op.name, *op.uses}]
    return [[spec and (spec.shape, spec.dtype) for spec in op.outputs] for op in own]
