"""Backward hooks that only watch are refused: what a hook makes of a gradient is captured, and its code is
not run again.

    hooks of modules     register_full_backward_hook and its like, of one module and of all
    hooks of tensors     register_hook on a value within the forward

One that returns nothing changes no gradient: whatever it does, a log or a counter, the plan's steps would
leave out. Uses private names of `nn.Module`: `_backward_hooks` and `_backward_pre_hooks`, and
`_global_backward_hooks` and `_global_backward_pre_hooks` of its file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all
from torch.overrides import TorchFunctionMode

from stretto.errors import CaptureError


class _Hooks(TorchFunctionMode):
    """Hooks of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook and len(args) == 2:
            args = (args[0], _that_changes(args[1], "a hook on a tensor (register_hook)"))
        return func(*args, **(kwargs or {}))


@contextmanager
def hooks_that_change(model: nn.Module) -> Iterator[None]:
    """While the context lasts, a backward hook that returns nothing raises CaptureError."""
    tables: list[tuple[str, dict[int, Any]]] = [
        ("a backward hook of all modules", table)
        for table in (of_all._global_backward_hooks, of_all._global_backward_pre_hooks)
    ]
    for name, module in model.named_modules():
        what = f"a backward hook of the module {name or type(model).__name__!r}"
        tables += [(what, module._backward_hooks), (what, module._backward_pre_hooks)]
    kept = [(table, dict(table)) for _, table in tables if table]
    try:
        for what, table in tables:
            table.update({key: _that_changes(hook, what) for key, hook in table.items()})
        with _Hooks():
            yield
    finally:
        for table, hooks in kept:
            table.update(hooks)


def _that_changes(hook: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(hook, assigned=(), updated=())
    def called(*given: Any) -> Any:
        made = hook(*given)
        if made is None:
            raise CaptureError(
                f"{what} returns nothing, so it only watches, and a plan's steps would not call it: return "
                "the gradient from a hook that changes it; to watch, remove the hook (handle.remove()) and "
                "register one on the parameters of the Runner (register_hook), or let values of the forward "
                "be seen (stretto.observe)"
            )
        return made

    return called
