"""PyTorch's global state while a model is traced, and back as it was when that is over.

The state is the process's. Ranks that are threads trace one after the other (`ONE_TRACE`), and what is
refused is refused to the thread that traces.

Code that has no place in a graph is refused here: a backward of its own, and backward hooks that only watch.
Private corners of PyTorch (2.11 to 2.13), like `torch_adapter`:

    torch.compiler._is_compiling_flag, _is_exporting_flag   what model code reads of `torch.export`
    torch._C._set_mkldnn_enabled                            recurrent layers as plain ops
    torch.utils.checkpoint._checkpoint_hook                 whether the model asks to recompute
    torch.autograd.Function.apply                           what runs a backward within a backward
    torch._library.simple_registry.singleton                checks that the exporter would make inputs for
    torch._C._ForceDispatchKeyGuard, _dispatch_tls_local_*  what a failed transform leaves switched off
    loggers of torch._functorch and torch._subclasses       tracebacks of the exporter's own
    nn.Module._backward_hooks, _backward_pre_hooks, and the global ones of its file
    torch._C._get_dispatch_mode                             whether it is this thread that traces
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._library import simple_registry
from torch.nn.modules import module as of_all

from stretto.capturing.explain import INTERNAL
from stretto.capturing.substitutes import PyTorchCalls
from stretto.errors import CaptureError

ONE_TRACE = threading.RLock()
"""Held while a model is traced: the state is the process's, whose threads may be ranks."""


def _traces() -> bool:
    """Whether this thread traces, or runs a backward for one that does (autograd hands its modes on)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextmanager
def tracing_state() -> Iterator[None]:
    """Everything that this room sets, for as long as the context lasts."""
    with (
        ONE_TRACE,
        _transforms_ended(),
        _checkpoints_told() as asked,
        _no_inner_backward(asked),
        exporting(),
        _plain_ops(),
        _checks_dropped(),
    ):
        yield


@contextmanager
def _transforms_ended() -> Iterator[None]:
    """A transform of `torch.func` that fails within PyTorch has guards in its frames, which switch autograd
    off for good when the frames are freed: they are freed here, and what is switched off is as it was."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        try:
            yield
        except RuntimeError as error:
            if INTERNAL in str(error):
                traceback.clear_frames(error.__traceback__)
            raise


@contextmanager
def _checks_dropped() -> Iterator[None]:
    """Let the exporter drop checks of values by `torch.linalg`, which have effects in newer releases, and for
    which it makes tokens, inputs of the graph. What they check is seen by `calls_adapter.OpsSeen`."""
    entry = simple_registry.singleton.find("aten::_linalg_check_errors")
    owner: Any = getattr(entry, "effect", None)
    if owner is None or owner.effect is None:
        yield
        return
    kept = owner.effect
    owner.register(None)
    try:
        yield
    finally:
        owner.register(kept)


@contextmanager
def exporting(on: bool = True) -> Iterator[None]:
    """Tell model code that it is being exported, as `torch.export` does: models (Hugging Face's among them)
    ask `torch.compiler.is_compiling()` before they look at the values of tensors."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = on
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags


@contextmanager
def _plain_ops() -> Iterator[None]:
    """Keep the exporter's log out of the user's terminal, compiled code eager, and oneDNN's recurrent layers,
    which save nothing for their backward when they run without autograd, in their plain form."""
    loggers = [logging.getLogger(name) for name in ("torch._functorch", "torch._subclasses.fake_tensor")]
    levels = [logger.level for logger in loggers]
    mkldnn = torch._C._get_mkldnn_enabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _checkpoints_told() -> Iterator[list[bool]]:
    """Warn once when the model asks for activation checkpointing, of which a graph keeps no trace. Gives what
    is filled when it does."""
    hook = torch.utils.checkpoint._checkpoint_hook
    enter = hook.__init__
    asked: list[bool] = []

    def noted(self: Any, frame: Any) -> None:
        if _traces():
            asked.append(True)
        enter(self, frame)

    hook.__init__ = noted  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        hook.__init__ = enter  # type: ignore[method-assign]
        if asked:
            warnings.warn(
                "the model asks for activation checkpointing (torch.utils.checkpoint), which has no effect: "
                "activations are kept from the forward to the backward, and the plan's peak memory counts "
                "them. Give recompute='full', 'selective' or a limit to Parallel (parallel.recompute in "
                "a settings file) instead",
                stacklevel=2,
            )


_BACKWARD = torch.autograd.backward


@contextmanager
def _no_inner_backward(asked: list[bool]) -> Iterator[None]:
    """Refuse code that runs a backward of its own: what it adds to `.grad` is no part of any graph.

    Functions that do so in their backward are refused where they are called: nothing calls their backward
    while the graph is made if they get what needs no gradient but by `requires_grad_`, and the gradients of
    all that is in them would be lost. What re-entrant checkpointing wraps is called as it is; where its
    inputs require no gradient it trains nothing, as PyTorch has it.
    """
    backward, function = torch.autograd.backward, torch.autograd.Function
    apply = function.__dict__["apply"]

    def refuse(*args: Any, **kwargs: Any) -> None:
        if not _traces():
            return backward(*args, **kwargs)
        raise CaptureError(
            "the code runs a backward of its own, whose gradients no plan has: let loss(model, microbatch) "
            "return the loss, of which capture makes the backward, and take gradients within it by "
            "torch.autograd.grad"
        )

    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if not _traces() or not _runs_backward(kind.backward):
            return apply.__func__(kind, *args, **kwargs)
        if not issubclass(kind, torch.utils.checkpoint.CheckpointFunction):
            raise CaptureError(
                f"the function {kind.__name__} runs a backward of its own within the backward, whose "
                "gradients no plan has: call what it wraps as it is; what is computed again is for "
                "recompute='full', 'selective' or a limit of Parallel to decide"
            )
        function, _, *given = args
        torch.utils.checkpoint.check_backward_validity(given)  # warns where nothing of it is trained
        trains = any(isinstance(one, torch.Tensor) and one.requires_grad for one in given)
        asked.append(True)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            return function(*given)

    torch.autograd.backward = refuse
    function.apply = classmethod(applied)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.backward = backward
        function.apply = apply  # type: ignore[method-assign]


def _runs_backward(method: Any) -> bool:
    result = inspect.unwrap(method)
    code = getattr(result, "__code__", None)
    if code is None:
        return False
    named = any(result.__globals__.get(name) is _BACKWARD for name in code.co_names)
    return named or ("backward" in code.co_names and bool({"autograd", "enable_grad"} & {*code.co_names}))


def _registered(function: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    if function is torch.Tensor.register_hook and len(args) == 2:
        args = args[0], _that_changes(args[1], "a hook on a tensor (register_hook)")
    return function(*args, **named)


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
        with PyTorchCalls(_registered):
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
