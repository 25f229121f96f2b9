"""What capture does with PyTorch's private corners around each run of the forward (2.11 to 2.13):

torch._subclasses.functional_tensor.FunctionalTensor, and the slots of torch.fx.experimental.proxy_tensor
                                                which node makes a tensor
nn.Module._parameters, _buffers                 other tensors in their places
torch._C.DisableTorchFunction, and of torch.utils._python_dispatch
    _disable_current_modes, TorchDispatchMode   looking at real tensors while a graph is made, and at its ops
torch._ops.OpOverload, OpOverloadPacket,        what is an op, and writes; the elements of a constant
    FakeTensor.constant
torch.utils._pytree                             arguments of calls, flat
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

from stretto.backend import ctc_adapter
from stretto.backend.dispatch_adapter import draws as draws_of
from stretto.capturing.explain import COMMUNICATES
from stretto.errors import CaptureError

COUNTED = ("aten", "prims")
"""Namespaces whose ops count what they write."""


def nodes_of(
    tensors: Mapping[int, torch.Tensor],
) -> tuple[torch.fx.Graph, Any, dict[int, torch.fx.Node]] | None:
    """The graph under way, the module that has its constants, and the nodes that make tensors; None where no
    graph is made."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    nodes = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, FunctionalTensor):
            tensor = tensor.from_functional()
        slot = get_proxy_slot(tensor, mode.tracer, None)
        if slot is not None:
            nodes[key] = slot.proxy.node
    tracer: Any = mode.tracer
    return tracer.graph, tracer.root, nodes


@contextmanager
def untraced() -> Iterator[None]:
    """While the context lasts, ops are no part of the graph under way, and may read real tensors."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def writes_uncounted(function: Any) -> bool:
    """Whether a call may write to its arguments and no version counter shows it: of another library's op that
    is traced, only the schema does."""
    if isinstance(function, torch._ops.OpOverload):
        return function.namespace not in COUNTED and function._schema.is_mutable
    if isinstance(function, torch._ops.OpOverloadPacket):
        names = function.overloads()  # type: ignore[no-untyped-call]
        return any(writes_uncounted(getattr(function, name)) for name in names)
    return False


class NotConstantError(Exception):
    """A value does not follow from the calls that made it."""


class _OfConstants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if draws_of(op, args, named) or "empty" in op.overloadpacket.__name__:
            raise NotConstantError
        return op(*args, **named)


@contextmanager
def of_constants() -> Iterator[None]:
    """As `untraced`, without gradients. Raises NotConstantError for an op that draws or leaves elements
    unset."""
    with untraced(), torch.no_grad(), _OfConstants():  # type: ignore[no-untyped-call]
        yield


class OpsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the ops of a forward.

    infos: tensors in which LAPACK reports whether it could take a matrix: 0 where it could. PyTorch raises an
    error where one is not 0; a graph has no values to look at."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.infos: list[torch.Tensor] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dispatched(op) and op.namespace == "c10d":
            raise CaptureError(COMMUNICATES)
        if op is torch.ops.aten._linalg_check_errors.default:
            self.infos.append(args[0])
            return None
        if op is ctc_adapter.PYTORCHS:
            op = ctc_adapter.LOSS
        return op(*args, **(kwargs or {}))

    def not_a_number(self, value: torch.Tensor) -> torch.Tensor:
        """The value, NaN with all its gradients where PyTorch would have raised an error."""
        for info in self.infos:
            value = value * torch.where((info != 0).any(), torch.nan, 1.0).to(value.dtype)
        return value


@contextmanager
def replaced(model: nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While the context lasts, each parameter and buffer is what `change(name, tensor)` gives; ties stay."""
    made: dict[int, torch.Tensor] = {}
    kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for module, sub in model.named_modules():
            for table in (sub._parameters, sub._buffers):
                for name, tensor in list(table.items()):
                    if tensor is not None:
                        kept.append((table, name, tensor))
                        if id(tensor) not in made:
                            made[id(tensor)] = change(_path(module, name), tensor)
                        table[name] = made[id(tensor)]
        yield
    finally:
        for table, name, tensor in kept:
            table[name] = tensor


@contextmanager
def buffers_in_place(model: nn.Module) -> Iterator[None]:
    """Let a forward that puts another tensor in a buffer's place write it into the buffer at its end, since
    the exporter sees only what is written in place. Raises CaptureError where it cannot be so."""
    tables = [(name, sub._parameters, sub._buffers) for name, sub in model.named_modules()]
    kept = [(dict(parameters), dict(buffers)) for _, parameters, buffers in tables]
    yield
    for (module, parameters, buffers), (own, before_buffers) in zip(tables, kept, strict=True):
        # Who parametrizes a parameter for a time gives it back, as a buffer: it is a plain tensor here.
        moved = {key: p for key, p in own.items() if key not in parameters and buffers.get(key) is p}
        if moved:
            now = {**parameters, **{key: buffers.pop(key) for key in moved}}
            parameters.clear()
            parameters.update({key: now.pop(key) for key in own if key in now} | now)
        changed = [key for key, p in own.items() if parameters.get(key) is not p]
        if changed:
            raise CaptureError(
                f"the forward puts another tensor in the place of parameter {_path(module, changed[0])!r}: "
                "let it compute a tensor under another name, or write into a buffer"
            )
        for key, before in before_buffers.items():
            now = buffers.get(key)
            if now is before or before is None:
                continue
            if now is None or now.shape != before.shape or now.dtype != before.dtype:
                what = "nothing" if now is None else f"{now.dtype}{list(now.shape)}"
                raise CaptureError(
                    f"the forward puts {what} in the place of buffer {_path(module, key)!r}, which is "
                    f"{before.dtype}{list(before.shape)}: write into it in place, with its shape and dtype"
                )
            with torch.no_grad():
                before.copy_(now)
            buffers[key] = before


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def is_dispatched(target: object) -> TypeGuard[torch._ops.OpOverload]:
    """Whether a node calls an op of the dispatcher (and not a control flow operator or Python code)."""
    return isinstance(target, torch._ops.OpOverload)


def constant_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real elements of a constant that the graph carries; None when they are not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor.detach()
    if tensor.constant is not None:
        return tensor.constant.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.numel() == 0 else None


def draws(node: torch.fx.Node) -> bool:
    """Whether a node draws from the generator."""
    return is_dispatched(node.target) and draws_of(node.target, node.args, node.kwargs)


def constant_key(value: Any) -> Hashable:
    """Equal for equal constants of graphs."""
    with untraced():
        elements = constant_value(value) if isinstance(value, torch.Tensor) else None
        return id(value) if elements is None else (elements.dtype, elements.shape, repr(elements.tolist()))
