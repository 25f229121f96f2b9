"""Tensors whose values are old: every read of one is refused, however it was found.

A tensor that is marked gets a class of its own, whose `__torch_function__` PyTorch asks before every call:

    what it is (shape, dtype, address, whether it requires a gradient)    answered
    its value: any op, a copy, a view, `.data`, pickling                  refused
    its gradient                                                          refused where it never gets one
    a whole new value (`copy_`), once nobody trains it elsewhere          taken, and the mark goes

So one mark serves `state_dict`, `torch.save`, `copy.deepcopy`, averages of weights, optimizers and forwards.
Uses a private name, `torch._C.DisableTorchFunctionSubclass`, and that a tensor's `__class__` can be set.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stretto.errors import UsageError

ABOUT = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "__len__"),
        *("is_inference", "is_shared", "is_pinned", "get_device", "data_ptr", "untyped_storage"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
        *("empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "new_ones"),
    )
)
"""Functions that do not read elements."""

VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
"""Attributes that give or set elements; all others tell what the tensor is."""


@dataclass(frozen=True, slots=True)
class Mark:
    """message: of the refusal. has_grad: whether its gradient may be asked for. is_trained: whether
    somebody still trains what it is a copy of. is_other: whether that may have other values by now; while it
    has not, whoever reads the tensor takes the mark off."""

    message: str
    has_grad: bool
    is_trained: Callable[[], bool]
    is_other: Callable[[], bool] = lambda: True


class _Old:
    """What the class of a marked tensor adds to the tensor's own."""

    __slots__ = ()
    _stretto_mark: Mark

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.Tensor.copy_ and is_old(args[0]) and not mark_of(args[0]).is_trained():
            unmark(args[0])
        reads = _reads(func)
        for tensor in tuple(_marked((args, named))) if reads else ():
            if reads == "value" or not mark_of(tensor).has_grad:
                _refuse(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refuse(self)
        return copy.deepcopy(self, memo)  # of another class now

    def __repr__(self) -> str:
        return f"<old value: {self._stretto_mark.message}>"


def _refuse(tensor: Any) -> None:
    """A marked tensor is read. Raises UsageError, or takes the mark off where the value is no other."""
    if is_old(tensor):
        mark = mark_of(tensor)
        if mark.is_other():
            raise UsageError(mark.message)
        unmark(tensor)


def _reads(func: Callable[..., Any]) -> str:
    """What a function reads of a tensor: its "value", its "grad", or "" for neither."""
    name = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__"):
        return "" if name in ABOUT else "value"
    attribute = getattr(getattr(func, "__self__", None), "__name__", "data")
    if attribute == "grad":
        return "grad" if name == "__get__" else ""
    return "value" if attribute in VALUES else ""


def _marked(given: Any) -> Iterator[Any]:
    if is_old(given):
        yield given
    elif isinstance(given, (tuple, list, Mapping)):
        for one in given.values() if isinstance(given, Mapping) else given:
            yield from _marked(one)


@functools.cache
def _old_kind(kind: Any) -> Any:
    return type(kind)(f"Old{kind.__name__}", (_Old, kind), {"__slots__": ()})


def is_old(tensor: Any) -> bool:
    """Whether it is marked."""
    return isinstance(tensor, _Old)


def mark_of(tensor: Any) -> Mark:
    """That of a marked tensor."""
    mark: Mark = tensor._stretto_mark
    return mark


def mark_old(tensor: torch.Tensor, mark: Mark) -> None:
    """From now on the tensor's elements cannot be read."""
    unmark(tensor)
    tensor._stretto_mark = mark  # type: ignore[attr-defined]
    tensor.__class__ = _old_kind(type(tensor))


def unmark(tensor: torch.Tensor) -> None:
    """The tensor is again what it was."""
    if is_old(tensor):
        tensor.__class__ = type(tensor).__mro__[2]
        del tensor._stretto_mark  # type: ignore[attr-defined]


def unmarked(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor whose elements can be read and written, whether it is marked or not."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()
