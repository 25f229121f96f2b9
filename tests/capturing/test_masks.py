"""Masks that are causal are left to attention's kernel, and no others; a captured model calls what the plain
one calls."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stretto
from stretto.capturing.graph import Traced
from stretto.capturing.trace import trace
from stretto.errors import CaptureError
from stretto.ir.program import Ref
from tests.clusters import cores
from tests.parallelize.equality import assert_plan_is_plain
from tests.runtime.equality import (
    SMALL,
    VOCAB,
    assert_equal,
    from_transformers,
    huggingface_loss,
    job_of,
    lowered,
    plain,
    plan_of,
    run,
    tokens,
)

library: Any = torch.library.Library("of_test_masks", "DEF")  # type: ignore[no-untyped-call]
library.define("fill(Tensor(a!) mask) -> ()")
torch.library.register_fake("of_test_masks::fill", lambda mask: None, lib=library)

KERNEL = "aten._scaled_dot_product_flash_attention_for_cpu.default"
T = 7

Call = tuple[tuple[tuple[int, ...], ...], bool, bool]
"""A call of the kernel: shapes of query, key and value, whether it is causal, whether it has a mask."""


class _Noted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if str(func) == KERNEL:
            shapes = tuple(tuple(x.shape) for x in args[:3])
            self.calls.append((shapes, len(args) > 4 and args[4], named.get("attn_mask") is not None))
        return func(*args, **named)


def calls_of(traced: Traced) -> list[Call]:
    specs = {item.op.name: item.op.outputs[0] for item in traced.ops if len(item.op.outputs) == 1}
    found = []
    for op in (item.op for item in traced.ops):
        if op.target == KERNEL:
            shapes = tuple(specs[arg.name].shape for arg in op.args if isinstance(arg, Ref))  # type: ignore[union-attr]
            named = dict(op.kwargs)
            found.append((shapes, len(op.args) > 4 and op.args[4], named.get("attn_mask") is not None))
    return found


GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, "bos_token_id": 0}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
CAUSAL: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SMALL,
    "Qwen3ForCausalLM": {**SMALL, "head_dim": 8},
    "MixtralForCausalLM": {**SMALL, **MIXTRAL},
    "GPT2LMHeadModel": {**GPT2, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "MistralForCausalLM": {**SMALL, "sliding_window": 16},
}


SLOW = pytest.mark.slow


LEAN = [("LlamaForCausalLM", False), ("GPT2LMHeadModel", True)]


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        pytest.param(name, cache, marks=() if (name, cache) in LEAN else SLOW)
        for name in CAUSAL
        for cache in (False, True)
    ],
)
def test_models_of_transformers_call_the_kernel_that_they_call_in_training(name: str, cache: bool) -> None:
    model = from_transformers(name, **CAUSAL[name])
    batch = ids_of(2)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = model(**batch, use_cache=cache).loss
        return value

    found = calls_of(trace(model, batch, loss))
    with _Noted() as noted:
        loss(model, batch)
    assert found == noted.calls
    assert {(causal, mask) for _, causal, mask in found} == {(True, False)}
    assert len(found) == 3


def without_cache(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = model(**batch, use_cache=False).loss
    return value


def ids_of(rows: int = 4) -> dict[str, Tensor]:
    ids = tokens(rows)
    return {"input_ids": ids, "labels": ids.clone()}


PADDED = torch.ones(4, T, dtype=torch.int64).index_fill(1, torch.tensor([5, 6]), 0)
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2]]).expand(4, T)


@pytest.mark.parametrize(
    ("name", "config", "more"),
    [
        pytest.param("MistralForCausalLM", {"sliding_window": 4}, {}, marks=SLOW),
        ("LlamaForCausalLM", {}, {"attention_mask": PADDED}),
        pytest.param("LlamaForCausalLM", {}, {"position_ids": PACKED}, marks=SLOW),
    ],
    ids=["window", "padding", "packed"],
)
def test_masks_of_transformers_that_hide_more_stay(
    name: str, config: dict[str, Any], more: dict[str, Tensor]
) -> None:
    model = from_transformers(name, **{**SMALL, **config})
    batch = {**ids_of(), **more}
    traced = trace(model, batch, without_cache, microbatches=2)
    assert all(mask for _, _, mask in calls_of(traced))
    found = run(plan_of(job_of(traced, 2, 2), "zb-h1"), model, batch)
    assert_equal(found, plain(model, batch, without_cache), 1e-5)


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
    """Masks made by hand: in each layer, or once for all."""

    def __init__(self, mask: Callable[[Tensor], Any], *, once: bool = False, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(Block(mask) for _ in range(layers))
        self.once = once

    def forward(self, x: Tensor) -> Tensor:
        mask = self.layers[0].mask(x) if self.once else None
        for layer in self.layers:
            x = layer(x, mask)
        return x


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def _places(x: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.arange(x.shape[1], device=x.device)
    return places[:, None], places[None, :]


def _causal() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


def _compared(x: Tensor) -> Tensor:
    rows, columns = _places(x)
    return columns <= rows


def _lowest(x: Tensor) -> Tensor:
    mask = torch.zeros(T, T, dtype=x.dtype)
    return mask.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), torch.finfo(x.dtype).min)


def _expanded(x: Tensor) -> Tensor:
    return ~torch.triu(x.new_ones(T, T, dtype=torch.bool), 1)[None, None].expand(x.shape[0], 1, T, T)


def _row_by_row(x: Tensor) -> Tensor:
    mask = torch.zeros(T, T, dtype=torch.bool)
    mask[:] = torch.tril(torch.ones_like(x[0, 0, 0].expand(T, T))).bool()
    return mask


def _window(x: Tensor, width: int = T - 1) -> Tensor:
    rows, columns = _places(x)
    return (columns <= rows) & (columns > rows - width)


CAUSAL_BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "compared": _compared,
    "filled": lambda x: torch.full((T, T), -torch.inf, device=x.device).triu_(1),
    "lowest": _lowest,
    "expanded": _expanded,
    "row by row": _row_by_row,
    "wide window": lambda x: _window(x, T),
    "log": lambda x: torch.tril(torch.ones(T, T)).to(x.device).log(),
    "PyTorch's": lambda x: nn.Transformer.generate_square_subsequent_mask(T),
}


@pytest.mark.parametrize("name", CAUSAL_BY_HAND)
def test_masks_made_by_hand_are_recognised(name: str) -> None:
    model, x = Hand(CAUSAL_BY_HAND[name], once=name in ("compared", "filled")), torch.randn(4, T, 8)
    traced = trace(model, x, square, microbatches=2)
    assert [(causal, mask) for _, causal, mask in calls_of(traced)] == [(True, False)] * 3
    assert not [item for item in traced.ops if "tril" in item.op.target or "arange" in item.op.target]
    if name in ("compared", "lowest"):
        assert_equal(run(plan_of(job_of(traced, 2, 2)), model, x), plain(model, x, square), 1e-5)


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


def _biased(x: Tensor) -> Tensor:
    rows, columns = _places(x)
    return (columns - rows).float().masked_fill(columns > rows, -torch.inf)


NOT_CAUSAL: dict[str, Callable[[Tensor], Tensor]] = {
    "one more": _written(lambda mask, x: mask.__setitem__((2, 5), True)),
    "through a view": _written(lambda mask, x: mask[3].fill_(True)),
    "through data": _written(lambda mask, x: mask.data.fill_(True)),
    "through data of a view": _written_through_data_of_a_view,
    "of the batch": lambda x: _causal() & (x[:, None, None, :, 0] < 100.0),
    "written by the batch": _written(lambda mask, x: mask.masked_fill_(x[0, :, 0].isnan(), True)),
    "window": _window,
    "biased": _biased,
    "one wider": lambda x: torch.ones(T, T, dtype=torch.bool).tril(1),
    "low": lambda x: torch.full((T, T), -100.0).triu(1),
    "drawn": lambda x: (torch.rand(T, T) < 2.0).tril(),
}


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_masks_that_are_not_exactly_causal_stay(name: str) -> None:
    model, x = Hand(NOT_CAUSAL[name]), torch.randn(4, T, 8)
    traced = trace(model, x, square, microbatches=2)
    assert [(causal, mask) for _, causal, mask in calls_of(traced)] == [(False, True)] * 3
    if name in ("through data of a view", "window"):
        assert_equal(run(plan_of(job_of(traced, 2, 2)), model, x), plain(model, x, square), 1e-5)


@pytest.mark.parametrize("name", ["fill", "fill.default"])
def test_a_mask_that_an_op_of_another_library_writes_is_not_known(name: str) -> None:
    """What writes to it cannot be captured, and is not left out because nothing reads it."""
    fill: Any = torch.ops.of_test_masks.fill

    def written(x: Tensor) -> Tensor:
        mask = _causal()
        (fill if name == "fill" else fill.default)(mask)
        return mask

    with pytest.raises(CaptureError, match=r"of_test_masks\.fill"):
        trace(Hand(written), torch.randn(2, T, 8), square)


def test_a_mask_that_can_be_loaded_stays() -> None:
    """A buffer's elements are those of a checkpoint, some day."""
    model = Hand(lambda x: model.get_buffer("mask"))
    model.register_buffer("mask", _causal())
    assert [(causal, mask) for _, causal, mask in calls_of(trace(model, torch.randn(2, T, 8), square))] == [
        (False, True)
    ] * 3


def test_equal_layers_that_are_given_different_masks() -> None:
    class Turns(Hand):
        def forward(self, x: Tensor) -> Tensor:
            masks = _compared(x), _window(x)
            for at, layer in enumerate(self.layers):
                x = layer(x, masks[at // 3])
            return x

    model, x = Turns(_compared, layers=6), torch.randn(4, T, 8)
    traced = trace(model, x, square, microbatches=2)
    assert [mask for _, _, mask in calls_of(traced)] == [False] * 3 + [True] * 3
    assert_equal(run(plan_of(job_of(traced, 2, 2)), model, x), plain(model, x, square), 1e-5)


def test_a_mask_that_the_first_call_keeps_is_recognised() -> None:
    class Keeps(Hand):
        kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = _compared(x)
            for layer in self.layers:
                x = layer(x, self.kept)
            return x

    model, x = Keeps(_compared), torch.randn(4, T, 8)
    traced = trace(model, x, square, microbatches=2)
    assert model.kept is None
    assert [(causal, mask) for _, causal, mask in calls_of(traced)] == [(True, False)] * 3


def test_queries_of_another_length_than_keys_keep_their_mask() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            mask = _causal()[-3:]
            y = x[:, None]
            return F.scaled_dot_product_attention(self.q(y[..., -3:, :]), y, y, mask)

    (call,) = calls_of(trace(Last(), torch.randn(2, T, 8), square))
    assert call[1:] == (False, True)


def job_calls(job: stretto.Job) -> list[tuple[bool, bool]]:
    return [
        (op.args[4] is True, dict(op.kwargs).get("attn_mask") is not None)
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
        if op.target == KERNEL
    ]


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
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32, "num_hidden_layers": 4}
    sizes |= {"vocab_size": 64, "intermediate_size": 48}
    model = from_transformers("LlamaForCausalLM", **{**SMALL, **sizes}).double()
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    job = stretto.capture(model, batch, huggingface_loss, stretto.Parallel(microbatches=2, **layout))
    assert set(job_calls(job)) == {(True, False)}
    plan = lowered(job, layout.get("schedule", "1f1b"))
    assert_plan_is_plain(plan, model, huggingface_loss, batch)


def test_chunks_of_a_sequence_read_the_keys_that_they_may_see() -> None:
    model = from_transformers("LlamaForCausalLM", **SMALL)
    ids = tokens(4, columns=8)
    batch = {"input_ids": ids, "labels": ids}
    job = stretto.capture(
        model, batch, huggingface_loss, stretto.Parallel(pp=1, microbatches=2, ampipe_degree=2)
    )
    specs = {op.name: op.outputs[0] for s in job.stages for ops in s.ops.values() for op in ops}
    lengths = Counter(
        specs[op.args[1].name].shape[-2]  # type: ignore[union-attr]
        for s in job.stages
        for ops in s.ops.values()
        for op in ops
        if op.target == KERNEL
    )
    assert lengths == {4: 3, 8: 3}
    found = run(stretto.plan(job, cores()), model, batch)
    assert_equal(found, plain(copy.deepcopy(model), batch, huggingface_loss), 1e-5)
