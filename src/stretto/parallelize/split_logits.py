"""Logits whose vocabulary is sharded: what is in the place of the full tensor in the code of models and
losses.

    1. What keeps the vocabulary's dim unsharded (dtype, views of the other dims, scaling by a number) is
       done on the part, and `F.cross_entropy` of parts communicates three numbers a token (`vocabulary`).
    2. Anything else gathers the logits, once, and works on the gathered tensor or a view of it.
    3. A write by a number acts on the part while nothing is gathered. After any other write the parts are of
       no use: `WrittenError` says so, and the head's output is gathered where it is made.

Views of split logits have the same storage: what leads to them is kept, and done to the gathered tensor when
it is needed, so that a write through either is seen.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.parallelize import ops
from stretto.parallelize.recorded_adapter import OF_SHAPE, tree_leaves, tree_map_only, without_elements
from stretto.parallelize.unseen import HIDDEN, now
from stretto.parallelize.vocabulary import cross_entropy

OneToOne = Callable[[Tensor], Tensor]


class WrittenError(Exception):
    """The code writes to the full logits, or asks for what only one tensor has."""

    def __str__(self) -> str:
        return "the code writes to sharded logits: give the output head the style 'colwise_gather_output'"


def gathered(part: Tensor, axis: str, size: int) -> Tensor:
    """All columns of a value that is sharded along them."""
    made = ops.collect(part, -1, axis, size)
    # A view that an autograd function returns cannot be written to.
    return made.clone() if 1 in (made.numel() // max(made.shape[-1], 1), part.shape[-1]) else made


@dataclass(slots=True)
class _Storage:
    """What logits and their views share. gathered: the full tensor, once something needed it; version: its
    count of writes then."""

    part: Tensor
    axis: str
    size: int
    gathered: Tensor | None = None
    version: int = 0

    def full(self) -> Tensor:
        if self.gathered is None:
            self.gathered = gathered(self.part, self.axis, self.size)
            self.version = self.gathered._version
        return self.gathered


class SplitLogits(Tensor):
    """Logits of which this rank has the columns (last dim) of its part of the vocabulary. Looks like the full
    tensor, and has no elements of its own, so that nothing takes the part for it."""

    _storage: _Storage
    _part: Tensor
    _chain: OneToOne
    _full: Tensor | None

    @staticmethod
    def __new__(cls, part: Tensor, axis: str, size: int) -> SplitLogits:
        return _made(_Storage(part, axis, size), part, lambda unsharded: unsharded)

    @property
    def kept(self) -> Tensor:
        """This rank's part. Raises WrittenError when the full tensor has other values now."""
        storage = self._storage
        if storage.gathered is not None and storage.gathered._version != storage.version:
            raise WrittenError
        return self._part

    def full(self) -> Tensor:
        """The unsharded logits, equal on all ranks: a tensor whose storage these logits share from now on."""
        if self._full is None:
            with now(HIDDEN), torch.enable_grad():  # it serves later uses too
                self._full = self._chain(self._storage.full())
        return self._full

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _ABOUT:
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        made: Any = NotImplemented
        if function is F.cross_entropy:
            made = _cross_entropy(*args, **kwargs)
        elif function in _BY_PARTS and args and type(args[0]) is SplitLogits:
            made = _BY_PARTS[function](*args, **kwargs)
        return _called(function, args, kwargs) if made is NotImplemented else made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise ValueError(
            f"{function} gets logits that are sharded over tensor-parallel ranks, in a way that passes "
            "__torch_function__ by: give it x + 0.0, or the head the style 'colwise_gather_output'"
        )


def _made(storage: _Storage, part: Tensor, chain: OneToOne) -> SplitLogits:
    shape = (*part.shape[:-1], part.shape[-1] * storage.size)
    made: SplitLogits = without_elements(SplitLogits, shape, part)
    made._storage, made._part, made._chain, made._full = storage, part, chain, None
    return made


def full_of(value: Any) -> Any:
    """The value with unsharded logits in the places of split ones, in whatever they are nested."""
    return tree_map_only(SplitLogits, SplitLogits.full, value)


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if function == Tensor.data.__set__:  # type: ignore[attr-defined]
        raise ValueError(
            "the logits are sharded over tensor-parallel ranks, and their data cannot be exchanged: write "
            "x = ... or x.copy_(...) in place of x.data = ..."
        )
    if function in _OF_ONE_TENSOR:
        raise WrittenError
    made = function(*full_of(tuple(args)), **full_of(dict(kwargs)))
    for logits in tree_leaves((args, kwargs)):
        # squeeze_ and its like write no element.
        if type(logits) is not SplitLogits:
            continue
        if logits.full().shape != logits.shape or logits.full().requires_grad != logits.kept.requires_grad:
            raise WrittenError
    return made


_OF_ONE_TENSOR = (Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
"""Gradients of the part would pass these by."""

_ABOUT = OF_SHAPE.union(
    getattr(Tensor, name).__get__
    for name in ("shape", "ndim", "dtype", "device", "layout", "itemsize", "is_cuda", "is_meta")
)

# Step 1: what is done on the part. Each gives NotImplemented for what needs the full tensor.


def _like(x: SplitLogits, part: Tensor) -> SplitLogits:
    return SplitLogits(part, x._storage.axis, x._storage.size)


def _viewed(x: SplitLogits, part: OneToOne, unsharded: OneToOne | None = None) -> SplitLogits:
    """A view: what is done to the part, and (else the same) to the full tensor, to get it."""
    own, then, grad = x._chain, unsharded or part, torch.is_grad_enabled()

    def chain(gathered: Tensor) -> Tensor:
        made = then(own(gathered))
        return made if grad else made.detach()  # it was made where no gradient was wanted

    return _made(x._storage, part(x.kept), chain)


def _by_numbers(name: str) -> Callable[..., Any]:
    """Element by element, with numbers. In place on the part while nothing else shares its storage."""

    def method(x: SplitLogits, *args: Any, **kwargs: Any) -> Any:
        numeric = (isinstance(a, (numbers.Number, nn.Parameter)) for a in args)
        fits = not kwargs and all(numeric) and not any(a.dim() for a in args if isinstance(a, Tensor))
        if not name.endswith("_"):
            return _like(x, getattr(x.kept, name)(*args)) if fits else NotImplemented
        if not fits or x._storage.gathered is not None:
            raise WrittenError
        getattr(x.kept, name)(*args)
        return x

    return method


def _to(x: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    given: list[Any] = [a.kept if type(a) is SplitLogits else a for a in args]
    made = x.kept.to(*given, **kwargs)
    return x if made is x.kept else _like(x, made)


def _contiguous(x: SplitLogits, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    return x if x.kept.is_contiguous() else _like(x, x.kept.contiguous())


def _reshaped(x: SplitLogits, part: Sequence[int], unsharded: Sequence[int], call: Any) -> Any:
    try:
        x.kept.view(part)
    except (RuntimeError, ValueError):  # the latter of a fake tensor
        return _like(x, call(x.kept, part))
    return _viewed(x, lambda t: t.view(part), lambda t: t.view(unsharded))


def _shaped(call: Callable[[Tensor, Sequence[int]], Tensor]) -> Callable[..., Any]:
    def method(x: SplitLogits, *shape: Any, **kwargs: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], Sequence):
            shape = tuple(shape[0])
        if kwargs or not shape or not all(isinstance(n, numbers.Integral) for n in shape):
            return NotImplemented
        part = x.kept.shape[-1]
        rows, known = x.kept.numel() // max(part, 1), math.prod(shape[:-1])
        if shape[-1] != x.shape[-1] and not (shape[-1] == -1 and known == rows):
            return NotImplemented
        return _reshaped(x, (*shape[:-1], part), tuple(shape), call)

    return method


def _flatten(x: SplitLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims, part = x.dim(), x.kept.shape
    if not dims or end_dim % dims >= dims - 1 or start_dim % dims > end_dim % dims:
        return NotImplemented
    start, end = start_dim % dims, end_dim % dims + 1
    rows = (*part[:start], math.prod(part[start:end]), *part[end:-1])
    return _reshaped(x, (*rows, part[-1]), (*rows, x.shape[-1]), Tensor.reshape)


def _item(x: SplitLogits, at: Any) -> Any:
    places = at if isinstance(at, tuple) else (at,)
    simple = all(p is Ellipsis or isinstance(p, slice) or type(p) is int for p in places)
    if not simple or not places:
        return NotImplemented
    named = [p for p in places if p is not Ellipsis]
    reaches_last = len(named) == x.dim() or (Ellipsis in places and places[-1] is not Ellipsis)
    return NotImplemented if reaches_last and places[-1] != slice(None) else _viewed(x, lambda t: t[at])


def _rows(x: SplitLogits, dim: int = 0) -> Any:
    return tuple(x[row] for row in range(len(x))) if dim == 0 and x.dim() > 1 else NotImplemented


_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _by_numbers(name) for name in ("clone", "neg", "tanh", "mul", "div")},
    **{name: _by_numbers(name) for name in ("neg_", "tanh_", "mul_", "div_")},
    "to": _to,
    "float": lambda x, **kwargs: _to(x, torch.float32, **kwargs),
    "double": lambda x, **kwargs: _to(x, torch.float64, **kwargs),
    "half": lambda x, **kwargs: _to(x, torch.float16, **kwargs),
    "bfloat16": lambda x, **kwargs: _to(x, torch.bfloat16, **kwargs),
    "type_as": lambda x, other: _to(x, other.dtype),
    "contiguous": _contiguous,
    "detach": lambda x: _viewed(x, Tensor.detach),
    "view": _shaped(Tensor.view),
    "reshape": _shaped(Tensor.reshape),
    "flatten": _flatten,
    "__getitem__": _item,
    "unbind": _rows,
}

_BY_PARTS: dict[Any, Callable[..., Any]] = {
    **{getattr(owner, k): v for k, v in _METHODS.items() for owner in (Tensor, torch) if hasattr(owner, k)},
    Tensor.data.__get__: _METHODS["detach"],  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__: lambda x: x.kept.requires_grad,  # type: ignore[attr-defined]
}
"""Functions of PyTorch -> what does the same on the part."""


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if type(input) is not SplitLogits or weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    if type(target) is SplitLogits or not isinstance(target, Tensor) or target.is_floating_point():
        return NotImplemented
    if label_smoothing or input.dim() != 2 or target.dim() != 1 or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    storage = input._storage
    return cross_entropy(input.kept, target, ignore_index, reduction, storage.axis, storage.size)
