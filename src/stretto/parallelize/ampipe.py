"""AMPipe: from attention to the MLP a block works on chunks of its sequence, which communicate under each
other.

    1. A block's attention gets unsharded queries, keys and values, and gives chunks of queries their results:
       each chunk reads the keys that it may see (`attention`).
    2. What follows is done chunk by chunk (`chunked`). Experts are called for each chunk; with a capacity,
       each chunk has its own (as in MindSpeed), or with `full` the chunks are joined for them.
    3. The next block goes on in chunks: its keys and values are joined. What leaves the last block is joined.

Chunks do not depend on each other, and the order of ops hides an all-to-all, forward and backward. Source:
MindSpeed's Ampipe (docs/features/ampipe.md), where it is one autograd function with its own streams.

Dropout within attention draws for a query and a key what it draws in the uncut model: for all of them at
once, as PyTorch does where no kernel drops (a processor). A kernel that drops draws by itself, otherwise for
chunks than for the full tensor, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stretto.errors import UsageError
from stretto.parallelize.chunked import Chunked, by_chunk, check_written, joined, views_noted, writes
from stretto.parallelize.lower_right_adapter import lower_right, on_cuda
from stretto.parallelize.parts import lengths_of
from stretto.parallelize.recorded_adapter import tree_flatten, tree_unflatten
from stretto.parallelize.unseen import functions_given, put_forward


@dataclass(frozen=True, slots=True)
class Chunks:
    """degree: chunks of a sequence. experts: names of modules with a row for each token. full: whether
    experts with a capacity serve all chunks together."""

    degree: int
    experts: tuple[str, ...] = ()
    full: bool = False


class _ChunkedAttention(TorchFunctionMode):
    """Step 1, while a block runs."""

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.degree = degree
        self.inside = 0
        self.cut = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {**(kwargs or {})}
        if self.inside and function is F.scaled_dot_product_attention:
            args = (*args, *(named.pop(key) for key in ("query", "key", "value")[len(args) :]))
            length = args[0].shape[-2]
            if type(args[0]) is not Chunked:
                if length < 2 * self.degree:
                    raise UsageError(
                        f"ampipe_degree = {self.degree} cuts a sequence of {length} into chunks of less than "
                        f"two tokens; give {max(length // 2, 1)} or less"
                    )
                named["lengths"] = lengths_of(length, self.degree)
            self.cut = True
            # Here, and not in another mode that knows attention: it would take the chunks for one tensor.
            kept, self.inside = self.inside, 0
            try:
                return attention(*args, **named)
            finally:
                self.inside = kept
        if args and writes(function):
            check_written(args[0])
        return function(*args, **named)


def blocks_of(model: nn.Module) -> list[str]:
    """The names of a model's blocks: the members of the `ModuleList` with the most parameters."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if not lists:
        raise UsageError(
            f"{type(model).__name__} has no ModuleList of blocks whose sequence ampipe_degree could cut; "
            "leave it out"
        )
    name = max(lists, key=lambda one: (sum(p.numel() for p in lists[one].parameters()), -one.count(".")))
    return [f"{name}.{at}" for at in range(len(lists[name]))]


@contextmanager
def ampipe(model: nn.Module, how: Chunks) -> Iterator[None]:
    """While the context lasts, blocks work in chunks."""
    mode = _ChunkedAttention(how.degree)
    blocks = blocks_of(model)
    with ExitStack() as undo:
        for name in blocks:
            module = model.get_submodule(name)
            undo.callback(put_forward(module, _block(module.forward, mode, name == blocks[-1])))
        for name in how.experts:
            module = model.get_submodule(name)
            each = not how.full or getattr(module, "slots", lambda tokens: None)(1) is None
            undo.callback(put_forward(module, _experts(module.forward, each)))
        with views_noted(), mode, functions_given(joined):
            yield
        if not mode.cut:
            raise _no_attention(model, how.degree)


def _no_attention(model: nn.Module, degree: int) -> UsageError:
    return UsageError(
        f"ampipe_degree = {degree} cuts at F.scaled_dot_product_attention, which no block of "
        f"{type(model).__name__} calls: choose that attention where the model has it (transformers: "
        "attn_implementation='sdpa'), or leave ampipe_degree out"
    )


class _Awaited(TorchFunctionMode):
    called = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called |= function is F.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


def check_attention(model: nn.Module, call: Callable[[], object], how: Chunks) -> None:
    """Raises UsageError where `call`, which may be of a model without values, comes to its end and has called
    no attention that can be cut. Experts are left out, whose kernels may want values."""
    with ExitStack() as undo, _Awaited() as awaited, torch.no_grad():
        for name in how.experts:
            undo.callback(put_forward(model.get_submodule(name), lambda x, *_, **__: x))
        try:
            call()
        except Exception:
            return
    if not awaited.called:
        raise _no_attention(model, how.degree)


def _block(own: Callable[..., Any], mode: _ChunkedAttention, last: bool) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        mode.inside += 1
        try:
            made = own(*args, **kwargs)
        finally:
            mode.inside -= 1
        return joined(made) if last else made

    return forward


def _experts(own: Callable[..., Tensor], each: bool) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        leaves, tree = tree_flatten((args, kwargs))
        first = next((x for x in leaves if type(x) is Chunked), None)
        rows = [x for x in leaves if isinstance(x, Tensor)]
        if first is None or not each or len({x.shape[first.cut_dim] for x in rows}) > 1:
            args, kwargs = joined((args, kwargs))
            return own(*args, **kwargs)
        dim = first.cut_dim
        columns = [first.cut_alike(x, dim) if isinstance(x, Tensor) else x for x in leaves]

        def of(at: int) -> Tensor:
            given = [x.parts[at] if type(x) is Chunked else x for x in columns]
            chunk_args, chunk_kwargs = tree_unflatten(given, tree)
            return own(*chunk_args, **chunk_kwargs)

        return Chunked(by_chunk(of, len(first.parts)), dim, first.blocks)

    return forward


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    lengths: Sequence[int] | None = None,
    **more: Any,
) -> Tensor:
    """As `F.scaled_dot_product_attention`, in chunks of the queries (B, H, S, K). lengths: of the chunks, for
    queries that are not cut yet."""
    key, value, attn_mask = joined((key, value, attn_mask))
    if type(query) is not Chunked:
        assert lengths is not None
        query = Chunked(torch.split(query, list(lengths), -2), query.dim() - 2)
    shorter = is_causal and key.shape[-2] < query.shape[-2]
    both = is_causal and attn_mask is not None  # in which kernels differ
    if query.cut_dim != query.dim() - 2 or query.blocks != 1 or shorter or both:
        return F.scaled_dot_product_attention(
            query.joined(), key, value, attn_mask, dropout_p, is_causal, **more
        )
    kept = _kept(query, key, dropout_p) if dropout_p else None
    ends = list(accumulate(chunk.shape[-2] for chunk in query.parts))

    def of(at: int) -> Tensor:
        chunk, end = query.parts[at], ends[at]
        start = end - chunk.shape[-2]
        seen, mask = end if is_causal else key.shape[-2], attn_mask
        keys, values = key[..., :seen, :], value[..., :seen, :]
        if mask is not None and mask.shape[-2] != 1:
            mask = mask[..., start:end, :]
        if kept is not None:
            return _dropped(chunk, keys, values, mask, is_causal, kept[..., start:end, :seen], **more)
        if is_causal and start:
            return lower_right(chunk, keys, values, **more)
        return F.scaled_dot_product_attention(chunk, keys, values, mask, 0.0, is_causal, **more)

    return Chunked(by_chunk(of, len(ends)), query.dim() - 2)


def _kept(query: Chunked, key: Tensor, p: float) -> Tensor:
    """What the uncut model's attention weights are multiplied with: 0 or 1 / (1 - p), (B, H, S, T)."""
    if on_cuda(query.parts[0]):
        raise UsageError(
            f"attention drops with p = {p}, and its kernel on CUDA draws for each chunk of the sequence "
            "by itself, not what it draws in the uncut model: give attention no dropout, or leave "
            "ampipe_degree out"
        )
    shape = (*query.shape[:-1], key.shape[-2])
    return F.dropout(torch.ones(shape, dtype=query.dtype, device=query.device), p)


def _dropped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    kept: Tensor,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Weights times what is kept of them, times values. A query that sees no key becomes zero."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        S, T = scores.shape[-2:]
        mask = torch.ones(S, T, dtype=torch.bool, device=query.device).tril(T - S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)
    return weights * kept @ value
