"""AMPipe: from attention to the MLP a block works on chunks of its sequence, which communicate under each
other.

    1. A block's attention is given full queries, keys and values, and gives chunks of queries their results:
       each chunk reads the keys that it may see (`chunk_attention`).
    2. What follows is done chunk by chunk (`chunked`): output projection, dropout, residual, norm, router,
       MLP. Experts are called for each chunk; with a capacity, each chunk has its own (as in MindSpeed), or
       with `full` the chunks are joined for them, and they serve what they serve in the uncut model.
    3. The next block goes on in chunks: its keys and values are joined. What leaves the last block is joined.

Nothing else is needed to hide an all-to-all: chunks do not depend on each other, and the order of ops does
the rest, forward and backward. Source: MindSpeed's Ampipe (docs/features/ampipe.md), where it is one autograd
function with its own streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stretto.errors import UsageError
from stretto.parallelize.chunk_attention import attention
from stretto.parallelize.chunk_writes import check_written, views_noted, writes
from stretto.parallelize.chunked import Chunked, by_chunk, joined
from stretto.parallelize.functions import functions_given, put_forward
from stretto.parallelize.parts import lengths_of
from stretto.parallelize.recorded_adapter import tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True)
class Chunks:
    """degree: chunks of a sequence. experts: names of modules with a row for each token. full: whether
    experts with a capacity serve all chunks together. joins: whether what leaves the last block is joined;
    with sequence parallelism chunks are slices, and are gathered first."""

    degree: int
    experts: tuple[str, ...] = ()
    full: bool = False
    joins: bool = True


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
            if type(args[0]) is Chunked:
                self.cut = True
            else:
                named["lengths"] = self._lengths(args[0].shape[-2])
            # Here, and not in another mode that knows attention: it would take the chunks for one tensor.
            with self.outside():
                return attention(*args, **named)
        if args and writes(function):
            check_written(args[0])
        return function(*args, **named)

    def _lengths(self, length: int) -> list[int]:
        if length < 2 * self.degree:
            raise UsageError(
                f"ampipe_degree = {self.degree} cuts a sequence of {length} into chunks of less than two "
                f"tokens; give {max(length // 2, 1)} or less"
            )
        self.cut = True
        return lengths_of(length, self.degree)

    @contextmanager
    def outside(self) -> Iterator[None]:
        kept, self.inside = self.inside, 0
        try:
            yield
        finally:
            self.inside = kept


def blocks_of(model: nn.Module) -> list[str]:
    """The names of a model's blocks: the members of the `ModuleList` with the most parameters."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
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
    undo: list[Callable[[], None]] = []
    try:
        for name in blocks:
            module = model.get_submodule(name)
            undo.append(put_forward(module, _block(module.forward, mode, how.joins and name == blocks[-1])))
        for name in how.experts:
            module = model.get_submodule(name)
            undo.append(put_forward(module, _experts(module.forward, not how.full or _dropless(module))))
        with views_noted(), mode, functions_given(joined):
            yield
        if not mode.cut:
            raise _no_attention(model, how.degree)
    finally:
        for action in reversed(undo):
            action()


def _no_attention(model: nn.Module, degree: int) -> UsageError:
    return UsageError(
        f"ampipe_degree = {degree} cuts at F.scaled_dot_product_attention, which no block of "
        f"{type(model).__name__} calls: choose that attention where the model has it (transformers: "
        "attn_implementation='sdpa'), or leave ampipe_degree out"
    )


class _CalledError(Exception):
    """Attention was."""


class _Awaited(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            raise _CalledError
        return function(*args, **(kwargs or {}))


def check_attention(model: nn.Module, call: Callable[[], object], how: Chunks) -> None:
    """Raises UsageError where `call`, which may be of a model without values, comes to its end and has called
    no attention that can be cut. One that fails for other reasons says nothing: capture will say it. Experts
    are left out, whose kernels may want values."""
    undo = [put_forward(model.get_submodule(name), lambda x, *_, **__: x) for name in how.experts]
    try:
        with _Awaited(), torch.no_grad():
            call()
    except Exception:
        return
    finally:
        for action in undo:
            action()
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


def _dropless(module: nn.Module) -> bool:
    slots: Callable[[int], int | None] = getattr(module, "slots", lambda tokens: None)
    return slots(1) is None


def _experts(own: Callable[..., Tensor], each: bool) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        leaves, tree = tree_flatten((args, kwargs))
        first = next((x for x in leaves if type(x) is Chunked), None)
        rows = [x for x in leaves if isinstance(x, Tensor)]
        if first is None or not each or len({x.shape[first.cut_dim] for x in rows}) > 1:
            args, kwargs = joined((args, kwargs))
            return own(*args, **kwargs)
        dim, blocks = first.cut_dim, first.blocks
        columns = [first.cut_alike(x, dim, blocks) if _is_full(x) else x for x in leaves]

        def of(at: int) -> Tensor:
            given = [x.parts[at] if type(x) is Chunked else x[at] if type(x) is list else x for x in columns]
            chunk_args, chunk_kwargs = tree_unflatten(given, tree)
            return own(*chunk_args, **chunk_kwargs)

        return Chunked(by_chunk(of, len(first.parts)), dim, blocks)

    return forward


def _is_full(x: Any) -> bool:
    return isinstance(x, Tensor) and type(x) is not Chunked
