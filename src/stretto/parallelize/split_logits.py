"""Logits whose vocabulary is spread: what stands for the whole tensor in the code of models and losses.

    1. What keeps the vocabulary's dim whole (dtype, views of the other dims, scaling by a number) is done on
       the part, and `F.cross_entropy` of parts communicates three numbers a token (`vocabulary`).
    2. Anything else gathers the logits, once, and works on the gathered tensor or a view of it. Such views
       share its storage, as they would share that of the plain logits.
    3. Part and gathered tensor are equal until one is written to. A write by a number acts on the part while
       nothing is gathered. Every other write acts on the gathered tensor, and the part is out of use from
       then on, for the logits and for all views of them. The version counter of the gathered tensor tells of
       writes through its views, whoever makes them (`x[..., 62:] = v`, `F.relu(x, inplace=True)`, `out=`).

Views of split logits are split logits of the same storage: the operations that lead to them are kept, and
done to the gathered tensor when it is needed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.parallelize.gathered import Storage
from stretto.parallelize.vocabulary import cross_entropy
from stretto.parallelize.wrapper_adapter import without_elements

OneToOne = Callable[[Tensor], Tensor]


class SplitLogits(Tensor):
    """Logits of which this rank has the columns (last dim) of its part of the vocabulary.

    Looks like the whole tensor to the code that gets it, and has no elements of its own, so that nothing
    takes the part for it.
    """

    _storage: Storage
    _part: Tensor
    _chain: OneToOne
    _gathered: Tensor | None

    @staticmethod
    def __new__(cls, part: Tensor, axis: str, size: int) -> SplitLogits:
        return _made(Storage(part, axis, size), part, lambda whole: whole)

    def __init__(self, part: Tensor, axis: str, size: int) -> None:
        pass

    def _like(self, part: Tensor) -> SplitLogits:
        """Logits of their own."""
        return SplitLogits(part, self._storage.axis, self._storage.size)

    def _viewed(self, part: OneToOne, whole: OneToOne | None = None) -> SplitLogits:
        """A view: what is done to the part, and (else the same) to the whole, to get it."""
        own, then, grad = self._chain, whole or part, torch.is_grad_enabled()

        def chain(gathered: Tensor) -> Tensor:
            made = then(own(gathered))
            return made if grad else made.detach()  # it was made where no gradient was wanted

        return _made(self._storage, part(self._part), chain)

    def full(self) -> Tensor:
        """The whole logits, equal on all ranks: a tensor whose storage these logits share from now on."""
        if self._gathered is None:
            gathered = self._storage.gather()
            with torch.enable_grad():
                self._gathered = self._chain(gathered)
        return self._gathered

    def _in_parts(self) -> bool:
        return self._storage.in_parts()

    def _from_now_on_whole(self) -> Tensor:
        whole = self.full()
        self._storage.whole = True
        return whole

    # What the logits are.

    @property
    def held(self) -> Tensor:
        """What this rank has of them."""
        return self._part if self._in_parts() else self.full()

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        if not self._in_parts():
            return self.full().shape
        return torch.Size((*self._part.shape[:-1], self._part.shape[-1] * self._storage.size))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    ndimension = dim
    ndim = property(dim)
    dtype = property(lambda self: self._part.dtype)
    device = property(lambda self: self._part.device)
    layout = property(lambda self: self._part.layout)
    itemsize = property(lambda self: self._part.itemsize)
    is_cuda = property(lambda self: self._part.is_cuda)
    is_meta = property(lambda self: self._part.is_meta)

    def numel(self) -> int:
        return math.prod(self.shape)

    nelement = numel

    def is_floating_point(self) -> bool:
        return self._part.is_floating_point()

    def is_complex(self) -> bool:
        return self._part.is_complex()

    @property
    def requires_grad(self) -> bool:
        return (self._part if self._in_parts() else self.full()).requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> SplitLogits:
        if self.requires_grad != requires_grad:
            self._from_now_on_whole().requires_grad_(requires_grad)
        return self

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, given: Any) -> None:
        raise ValueError(
            "the logits are spread over tensor-parallel ranks, and their data cannot be exchanged: write "
            "x = ... or x.copy_(...) in place of x.data = ..."
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    # What keeps the vocabulary whole is done on the part.

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if not self._in_parts():
            return self._on_the_whole("to", *args, **kwargs)
        given: list[Any] = [a._part if type(a) is SplitLogits else a for a in args]
        made = self._part.to(*given, **kwargs)
        return self if made is self._part else self._like(made)

    def float(self, **kwargs: Any) -> Any:
        return self.to(torch.float32, **kwargs)

    def double(self, **kwargs: Any) -> Any:
        return self.to(torch.float64, **kwargs)

    def half(self, **kwargs: Any) -> Any:
        return self.to(torch.float16, **kwargs)

    def bfloat16(self, **kwargs: Any) -> Any:
        return self.to(torch.bfloat16, **kwargs)

    def type_as(self, other: Any) -> Any:
        return self.to(other.dtype)

    def contiguous(self, **kwargs: Any) -> Any:  # type: ignore[override]
        if kwargs or not self._in_parts():
            return self._on_the_whole("contiguous", **kwargs)
        return self if self._part.is_contiguous() else self._like(self._part.contiguous())

    def clone(self, **kwargs: Any) -> Any:
        if kwargs or not self._in_parts():
            return self._on_the_whole("clone", **kwargs)
        return self._like(self._part.clone())

    def detach(self) -> Any:
        return self._viewed(Tensor.detach) if self._in_parts() else self.full().detach()

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        return self._on_the_whole("view", **kwargs) if kwargs else self._shaped(shape, Tensor.view)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        return self._on_the_whole("reshape", **kwargs) if kwargs else self._shaped(shape, Tensor.reshape)

    def _shaped(self, shape: tuple[Any, ...], call: Callable[[Tensor, Sequence[int]], Tensor]) -> Any:
        if len(shape) == 1 and not isinstance(shape[0], numbers.Integral):
            shape = tuple(shape[0]) if isinstance(shape[0], Sequence) else shape
        numbers_only = all(isinstance(n, numbers.Integral) for n in shape)
        if not numbers_only or not shape or not self._in_parts():
            return call(self.full(), shape[0] if len(shape) == 1 and not numbers_only else shape)
        part, whole = self._part.shape[-1], self.shape[-1]
        rows, known = self._part.numel() // max(part, 1), math.prod(shape[:-1])
        keeps = shape[-1] == whole or (shape[-1] == -1 and known == rows)
        if not keeps:
            return call(self.full(), shape)
        return self._reshaped((*shape[:-1], part), tuple(shape), call)

    def _reshaped(self, part: Sequence[int], whole: Sequence[int], call: Any) -> Any:
        """A view where PyTorch would make one, and else a copy."""
        try:
            self._part.view(part)
        except (RuntimeError, ValueError):  # the latter of a fake tensor
            return self._like(call(self._part, part))
        return self._viewed(lambda t: t.view(part), lambda t: t.view(whole))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        dims = self.dim()
        if (
            not self._in_parts()
            or not dims
            or end_dim % dims >= dims - 1
            or start_dim % dims > end_dim % dims
        ):
            return self.full().flatten(start_dim, end_dim)
        rows = [n for d, n in enumerate(self._part.shape[:-1]) if d < start_dim % dims]
        joined = math.prod(self._part.shape[start_dim % dims : end_dim % dims + 1])
        rows += [joined, *self._part.shape[end_dim % dims + 1 : -1]]
        return self._reshaped((*rows, self._part.shape[-1]), (*rows, self.shape[-1]), Tensor.reshape)

    def __getitem__(self, at: Any) -> Any:
        places = at if isinstance(at, tuple) else (at,)
        simple = self._in_parts() and all(
            p is Ellipsis or isinstance(p, slice) or (isinstance(p, int) and not isinstance(p, bool))
            for p in places
        )
        named = [p for p in places if p is not Ellipsis]
        if simple and places:
            reaches_last = len(named) == self.dim() or (Ellipsis in places and places[-1] is not Ellipsis)
            if not reaches_last or places[-1] == slice(None):
                return self._viewed(lambda t: t[at])
        return self.full()[whole_of(at)]

    def _scaled(self, name: str, by: Any) -> Any:
        if _is_number(by) and self._in_parts():
            return self._like(getattr(self._part, name)(by))
        return getattr(self.full(), name)(whole_of(by))

    def _written(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """In place: on the part by numbers, while nothing else shares its storage."""
        if self._in_parts() and self._storage.gathered is None and all(map(_is_number, args)) and not kwargs:
            getattr(self._part, name)(*args)
            return self
        return self._on_the_whole(name, *args, **kwargs)

    # Anything else is done on the whole.

    def _on_the_whole(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return _called(lambda x, *given, **named: getattr(x, name)(*given, **named), (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is F.cross_entropy:
            found = _cross_entropy(*args, **kwargs)
            if found is not None:
                return found
        if function in _BY_PARTS and args and type(args[0]) is SplitLogits:
            return getattr(args[0], _BY_PARTS[function])(*args[1:], **kwargs)
        if function in _GRADIENTS:
            args[0]._from_now_on_whole()  # gradients of the part would pass it by
        return _called(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise ValueError(
            f"{function} gets logits that are spread over tensor-parallel ranks, in a way that passes "
            "__torch_function__ by: give it x + 0.0, or the head the style 'colwise_gather_output'"
        )


_BY_PARTS: dict[Any, str] = {
    torch.tanh: "tanh", torch.clone: "clone", torch.neg: "__neg__", torch.reshape: "reshape",
    torch.flatten: "flatten", torch.detach: "detach", torch.tanh_: "tanh_", torch.neg_: "neg_",
    torch.numel: "numel", torch.is_floating_point: "is_floating_point",
}  # fmt: skip
"""Functions -> the method that does it on the part."""

_GRADIENTS = (Tensor.register_hook, Tensor.retain_grad)


def _made(storage: Storage, part: Tensor, chain: OneToOne) -> SplitLogits:
    shape = (*part.shape[:-1], part.shape[-1] * storage.size)
    made: SplitLogits = without_elements(SplitLogits, shape, part)
    made._storage, made._part, made._chain, made._gathered = storage, part, chain, None
    return made


def whole_of(value: Any) -> Any:
    """The value with whole logits in the places of split ones, in whatever they are nested."""
    if type(value) is SplitLogits:
        return value.full()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(whole_of, value))
    if type(value) in (list, tuple):
        return type(value)(map(whole_of, value))
    if type(value) is dict:
        return {key: whole_of(item) for key, item in value.items()}
    if type(value) is slice:
        return slice(*map(whole_of, (value.start, value.stop, value.step)))
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
    """A function of whole logits. One that returns what it was given, as in-place ones do, returns the same
    here."""
    given = {id(x.full()): (x, x.full(), x.shape) for x in _split_in([*args, *kwargs.values()])}
    made = function(*whole_of(tuple(args)), **whole_of(dict(kwargs)))
    for logits, whole, shape in given.values():
        if whole.shape != shape:
            logits._from_now_on_whole()  # squeeze_ and its like write no element
    if type(made) is not SplitLogits and isinstance(made, Tensor) and id(made) in given:
        return given[id(made)][0]
    return made


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (isinstance(value, nn.Parameter) and value.dim() == 0)


def _scaling(name: str) -> Callable[..., Any]:
    def operator(self: SplitLogits, by: Any) -> Any:
        return self._scaled(name, by)

    return operator


def _scaling_in_place(name: str) -> Callable[..., Any]:
    def operator(self: SplitLogits, *args: Any, **kwargs: Any) -> Any:
        return self._written(name, *args, **kwargs)

    return operator


def _each(name: str) -> Callable[..., Any]:
    def method(self: SplitLogits) -> Any:
        return self._like(getattr(self._part, name)()) if self._in_parts() else getattr(self.full(), name)()

    return method


for _names, _make in (
    (("__mul__", "__rmul__", "__truediv__"), _scaling),
    (("__imul__", "__itruediv__", "mul_", "div_", "neg_", "tanh_"), _scaling_in_place),
    (("__neg__", "tanh", "neg"), _each),
):
    for _name in _names:
        setattr(SplitLogits, _name, _make(_name))


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` as far as parts allow; None for what needs the whole logits."""
    if type(input) is not SplitLogits or weight is not None or size_average is not None or reduce is not None:
        return None
    if type(target) is SplitLogits or not isinstance(target, Tensor) or not input._in_parts():
        return None
    if label_smoothing or input.dim() != 2 or target.dim() != 1:
        return None
    if target.is_floating_point() or reduction not in ("mean", "sum", "none"):
        return None
    storage = input._storage
    return cross_entropy(input._part, target, ignore_index, reduction, storage.axis, storage.size)
