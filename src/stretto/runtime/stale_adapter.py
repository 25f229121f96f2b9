"""Tensors of a user's model that are not what is trained: every read of one raises.

A marked tensor gets a class of its own, whose `__torch_function__` PyTorch asks before every call:

    what it is (shape, dtype, address, whether it requires a gradient)    answered
    its value: any op, a copy, a view, `.data`, pickling                  refused
    its gradient                                                          refused where it never gets one
    a new value (`copy_`)                                                 taken, and the mark goes

So one mark serves `state_dict`, `torch.save`, `copy.deepcopy`, averages of weights, optimizers and forwards.
`torch.tensor(p)` and DLPack's C functions ask no class, and read the value as it is. Private names:
`torch._C.DisableTorchFunctionSubclass`, `torch.utils._pytree`, and of tensors `_version`, `_backward_hooks`
and `_post_accumulate_grad_hooks`; and that a tensor's `__class__` can be set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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

_ACCESS = ("__get__", "__set__")

VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
"""Attributes that give or set elements; all others describe the tensor."""


class _Marked:
    """What the class of a marked tensor adds to the tensor's own."""

    __slots__ = ()
    _stretto_mark: Any

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "data") if name in _ACCESS else ""
        of_grad = (name, attribute) == ("__get__", "grad")
        if of_grad or (attribute in VALUES if attribute else name not in ABOUT):
            written = args[0] if func is torch.Tensor.copy_ else None
            for tensor in tree_leaves((args, kwargs)):
                mark = mark_of(tensor)
                if mark is not None and tensor is not written and (mark.refuses_grad or not of_grad):
                    raise UsageError(str(mark))
        with unguarded():
            result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.copy_ and (mark := mark_of(result)) is not None:
            unmark(result)
            mark.written()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UsageError(str(self._stretto_mark))

    def __repr__(self) -> str:
        return f"<stale value: {self._stretto_mark}>"


@functools.cache
def _marked_class(plain: Any) -> Any:
    return type(plain)(f"Stale{plain.__name__}", (_Marked, plain), {"__slots__": ()})


def mark_of(tensor: Any) -> Any:
    """The mark of a tensor that has one."""
    return tensor._stretto_mark if isinstance(tensor, _Marked) else None


def mark_stale(tensor: torch.Tensor, mark: Any) -> None:
    """From now on the elements cannot be read; `mark.written()` is called when there are new ones."""
    unmark(tensor)
    tensor._stretto_mark = mark  # type: ignore[attr-defined]
    tensor.__class__ = _marked_class(type(tensor))


def unmark(tensor: torch.Tensor) -> None:
    """The tensor is again what it was."""
    if isinstance(tensor, _Marked):
        tensor.__class__ = type(tensor).__mro__[2]
        del tensor._stretto_mark


def unguarded() -> Any:
    """A context in which marks refuse nothing."""
    return torch._C.DisableTorchFunctionSubclass()


def unmarked(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor whose elements can be read and written, whether it is marked or not."""
    with unguarded():
        return tensor.detach()


def version_of(tensor: torch.Tensor) -> int:
    """Another number after each write to the tensor, but those through `.data`."""
    return -1 if tensor.is_inference() else tensor._version


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook waits for the parameter's gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
