"""The model that a Runner was made of: whoever takes it for what is trained, where it is not, is told.

A rank trains the parameters that its stages use. Of those that tensor parallelism spreads it trains a part,
which is a copy; those of other stages it does not train at all. So after a step the model's own tensors are
old:

    reading them    `model.state_dict()`, and what saves by it, is refused, until they were loaded again
    using them      a forward of the model, or a Runner that is made of it, is warned of
    training them   an optimizer that has them is refused at its first step
    loading them    `model.load_state_dict` reaches the runner, part by part; with assign=True it is refused
    changing them   before the first step, by other ways, is refused at that step

May put hooks on the modules of the user's model; they go inert with the Runner, and copies of the model
have none. Keeps no tensor of the model alive.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stretto.errors import UsageError

Cut = Callable[[torch.Tensor], torch.Tensor]
"""From a whole to this rank's part."""

_TAKE = (
    "Take runner.state_dict(), the whole trained model, which every rank must call, or stretto.save; to go "
    "on with the plain model, model.load_state_dict(runner.state_dict())"
)

SAMPLED = 256
"""Elements of a parameter that are looked at again; whoever loads or draws weights changes all."""

_LIVE: weakref.WeakSet[OldModel] = weakref.WeakSet()
_TRAINED: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Tensors of models that Runners of this process train themselves, by id: ranks that are threads may share a
model, which then is trained as a whole."""
_ADDING = threading.Lock()
"""Ranks that are threads make their Runners at the same time."""


@dataclass(slots=True)
class Own:
    """A parameter in a module of the model. part: what the runner trains of it, and how it is cut; None where
    that is the parameter itself. here: whether this rank trains any of it. sample: of what the part was cut
    from. fresh: the version of the runner's values that the model has."""

    name: str
    module: weakref.ref[nn.Module]
    attribute: str
    tensor: weakref.ref[torch.Tensor]
    part: tuple[torch.Tensor, Cut] | None
    here: bool
    sample: torch.Tensor | None
    fresh: int = 0

    @property
    def is_apart(self) -> bool:
        """Whether the model's tensor is another than what is trained, here or on other ranks."""
        return not self.here or self.part is not None


class OldModel:
    """Watches over the model of one Runner. version: counts what changed the runner's values."""

    def __init__(
        self, model: nn.Module, trained: Mapping[str, tuple[nn.Parameter, Cut]], elsewhere: frozenset[str]
    ) -> None:
        """trained: name in the model -> what this rank trains of it, the model's own tensor or a part.
        elsewhere: names of what only other ranks train."""
        self.version = 0
        self._by_module: dict[int, list[Own]] = {}
        self._warned = False
        self._parts: dict[int, Own] = {}
        for prefix, module in model.named_modules():
            for attribute, tensor in module.named_parameters(recurse=False):
                name = f"{prefix}.{attribute}" if prefix else attribute
                part, here = trained.get(name), name in trained
                if not here and name not in elsewhere:
                    continue
                if part is not None and part[0] is tensor:
                    part, _TRAINED[id(tensor)] = None, tensor
                sample = _sample(tensor) if part is not None else None
                own = Own(name, weakref.ref(module), attribute, weakref.ref(tensor), part, here, sample)
                self._by_module.setdefault(id(module), []).append(own)
                if part is not None:
                    self._parts.setdefault(id(tensor), own)
            if id(module) in self._by_module:
                self._watch(module)
        if any(own.is_apart for own in self._all()):
            model.register_forward_pre_hook(_Hook("warn_of_use", weakref.ref(self), weakref.ref(model)))
        with _ADDING:
            _LIVE.add(self)
        if self._parts:
            _watch_optimizers()

    def _watch(self, module: nn.Module) -> None:
        me, its = weakref.ref(self), weakref.ref(module)
        module.register_load_state_dict_pre_hook(_Hook("take", me, its))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(_Hook("refuse_replaced", me, its))  # type: ignore[no-untyped-call]
        if any(own.is_apart for own in self._by_module[id(module)]):
            module.register_state_dict_pre_hook(_Hook("refuse_reading", me, its))  # type: ignore[no-untyped-call]

    # What the runner tells.

    def changed(self) -> None:
        """The runner's values are others than before."""
        self.version += 1

    def check_unchanged(self) -> None:
        """Before the first step: the model's tensors are those of which the runner's parts were cut.

        Raises UsageError, with the parameter and what to do."""
        for own in self._all():
            module, tensor = own.module(), own.tensor()
            if module is None or tensor is None:
                continue
            self.refuse_replaced(module)
            if own.sample is not None and not tensor.is_meta and not torch.equal(_sample(tensor), own.sample):
                raise UsageError(
                    f"{own.name!r} of the model was changed after the Runner was made, which trains its own "
                    "part of it, cut before: change the model first, or give the Runner the values "
                    "(runner.load_state_dict, or model.load_state_dict)"
                )

    def refuse_in_optimizer(self, tensor: torch.Tensor) -> None:
        """Raises UsageError for a tensor of the model of which the runner trains a part."""
        own = self._parts.get(id(tensor))
        if own is not None and own.tensor() is tensor:
            raise UsageError(
                f"the optimizer has the model's own {own.name!r}, which gets no gradient: this rank's Runner "
                "trains a part of it as a tensor of its own. Make the optimizer over runner.parameters() "
                "(or runner.named_parameters(), for groups)"
            )

    # What hooks tell.

    def refuse_reading(self, module: nn.Module, prefix: str = "", keep_vars: bool = False) -> None:
        """Raises UsageError for values of the module that are not what is trained."""
        if keep_vars:
            return
        own = next(filter(self._is_stale, self._by_module.get(id(module), ())), None)
        if own is not None:
            what = "a part of it as its own tensor" if own.part is not None else "nothing of it"
            raise UsageError(
                f"the model's {own.name!r} is not what was trained: this rank's Runner trains {what}, and "
                f"the model has the value from before. {_TAKE}"
            )

    def warn_of_use(self, *_: Any, what: str = "this is a forward of a Runner's old model") -> None:
        """Warn, once, where values of the model that a computation reads are not what is trained."""
        if self._warned or not self.version:
            return
        for own in filter(self._is_stale, self._all()):
            module = own.module()
            if (
                module is not None and getattr(module, own.attribute, None) is own.tensor()
            ):  # not in a capture
                self._warned = True
                warnings.warn(
                    f"{what}, whose {own.name!r} (and more) is not what was trained: a Runner trains its own "
                    f"part of it, or none, and the model has the value from before. {_TAKE}",
                    stacklevel=4,
                )
                return

    def _is_stale(self, own: Own) -> bool:
        tensor = own.tensor()
        return (
            own.is_apart
            and tensor is not None
            and own.fresh != self.version
            and _TRAINED.get(id(tensor)) is not tensor
        )

    def take(self, module: nn.Module, values: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """The module is about to load these: what the runner trains of it gets them too."""
        for own in self._by_module.get(id(module), ()):
            value, tensor = values.get(prefix + own.attribute), own.tensor()
            if not isinstance(value, torch.Tensor) or tensor is None or value.shape != tensor.shape:
                continue  # PyTorch says so
            if own.part is not None:
                part, cut = own.part
                with torch.no_grad():
                    part.copy_(cut(value.to(part.device, part.dtype)))
                own.sample = _sample(value.to(tensor.dtype))
            own.fresh = self.version

    def refuse_replaced(self, module: nn.Module, *_: Any) -> None:
        """Raises UsageError where the module has another parameter than the one that is trained."""
        for own in self._by_module.get(id(module), ()):
            tensor, now = own.tensor(), getattr(module, own.attribute, None)
            if own.here and tensor is not None and now is not tensor and isinstance(now, nn.Parameter):
                raise UsageError(
                    f"{own.name!r} of the model is another tensor since the Runner was made "
                    "(load_state_dict(assign=True), or set by hand), and the Runner trains the one before: "
                    "load without assign, or make a new Runner"
                )

    def _all(self) -> Iterator[Own]:
        for owns in self._by_module.values():
            yield from owns


class _Hook:
    """Calls a method of the watch for one module, as long as both live; inert on the module's copies, and on
    those read from a file."""

    def __init__(
        self,
        what: str = "",
        old: Callable[[], OldModel | None] = lambda: None,
        module: Callable[[], nn.Module | None] = lambda: None,
    ) -> None:
        """what: the method. old, module: weak references."""
        self._what, self._old, self._module = what, old, module

    def __call__(self, module: nn.Module, *given: Any) -> None:
        old = self._old()
        if old is not None and self._module() is module:
            getattr(old, self._what)(module, *given)

    def __deepcopy__(self, _: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._module()
        if self._what == "refuse_reading" and module is not None:
            self(module)  # torch.save(model)
        return _Hook, ()


def warn_if_old(model: nn.Module) -> None:
    """A Runner is about to be made of a model that another one, still there, has trained elsewhere."""
    tensors = {id(tensor) for tensor in model.parameters()}
    for old in _live():
        if any(id(own.tensor()) in tensors for own in old._all()):
            old.warn_of_use(what="a Runner is made of another Runner's old model")


def _live() -> list[OldModel]:
    with _ADDING:
        return list(_LIVE)


@functools.cache
def _watch_optimizers() -> None:
    """Once a process."""
    register_optimizer_step_pre_hook(_refuse_old)


def _refuse_old(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """An optimizer steps: none of its parameters is one whose gradient the step never writes.

    One that has a gradient is being trained as a plain model beside the Runner.
    """
    for old in _live():
        for tensor in (p for group in optimizer.param_groups for p in group["params"]) if old.version else ():
            if tensor.grad is None:
                old.refuse_in_optimizer(tensor)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED)].clone()
