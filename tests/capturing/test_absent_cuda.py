"""Capture for CUDA on a machine without it: the ops are CUDA's, and what they compute is the model."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stretto
from stretto.capturing.graph import Traced
from stretto.capturing.substitutes import PyTorchCalls, attention_on_cuda
from stretto.capturing.trace import trace
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from tests.clusters import cores

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is CUDA: its own choices are captured"
)

FLASH = "aten._scaled_dot_product_flash_attention.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"


def gpt(heads: int = 2) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=32, layers=2, hidden=32, heads=heads, context=16))


@functools.cache
def traced(heads: int, dtype: torch.dtype | None) -> Traced:
    batch = torch.empty((4, 17), dtype=torch.int64, device="meta")
    return trace(gpt(heads), batch, next_token_loss, microbatches=2, param_dtype=dtype, device="cuda")


def targets(found: Traced) -> list[str]:
    return [op.target for op, _ in found.program.ops]


def test_half_precision_without_a_mask_takes_flash_attention_forward_and_backward() -> None:
    found = traced(2, torch.bfloat16)
    assert found.job.device == "cuda"
    assert targets(found).count(FLASH) == 2
    assert targets(found).count(FLASH.replace(".default", "_backward.default")) == 2
    (spec,) = {op.outputs[0] for op, _ in found.program.ops if op.target == FLASH}
    assert spec is not None
    assert spec.shape == (2, 2, 16, 16)
    assert all(op.flops > 0 for op, _ in found.program.ops if "flash_attention" in op.target)


@pytest.mark.parametrize(
    ("heads", "dtype", "target"),
    [(2, None, EFFICIENT), (8, torch.bfloat16, "aten._safe_softmax.default")],  # dim 4: no multiple of 8
)
def test_float32_and_odd_heads_take_other_kernels(heads: int, dtype: torch.dtype | None, target: str) -> None:
    found = targets(traced(heads, dtype))
    assert found.count(target) == 2
    assert FLASH not in found


def test_a_mask_takes_the_memory_efficient_kernel_which_adds_it() -> None:
    query, key = torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 16)
    mask = torch.rand(8, 8) < 0.7
    mask[:, 0] = True
    seen: list[tuple[str, Tensor]] = []

    class Note(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "efficient" in str(func):
                seen.append((str(func), args[3]))
                raise InterruptedError
            return func(*args, **(kwargs or {}))

    with pytest.raises(InterruptedError), PyTorchCalls(attention_on_cuda), Note():
        F.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    ((name, added),) = seen
    assert name == EFFICIENT
    assert added.shape == (2, 3, 8, 8)
    plain = (query @ key.mT / 4.0 + added).softmax(-1) @ key
    torch.testing.assert_close(plain, F.scaled_dot_product_attention(query, key, key, attn_mask=mask))


def test_layer_norms_keep_their_statistics_in_float32() -> None:
    found = traced(2, torch.bfloat16)
    ops = [op for op, _ in found.program.ops]
    norms = {op.name: op for op in ops if op.target == "aten.native_layer_norm.default"}
    parts = [op for op in ops if op.target == "getitem" and op.args[0].name in norms]
    full = {s.dtype for op in norms.values() for s in op.outputs[1:] if s is not None}
    taken = {op.outputs[0].dtype for op in parts if op.args[1] > 0 and op.outputs[0] is not None}
    assert {op.outputs[0].dtype for op in parts if op.args[1] == 0 and op.outputs[0]} == {"bfloat16"}
    assert full == taken == {"float32"}


def test_grouped_queries_repeat_their_keys() -> None:
    query, key = torch.randn(1, 4, 8, 4), torch.randn(1, 2, 8, 4)
    expected = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    with PyTorchCalls(attention_on_cuda):  # heads of 4 are plain ops
        found = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected)


def test_a_job_for_cuda_is_planned_without_it() -> None:
    batch = torch.empty((8, 17), dtype=torch.int64, device="meta")
    job = stretto.capture(
        gpt(),
        batch,
        next_token_loss,
        stretto.Parallel(pp=2, tp=2, microbatches=4),
        precision="bf16",
        device="cuda",
    )
    assert job.device == "cuda"
    assert stretto.plan(job, cores(latency_us=1.0), order="list").prediction is not None
