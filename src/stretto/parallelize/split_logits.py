"""Logits whose vocabulary is sharded: what is in the place of the full tensor in the code of models and
losses.

    1. What keeps the vocabulary's dim unsharded (dtype, views of the other dims, scaling by a number) is
       done on the part, and `F.cross_entropy` of parts communicates three numbers a token (`vocabulary`).
    2. Anything else gathers the logits, once, and works on the gathered tensor or a view of it.
    3. Part and gathered tensor are equal until one is written to. A write by a number acts on the part while
       nothing is gathered. After any other write the parts are of no use: `WrittenError` says so, and then
       the head's output is gathered where it is made (`alone.with_gathered_logits`), and is a plain tensor.

Views of split logits are split logits of the same storage: the operations that lead to them are kept, and
done to the gathered tensor when it is needed, so that a write through either is seen.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.parallelize import ops
from stretto.parallelize.unseen import hidden
from stretto.parallelize.vocabulary import cross_entropy
from stretto.parallelize.wrapper_adapter import without_elements

OneToOne = Callable[[Tensor], Tensor]


class WrittenError(Exception):
    """The code writes to the full logits, or asks for what only one tensor has."""

    def __str__(self) -> str:
        return "the code writes to sharded logits: give the output head the style 'colwise_gather_output'"


def gathered(part: Tensor, axis: str, size: int) -> Tensor:
    """The unsharded of columns that are sharded."""
    made = ops.collect(part, -1, axis, size)
    # A view that an autograd function returns cannot be written to.
    return made.clone() if 1 in (made.numel() // max(made.shape[-1], 1), part.shape[-1]) else made


@dataclass(slots=True)
class _Storage:
    """What logits and their views share. gathered: the full tensor, once something needed it; version: its
    count of writes at that time."""

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
    """Logits of which this rank has the columns (last dim) of its part of the vocabulary.

    Looks like the full tensor to the code that gets it, and has no elements of its own, so that nothing
    takes the part for it.
    """

    _storage: _Storage
    _part: Tensor
    _chain: OneToOne
    _full: Tensor | None

    @staticmethod
    def __new__(cls, part: Tensor, axis: str, size: int) -> SplitLogits:
        return _made(_Storage(part, axis, size), part, lambda unsharded: unsharded)

    def __init__(self, part: Tensor, axis: str, size: int) -> None:
        pass

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
            with hidden(), torch.enable_grad():  # it serves later uses too
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
    if type(value) is SplitLogits:
        return value.full()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(full_of, value))
    if type(value) in (list, tuple):
        return type(value)(map(full_of, value))
    if type(value) is dict:
        return {key: full_of(item) for key, item in value.items()}
    if type(value) is slice:
        return slice(*map(full_of, (value.start, value.stop, value.step)))
    return value


def _split_in(value: Any) -> Iterator[SplitLogits]:
    """All split logits in a value."""
    if type(value) is SplitLogits:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _split_in(item)
    elif type(value) is dict:
        yield from _split_in(list(value.values()))


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Step 2: a function of unsharded logits. Raises WrittenError for one that changes them."""
    if function == Tensor.data.__set__:  # type: ignore[attr-defined]
        raise ValueError(
            "the logits are sharded over tensor-parallel ranks, and their data cannot be exchanged: write "
            "x = ... or x.copy_(...) in place of x.data = ..."
        )
    if function in _OF_ONE_TENSOR:
        raise WrittenError
    made = function(*full_of(tuple(args)), **full_of(dict(kwargs)))
    for logits in _split_in([*args, *kwargs.values()]):
        # squeeze_ and its like write no element.
        if logits.full().shape != logits.shape or logits.full().requires_grad != logits.kept.requires_grad:
            raise WrittenError
    return made


_OF_ONE_TENSOR = (Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
"""Gradients of the part would pass these by."""

_ABOUT = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(torch.numel, Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex),
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "ndim", "dtype", "device", "layout", "itemsize", "is_cuda", "is_meta")
        ),
    )
)
"""What a tensor without elements shows itself."""

# Step 1: what is done on the part. Each gives NotImplemented for what needs the full tensor.


def _like(x: SplitLogits, part: Tensor) -> SplitLogits:
    """Logits of their own."""
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
        fits = not kwargs and all(map(_is_number, args))
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
    """A view where PyTorch would make one, and else a copy."""
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
    simple = all(
        p is Ellipsis or isinstance(p, slice) or (isinstance(p, int) and not isinstance(p, bool))
        for p in places
    )
    if not simple or not places:
        return NotImplemented
    named = [p for p in places if p is not Ellipsis]
    reaches_last = len(named) == x.dim() or (Ellipsis in places and places[-1] is not Ellipsis)
    return NotImplemented if reaches_last and places[-1] != slice(None) else _viewed(x, lambda t: t[at])


def _rows(x: SplitLogits, dim: int = 0) -> Any:
    return tuple(x[row] for row in range(len(x))) if dim == 0 and x.dim() > 1 else NotImplemented


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (isinstance(value, nn.Parameter) and value.dim() == 0)


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
    """`F.cross_entropy` as far as parts allow."""
    if type(input) is not SplitLogits or weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    if type(target) is SplitLogits or not isinstance(target, Tensor) or target.is_floating_point():
        return NotImplemented
    if label_smoothing or input.dim() != 2 or target.dim() != 1 or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    storage = input._storage
    return cross_entropy(input.kept, target, ignore_index, reduction, storage.axis, storage.size)
