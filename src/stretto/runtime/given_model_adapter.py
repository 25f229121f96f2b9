"""The values of a model belong to the Runner that was made of it.

A rank trains the model's own tensors, or a copy of its part of one. What it does not train is taken when its
Runner is made: PyTorch asks a tensor's class before each call; this one shows shape and dtype, and does not
read, write, freeze or hook. Private: `_C`, `_parameters`, `_backward_hooks`, `_post_accumulate_grad_hooks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import _C, nn
from torch.utils.weak import WeakTensorKeyDictionary

from stretto.errors import UsageError
from stretto.runtime.rank_tensors import RankTensors
from stretto.runtime.transport import Transport

ABOUT = ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "__len__")
VALUES = ("data", "grad", "T", "mT", "H", "mH", "real", "imag")  # other attributes are about the tensor
_OWNERS: Any = WeakTensorKeyDictionary()  # tensor -> weak references to what Runners of its model have


class TakenValue:
    """What the class of a taken tensor, which has the tensor's name, adds to the tensor's own."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, attribute = func.__name__, getattr(getattr(func, "__self__", None), "__name__", "data")
        if name not in ABOUT and (name != "__get__" or attribute in VALUES):
            raise _refusal(cls.__name__)
        with _C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"the model's {what} is not what is trained: the Runner that is made of a model has its values. Read "
        "runner.state_dict(), write runner.load_state_dict(), on all ranks; optimizers, averages, hooks take "
        "runner.parameters(); to train others, capture again; for a plain model, give it a deep copy; for a "
        "second Runner of the model, capture both with one split (split=[...])"
    )


def check_given(tensors: RankTensors, given: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises UsageError for parameters of the model that the plan does not train as they ask."""
    known = {p.name: p for p in tensors.plan.job.parameters}
    for name, tensor in given if tensors.plan.job.trains else ():
        if tensor.requires_grad and (name not in known or known[name].frozen):
            raise _refusal(f"{name!r}, which was frozen when it was captured, or not there, but trains now,")
        parts = name in known and (known[name].shards or known[name].kept)
        apart = tensor.is_meta or tensors.on_mesh or parts
        if apart and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
            raise _refusal(f"{name!r}, which has a hook,")


def take(model: nn.Module, tensors: RankTensors, transport: Transport) -> None:
    """The model's values are the Runner's from now on; every rank must call it."""
    plan, mine = tensors.plan, weakref.ref(tensors)
    for tensor in (*tensors.parameters.values(), *tensors.buffers.values()):
        _OWNERS.setdefault(tensor, []).append(mine)
    transport.all_gather(None)  # ranks that are threads may share the model
    used = {p.name for p in plan.job.parameters if p.stages} | {b.name for b in plan.job.buffers if b.updates}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        kind: Any = type(tensor)
        trained = any(getattr(one(), "plan", None) is plan for one in _OWNERS.get(tensor, ()))
        if name in used and not (trained or tensors.on_mesh or issubclass(kind, TakenValue)):
            tensor.__class__ = type(kind)(repr(name), (TakenValue, kind), {"__slots__": ()})
            _OWNERS.setdefault(tensor, []).append(mine)
    transport.all_gather(None)  # no Runner is gone before all have looked


@nn.modules.module.register_module_parameter_registration_hook
def _keep(module: nn.Module, attribute: str, new: nn.Parameter) -> None:
    old = module._parameters.get(attribute)
    if old is not None and old is not new and any(one() is not None for one in _OWNERS.get(old, ())):
        raise _refusal(f"{attribute!r}, which is replaced,")
