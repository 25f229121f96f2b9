"""Masks that are causal are left to attention's kernel, and no others; a captured model calls what the plain
one calls."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stretto
from stretto.capturing.trace import trace
from stretto.errors import CaptureError
from stretto.ir.program import Op
from tests.cells import but, slow
from tests.clusters import cores
from tests.parallelize.equality import assert_plan_is_plain
from tests.runtime import equality
from tests.runtime.equality import (
    VOCAB,
    assert_equal,
    from_transformers,
    huggingface_loss,
    job_of,
    lowered,
    plain,
    run,
    tokens,
)

library: Any = torch.library.Library("of_test_masks", "DEF")  # type: ignore[no-untyped-call]
library.define("fill(Tensor(a!) mask) -> ()")
torch.library.register_fake("of_test_masks::fill", lambda mask: None, lib=library)

SMALL = {**equality.SMALL, "num_hidden_layers": 2}
KERNEL = "aten._scaled_dot_product_flash_attention_for_cpu.default"
SLOW = pytest.mark.slow
T = 7

Call = tuple[bool, bool]
"""A call of the kernel: whether it is causal, whether it has a mask."""
CAUSAL, PLAIN, MASKED = (True, False), (False, False), (False, True)


class _Noted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if str(func) == KERNEL:
            self.calls.append((len(args) > 4 and args[4], named.get("attn_mask") is not None))
        return func(*args, **named)


def calls_of(ops: Iterable[Op]) -> list[Call]:
    kernels = [op for op in ops if op.target == KERNEL]
    return [
        (len(op.args) > 4 and op.args[4] is True, dict(op.kwargs).get("attn_mask") is not None)
        for op in kernels
    ]


def traced_calls(model: nn.Module, batch: Any, loss: Any) -> list[Call]:
    return calls_of(op for op, _ in trace(model, batch, loss).program.ops)


def assert_numbers(model: nn.Module, batch: Any, loss: Any) -> None:
    job = job_of(trace(model, batch, loss, microbatches=2), 2, 2)
    assert_equal(run(lowered(job, "zb-h1"), model, batch), plain(model, batch, loss), 1e-5)


# --- models of transformers --------------------------------------------------------------------------------

GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SMALL,
    "Qwen3ForCausalLM": {**SMALL, "head_dim": 8},
    "MixtralForCausalLM": {**SMALL, **MIXTRAL},
    "GPT2LMHeadModel": {**GPT2, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "MistralForCausalLM": {**SMALL, "sliding_window": 16},
}
LEAN = [("LlamaForCausalLM", False), ("GPT2LMHeadModel", True)]


def ids_of(rows: int = 4) -> dict[str, Tensor]:
    ids = tokens(rows)
    return {"input_ids": ids, "labels": ids.clone()}


def without_cache(model: nn.Module, batch: Any, cache: bool = False) -> Tensor:
    return model(**batch, use_cache=cache).loss


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pytest.param(name, cache, marks=() if (name, cache) in LEAN else SLOW)
        for name in MODELS
        for cache in (False, True)
    ],
)
def test_models_of_transformers_call_the_kernel_that_they_call_in_training(name: str, cache: bool) -> None:
    model, batch = from_transformers(name, **MODELS[name]), ids_of(2)
    found = traced_calls(model, batch, lambda m, mb: without_cache(m, mb, cache))
    with _Noted() as noted:
        without_cache(model, batch, cache)
    assert found == noted.calls == [CAUSAL] * 2


PADDED = torch.ones(4, T, dtype=torch.int64).index_fill(1, torch.tensor([5, 6]), 0)
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2]]).expand(4, T)


@pytest.mark.parametrize(
    ("name", "config", "more", "numbers"),
    [
        ("LlamaForCausalLM", {}, {"attention_mask": PADDED}, False),
        slow("LlamaForCausalLM", {}, {"attention_mask": PADDED}, True),
        slow("LlamaForCausalLM", {}, {"position_ids": PACKED}, True),
        slow("MistralForCausalLM", {"sliding_window": 4}, {}, True),
    ],
    ids=["padding", "numbers of padding", "packed", "window"],
)
def test_masks_of_transformers_that_hide_more_stay(
    name: str, config: dict[str, Any], more: dict[str, Tensor], numbers: bool
) -> None:
    """Numbers beside padding are those of `test_huggingface`, too."""
    model, batch = from_transformers(name, **{**SMALL, **config}), {**ids_of(), **more}
    assert traced_calls(model, batch, without_cache) == [MASKED] * 2
    if numbers:
        assert_numbers(model, batch, without_cache)


# --- masks made by hand ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.qkv, self.out, self.mask = nn.Linear(8, 24), nn.Linear(8, 8), mask

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        own = self.mask(x) if mask is None else mask
        made = F.scaled_dot_product_attention(q, k, v, own)
        return x + self.out(made.transpose(1, 2).flatten(2))


class Hand(nn.Module):
    """Masks are made in the layer, by `mask`, or once, by `masks`: one for each of six layers."""

    kept: Tensor | None = None

    def __init__(self, mask: Callable[[Tensor], Any], masks: Any = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(Block(mask) for _ in range(1 if masks is None else 6))
        self.register_buffer("table", _causal())
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        masks = [None] if self.masks is None else self.masks(self, x)
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(x, mask)
        return x


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def _causal() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


def _window(x: Tensor, width: int = T - 1) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device)
    return (at <= at[:, None]) & (at > at[:, None] - width)


def _biased(x: Tensor) -> Tensor:
    at = torch.arange(T)
    return (at - at[:, None]).float().masked_fill(at > at[:, None], -torch.inf)


def _lowest(x: Tensor) -> Tensor:
    mask = torch.zeros(T, T, dtype=x.dtype)
    return mask.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), torch.finfo(x.dtype).min)


def _row_by_row(x: Tensor) -> Tensor:
    mask = torch.zeros(T, T, dtype=torch.bool)
    mask[:] = torch.tril(torch.ones_like(x[0, 0, 0].expand(T, T))).bool()
    return mask


def _written(write: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    """A causal mask to which is written."""

    def made(x: Tensor) -> Tensor:
        mask = _causal()
        write(mask, x)
        return mask

    return made


def _written_through_data_of_a_view(x: Tensor) -> Tensor:
    mask = _causal()
    view = mask.view(1, 1, T, T)
    mask.data.fill_(True)
    return view


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], Call]] = {
    "filled": (lambda x: torch.full((T, T), -torch.inf, device=x.device).triu_(1), CAUSAL),
    "lowest": (_lowest, CAUSAL),
    "expanded": (lambda x: _causal()[None, None].expand(x.shape[0], 1, T, T), CAUSAL),
    "row by row": (_row_by_row, CAUSAL),
    "wide window": (lambda x: _window(x, T), CAUSAL),
    "log": (lambda x: torch.tril(torch.ones(T, T)).to(x.device).log(), CAUSAL),
    "PyTorch's": (lambda x: nn.Transformer.generate_square_subsequent_mask(T), CAUSAL),
    "nothing hidden": (lambda x: torch.zeros(T, T), PLAIN),
    "one more": (_written(lambda mask, x: mask.__setitem__((2, 5), True)), MASKED),
    "through a view": (_written(lambda mask, x: mask[3].fill_(True)), MASKED),
    "through data": (_written(lambda mask, x: mask.data.fill_(True)), MASKED),
    "through data of a view": (_written_through_data_of_a_view, MASKED),
    "of the batch": (lambda x: _causal() & (x[:, None, None, :, 0] < 100.0), MASKED),
    "written by the batch": (_written(lambda m, x: m.masked_fill_(x[0, :, 0].isnan(), True)), MASKED),
    "window": (_window, MASKED),
    "biased": (_biased, MASKED),
    "one wider": (lambda x: torch.ones(T, T, dtype=torch.bool).tril(1), MASKED),
    "low": (lambda x: torch.full((T, T), -100.0).triu(1), MASKED),
    "drawn": (lambda x: (torch.rand(T, T) < 2.0).tril(), MASKED),
}


LIKE_OTHERS = ("expanded", "row by row", "log", "through a view", "through data", "one wider", "low")
"""These are recognised, or not, as others are."""


@pytest.mark.parametrize("name", but(MASKS, LIKE_OTHERS))
def test_masks_made_by_hand(name: str) -> None:
    make, expected = MASKS[name]
    model, x = Hand(make), torch.randn(4, T, 8)
    ops = [op for op, _ in trace(model, x, square, microbatches=2).program.ops]
    assert calls_of(ops) == [expected]
    assert expected == MASKED or not [op for op in ops if "tril" in op.target or "arange" in op.target]
    if name in ("lowest", "through data of a view", "window"):
        assert_numbers(model, x, square)


def _kept(model: Hand, x: Tensor) -> list[Tensor]:
    if model.kept is None:
        model.kept = _window(x, T)
    return [model.kept] * 6


ONCE: dict[str, tuple[Callable[[Any, Tensor], list[Tensor]], list[Call]]] = {
    "one for all layers": (lambda model, x: [_window(x, T)] * 6, [CAUSAL] * 6),
    "others for equal layers": (
        lambda model, x: [_window(x, T)] * 3 + [_window(x)] * 3,
        [CAUSAL] * 3 + [MASKED] * 3,
    ),
    "kept by the first call": (_kept, [CAUSAL] * 6),
    "a buffer, which can be loaded": (lambda model, x: [model.table] * 6, [MASKED] * 6),
}


@pytest.mark.parametrize("name", but(ONCE, ["one for all layers"]))
def test_masks_made_once(name: str) -> None:
    make, expected = ONCE[name]
    model, x = Hand(_window, make), torch.randn(4, T, 8)
    assert traced_calls(model, x, square) == expected
    assert model.kept is None
    if name == "others for equal layers":
        assert_numbers(model, x, square)


@pytest.mark.parametrize("name", ["fill", slow("fill.default")])
def test_a_mask_that_an_op_of_another_library_writes_is_not_known(name: str) -> None:
    """What writes to it cannot be captured, and is not left out because nothing reads it."""
    fill: Any = torch.ops.of_test_masks.fill
    write = fill if name == "fill" else fill.default
    with pytest.raises(CaptureError, match=r"of_test_masks\.fill"):
        trace(Hand(_written(lambda mask, x: write(mask))), torch.randn(2, T, 8), square)


def test_queries_of_another_length_than_keys_keep_their_mask() -> None:
    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = x[:, None]
            return F.scaled_dot_product_attention(super().forward(y[..., -3:, :]), y, y, _causal()[-3:])

    assert traced_calls(Last(8, 8), torch.randn(2, T, 8), square) == [MASKED]


# --- layouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "sequence_parallel": True},
        pytest.param({"tp": 4, "sequence_parallel": True, "pp": 2, "recompute": "full"}, marks=SLOW),
        pytest.param({"pp": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b"}, marks=SLOW),
    ],
    ids=str,
)
def test_layouts_keep_the_kernel(layout: dict[str, Any]) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32}
    sizes["num_hidden_layers"] = 4 if "pp" in layout else 2
    sizes |= {"vocab_size": 64, "intermediate_size": 48}
    model = from_transformers("LlamaForCausalLM", **{**SMALL, **sizes}).double()
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    job = stretto.capture(model, batch, huggingface_loss, stretto.Parallel(microbatches=2, **layout))
    assert set(calls_of(op for s in job.stages for ops in s.ops.values() for op in ops)) == {CAUSAL}
    plan = lowered(job, layout.get("schedule", "1f1b"))
    assert_plan_is_plain(plan, model, huggingface_loss, batch)


def test_chunks_of_a_sequence_read_the_keys_that_they_may_see() -> None:
    model = from_transformers("LlamaForCausalLM", **{**SMALL, "num_hidden_layers": 1})
    ids = tokens(4, columns=8)
    batch, parallel = {"input_ids": ids, "labels": ids}, stretto.Parallel(microbatches=2, ampipe_degree=2)
    job = stretto.capture(model, batch, huggingface_loss, parallel)
    every = [op for s in job.stages for ops in s.ops.values() for op in ops]
    specs: dict[str, Any] = {op.name: op.outputs[0] for op in every}
    lengths = Counter(specs[op.args[1].name].shape[-2] for op in every if op.target == KERNEL)
    assert lengths == {4: 1, 8: 1}
    found = run(stretto.plan(job, cores(), order="list"), model, batch)
    assert_equal(found, plain(copy.deepcopy(model), batch, huggingface_loss), 1e-5)
