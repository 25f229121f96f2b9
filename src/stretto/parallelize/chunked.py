"""Tensors that are cut in chunks along the sequence, and look unsharded to the code that gets them.

    1. What is called on a cut tensor is called on its first chunk and on the full tensor, without values, and
       the ops that this makes are placed as if chunks were ranks (`recorded_adapter.placements_of`). Tensors
       beside it are cut with it, where the shapes want it.
    2. Where the result is cut, a partial, or equal for all chunks, the other chunks are called too: results
       stay in chunks, partials are added up. Autograd adds the gradients of what several chunks read.
    3. Whatever has no placement (a sum over positions, a softmax along them) gets the chunks joined.

So no list of functions says what may be cut: a model's own code is right in chunks, or unsharded. Random ops
draw for the full tensor and are cut. What is made of joined chunks may be a view of the sequence in the uncut
model, such as x[:, 0], and here it is a view of a copy: from then on neither may be written into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.errors import CaptureError
from stretto.ir.placement import Placement, cuts_at, part, where_cut
from stretto.parallelize.recorded_adapter import (
    OF_SHAPE,
    placements_of,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    without_elements,
)
from stretto.tensor.dtensor_adapter import same_memory

Made = TypeVar("Made")


class Chunked(Tensor):
    """A tensor in chunks along a dim, which is `blocks` equal blocks: each chunk has its slice of every
    block."""

    parts: tuple[Tensor, ...]
    cut_dim: int
    blocks: int

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], dim: int, blocks: int = 1) -> Chunked:
        shape = list(parts[0].shape)
        shape[dim] = sum(chunk.shape[dim] for chunk in parts)
        made: Chunked = without_elements(cls, shape, parts[0])
        made.parts, made.cut_dim, made.blocks = tuple(parts), dim, blocks
        return made

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return any(chunk.requires_grad for chunk in self.parts)

    def lengths(self) -> list[int]:
        """Of each chunk's slice of a block."""
        return [chunk.shape[self.cut_dim] // self.blocks for chunk in self.parts]

    def joined(self) -> Tensor:
        """The full tensor."""
        if self.blocks == 1:
            return torch.cat(self.parts, dim=self.cut_dim)
        dim, blocks = self.cut_dim, self.blocks
        inner = [torch.unflatten(chunk, dim, (blocks, -1)) for chunk in self.parts]
        return torch.cat(inner, dim=dim + 1).flatten(dim, dim + 1)

    def cut_alike(self, unsharded: Tensor, dim: int) -> Chunked:
        """A full tensor in chunks of the lengths of these; one that is in chunks as it is."""
        if type(unsharded) is Chunked:
            return unsharded
        if self.blocks == 1:
            return Chunked(torch.split(unsharded, self.lengths(), dim), dim)
        inner = torch.split(torch.unflatten(unsharded, dim, (self.blocks, -1)), self.lengths(), dim + 1)
        return Chunked([chunk.flatten(dim, dim + 1) for chunk in inner], dim, self.blocks)

    def each(self, function: Callable[[Tensor], Tensor]) -> Chunked:
        """What does the same to every row, done to each chunk."""
        return Chunked(self.made(function), self.cut_dim, self.blocks)

    def made(self, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Of each chunk."""
        return by_chunk(lambda at: function(self.parts[at]), len(self.parts))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(function, "__name__", "") == "__get__":
            turned = _TURNED.get(getattr(function.__self__, "__name__", ""))
            if turned is not None:
                return turned(args[0])
        if function in OF_SHAPE or getattr(function, "__name__", "") == "__get__":
            return super().__torch_function__(function, types, args, named)  # type: ignore[no-untyped-call]
        if function in (F.dropout, torch.dropout):
            return _dropout(*args, **named)
        if function in _SHAPED and type(args[0]) is Chunked:
            result = _shaped(args[0], function, args[1:], named)
            if result is not None:
                return result
        return _called(function, args, named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise CaptureError(
            f"{function} gets a sequence in chunks in a way that passes __torch_function__ by: give it "
            "x + 0.0, or leave ampipe_degree out"
        )


_SHAPED = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.view_as, Tensor.reshape_as, Tensor.expand)
"""What is given the shape of the full tensor."""


def _shaped(x: Chunked, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    given: list[Any] = [*args, *kwargs.values()]
    shape = getattr(given[0], "shape", given if isinstance(given[0], int) else given[0])
    if isinstance(shape, torch.dtype) or not all(isinstance(n, int) for n in shape):
        return None
    if function is Tensor.expand:
        dim = x.cut_dim + len(shape) - x.dim()
        if x.shape[x.cut_dim] != shape[dim] and shape[dim] != -1:
            return None
        sizes = [-1 if d == dim else n for d, n in enumerate(shape)]
        return Chunked(x.made(lambda chunk: chunk.expand(sizes)), dim, x.blocks)
    known = math.prod(n for n in shape if n != -1)
    target = [x.numel() // max(known, 1) if n == -1 else n for n in shape]
    full = x.shape[x.cut_dim] // x.blocks
    for dim, blocks in cuts_at(target, where_cut(x.shape, x.cut_dim, x.blocks)):
        length = target[dim] // blocks
        if all(length * n % full == 0 for n in x.lengths()):
            break
    else:
        return None
    sizes = [blocks * (length * n // full) for n in x.lengths()]
    shapes = [[size if d == dim else n for d, n in enumerate(target)] for size in sizes]
    return Chunked(by_chunk(lambda at: x.parts[at].reshape(shapes[at]), len(shapes)), dim, blocks)


_TURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "mT": lambda x: x.transpose(-2, -1),
    "mH": lambda x: x.transpose(-2, -1).conj(),
    "T": lambda x: x.permute(*reversed(range(x.dim()))),
    "H": lambda x: x.transpose(0, 1).conj(),
    "data": Tensor.detach,
}
"""Attributes that are tensors."""

_UNKNOWN = (
    *("register_hook", "retain_grad", "register_post_accumulate_grad_hook", "backward", "requires_grad_"),
)
"""What is about one tensor of autograd's, which a cut one is not."""


def by_chunk(call: Callable[[int], Made], count: int) -> list[Made]:
    """What a call makes of each chunk, by its number."""
    return [call(at) for at in range(count)]


def joined(value: Any) -> Any:
    """The value with full tensors in the places of cut ones."""
    return tree_map_only(Chunked, Chunked.joined, value)


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = str(getattr(function, "__name__", function))
    if name in _UNKNOWN or kwargs.get("out") is not None:
        what = "out=" if name not in _UNKNOWN else name
        raise CaptureError(f"{what} is called on a sequence in chunks: leave it, or ampipe_degree, out")
    if writes(function):
        return _written(function, args, kwargs)
    in_place = asks_in_place(function, args, kwargs)
    if in_place is not None:
        target, more = in_place
        check_written(target)
        return _overwritten(target, function(target.clone(), **more))
    leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
    cut = [x for x in leaves if type(x) is Chunked]
    if len({tuple(x.lengths()) for x in cut}) == 1:
        for same in _cuts_beside(leaves, cut[0]):
            result = _by_chunks(function, same, tree, cut[0])
            if result is not None:
                return result[0]
    full_args, full_kwargs = joined((tuple(args), dict(kwargs)))
    made = function(*full_args, **full_kwargs)
    views = _views.get()
    if views is not None:
        results = tree_leaves(made)
        for full, cut_one in zip(tree_leaves((full_args, full_kwargs)), leaves, strict=True):
            if full is not cut_one and any(isinstance(x, Tensor) and same_memory(x, full) for x in results):
                views.append((full, *cut_one.parts))
    return made


def _written(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target = args[0]
    check_written(target)
    if type(target) is not Chunked:
        return function(target, *joined(args[1:]), **joined(kwargs))
    plain = getattr(Tensor, writes(function), None)
    if plain is not None and plain is not function:
        # Of a copy, which autograd may keep.
        made = plain(target.each(torch.clone), *args[1:], **kwargs)
    else:
        made = target.joined().clone()
        function(made, *joined(args[1:]), **joined(kwargs))
    return _overwritten(target, made)


def _overwritten(target: Tensor, made: Tensor) -> Tensor:
    if made.shape != target.shape:
        raise CaptureError(
            f"a sequence in chunks of shape {list(target.shape)} is changed in place to {list(made.shape)}: "
            "make another tensor, or leave ampipe_degree out"
        )
    if type(target) is not Chunked:
        return target.copy_(joined(made))
    if type(made) is not Chunked or (made.cut_dim, made.blocks) != (target.cut_dim, target.blocks):
        made = target.cut_alike(joined(made), target.cut_dim)
    for part_of_it, new in zip(target.parts, made.parts, strict=True):
        part_of_it.copy_(new)
    return target


def _cuts_beside(leaves: Sequence[Any], first: Chunked) -> list[list[Any]]:
    """The arguments as they are, and with the full tensors cut that are as long as the first cut one."""
    other = list(leaves)
    for at, x in enumerate(leaves):
        dim = first.cut_dim - (first.dim() - x.dim()) if isinstance(x, Tensor) else -1
        if dim >= 0 and x.shape[dim] == first.shape[first.cut_dim]:
            other[at] = first.cut_alike(x, dim)
    same = all(x is y for x, y in zip(leaves, other, strict=True))
    return [list(leaves)] if same else [list(leaves), other]


def _by_chunks(
    function: Callable[..., Any], leaves: Sequence[Any], tree: Any, first: Chunked
) -> tuple[Any] | None:
    def call(given: Sequence[Any]) -> Any:
        args, kwargs = tree_unflatten(list(given), tree)
        return function(*args, **kwargs)

    def of(at: int) -> list[Any]:
        return [x.parts[at] if type(x) is Chunked else x for x in leaves]

    cuts = [part(x.cut_dim, x.blocks) if type(x) is Chunked else None for x in leaves]
    ratio = Fraction(sum(first.lengths()), first.lengths()[0])
    placements = placements_of(call, of(0), leaves, cuts, len(first.parts), ratio)
    if placements is None:
        return None
    made = by_chunk(lambda at: call(of(at)), len(first.parts))
    columns = zip(*map(tree_leaves, made), strict=True)
    results = [_result(p, column) for p, column in zip(placements, columns, strict=True)]
    return (tree_unflatten(results, tree_flatten(made[0])[1]),)


def _result(placement: Placement, column: Sequence[Any]) -> Any:
    if placement.kind == "equal":
        return column[0]
    if placement.kind == "sum":
        return sum(column[1:], start=column[0])
    return Chunked(column, *placement.at[0])


def _dropout(
    input: Chunked, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> Tensor:
    """Draws for a token what it draws in the uncut model."""
    if not (training and train) or p == 0.0:
        return input
    kept = F.dropout(torch.ones(input.shape, dtype=input.dtype, device=input.device), p)
    return input.mul_(kept) if inplace else input * kept


_views: ContextVar[list[tuple[Tensor, ...]] | None] = ContextVar("views", default=None)
"""Memories that a write must not change: a copy of chunks of which there is a view, and the chunks. None
where no model works in chunks."""


@contextmanager
def views_noted() -> Iterator[None]:
    """While the context lasts, views of joined chunks are noted for `check_written`."""
    before = _views.set([])
    try:
        yield
    finally:
        _views.reset(before)


def check_written(target: Any) -> None:
    """Raises CaptureError where the uncut model may write into something else by writing here."""
    views = _views.get()
    if not views or not isinstance(target, Tensor):
        return
    parts = getattr(target, "parts", (target,))
    if any(same_memory(part, kept) for memories in views for kept in memories for part in parts):
        raise CaptureError(
            "a sequence in chunks is written in place beside what was made of it unsharded, such as x[:, 0]: "
            "write y = x + ..., or leave ampipe_degree out"
        )


def writes(function: Callable[..., Any]) -> str:
    """What a function that changes its first argument would be called if it made another tensor; "" for
    others."""
    name = str(getattr(function, "__name__", ""))
    if name in ("__setitem__", "copy_") or (name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")):
        return name.removeprefix("__i").strip("_") if name.startswith("__i") else name
    return name[:-1] if name.endswith("_") and not name.endswith("__") else ""


def asks_in_place(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]] | None:
    """Of a call with `inplace=True`, as `F.relu(x, inplace=True)`: the first argument, and the others as they
    would be without it; None for other calls."""
    code = getattr(function, "__code__", None)
    names: tuple[str, ...] = () if code is None else code.co_varnames[: code.co_argcount]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "inplace" not in names or not given.get("inplace"):
        return None
    target: Tensor = given.pop(names[0])
    return target, {**given, "inplace": False}
