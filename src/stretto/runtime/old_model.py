"""The model that a Runner was made of: whoever takes it for what is trained, where it is not, is told.

A rank trains the parameters that its stages use. Of those that tensor parallelism spreads it trains a part,
which is a copy; those of other stages it does not train at all. So after a step the model's own tensors are
old:

    reading them    is refused (`old_adapter`), until they were loaded again; before any optimizer has
                    stepped, and with values as they were, they can be read
    training them   no gradient is theirs: an optimizer is refused at its first step
    loading them    `model.load_state_dict` reaches the runner, part by part; with assign=True it is refused
    changing them   before the first step, by other ways, is refused at that step

Several Runners of one model are held against each other (`rivals`).

May put hooks on the modules of the user's model, which go inert with the Runner, and marks on its tensors,
which stay. Copies of the model have none. Keeps no tensor of the model alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.runtime.held import Held
from stretto.runtime.old_adapter import Mark, is_old, mark_of, mark_old, unmark
from stretto.runtime.own import Own, owns_of, sample_of
from stretto.runtime.rivals import Rivals
from stretto.runtime.whole_tensors import has_stepped

_TAKE = (
    "Take runner.state_dict(), the whole trained model, which every rank must call, or stretto.save; make "
    "averages and optimizers over runner.parameters(); to go on with the plain model, "
    "model.load_state_dict(runner.state_dict())"
)


class OldModel:
    """Watches over the model of one Runner."""

    def __init__(self, model: nn.Module, held: Held, shares: OldModel | None) -> None:
        """held: what the runner trains. shares: of the Runner whose parts these are.

        Raises UsageError where that Runner holds a parameter on other ranks."""
        self._memory: object = shares._memory if shares is not None else object()
        self._by_module: dict[int, list[Own]] = {}
        self._parts: dict[int, Own] = {}
        owns = [] if held.on_mesh else list(owns_of(model, held, self._memory, sampled=shares is None))
        for own in owns:
            module = own.module()
            assert module is not None
            if id(module) not in self._by_module:
                self._watch(module)
            self._by_module.setdefault(id(module), []).append(own)
            if own.part is not None:
                self._parts.setdefault(id(own.tensor()), own)
        self.rivals = Rivals(held, owns, self._memory, shares is not None)
        trained = [one for one in held.parameters.values() if one.requires_grad and not one.is_meta]
        self._first = [(one, sample_of(one)) for one in trained]
        self._has_trained = False

    def _watch(self, module: nn.Module) -> None:
        me, its = weakref.ref(self), weakref.ref(module)
        module.register_load_state_dict_pre_hook(_Hook("take", me, its))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(_Hook("refuse_replaced", me, its))  # type: ignore[no-untyped-call]

    # What the runner tells.

    def changed(self, *, loaded: bool = False) -> None:
        """The runner's values are others than before: trained, or all of them loaded."""
        if loaded:
            self._has_trained = True
            for own in self._all():
                tensor = own.tensor()
                if tensor is not None and not own.is_apart:
                    unmark(tensor)
            self.rivals.loaded()
        trained: set[int] | None = None
        for own in self._all():
            tensor = own.tensor()
            if tensor is None or not own.is_apart or not (own.trains or loaded) or is_old(tensor):
                continue
            if trained is None:
                trained = self.rivals.trained_in_this_process()
            if id(tensor) not in trained or own.part is not None:
                mark_old(tensor, self._mark(own))
        self.rivals.stepped()

    def _mark(self, own: Own) -> Mark:
        me = weakref.ref(self)
        if own.part is None:
            why = "this rank's Runner trains nothing of it, and the model has the value from before"
        else:
            why = (
                "this rank's Runner trains a part of it as its own tensor; the model has the value from "
                "before, and gets no gradient"
            )
        message = f"the model's {own.name!r} is not what was trained: {why}. {_TAKE}"

        def is_other() -> bool:
            it = me()
            return it is None or own.is_buffer or it.has_trained()

        return Mark(message, own.part is None, lambda: me() is not None, is_other)

    def has_trained(self) -> bool:
        """Whether ranks may have other values than those of the model by now: an optimizer has stepped here,
        or a value of this rank is another than when the Runner was made. A rank without any cannot know."""
        self._has_trained = (
            self._has_trained
            or not self._first
            or has_stepped(tensor for tensor, _ in self._first)
            or any(not torch.equal(sample_of(tensor), sample) for tensor, sample in self._first)
        )
        return self._has_trained

    def check_unchanged(self) -> None:
        """Before the first step: the model's tensors are those of which the runner's parts were cut.

        Raises UsageError, with the parameter and what to do."""
        for own in self._all():
            module, tensor = own.module(), own.tensor()
            if module is None or tensor is None:
                continue
            self.refuse_replaced(module)
            if (
                own.sample is not None
                and not tensor.is_meta
                and not torch.equal(sample_of(tensor), own.sample)
            ):
                raise UsageError(
                    f"{own.name!r} of the model was changed after the Runner was made, which trains its own "
                    "part of it, cut before: change the model first, or give the Runner the values "
                    "(runner.load_state_dict, or model.load_state_dict)"
                )

    def refuse_in_optimizer(self, tensor: torch.Tensor) -> None:
        """Raises UsageError for a tensor of the model of which the runner trains a part."""
        own = self._parts.get(id(tensor))
        if own is not None and own.tensor() is tensor:
            raise UsageError(self._mark(own).message)

    # What hooks tell.

    def take(self, module: nn.Module, values: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """The module is about to load these: what the runner trains of it gets them too."""
        for own in self._by_module.get(id(module), ()):
            value, tensor = values.get(prefix + own.attribute), own.tensor()
            if not isinstance(value, torch.Tensor) or tensor is None or value.shape != tensor.shape:
                continue  # PyTorch says so
            if not own.is_in(module):
                continue
            if own.part is not None:
                part, cut = own.part
                with torch.no_grad():
                    part.copy_(cut(value.to(part.device, part.dtype)))
                own.sample = None if own.sample is None else sample_of(value.to(tensor.dtype))
            unmark(tensor)

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
        return _Hook, ()


def refuse_old(model: nn.Module) -> None:
    """A Runner is about to be made of the model. Raises UsageError where its values are not what another one
    has trained."""
    for tensor in (*model.parameters(), *model.buffers()):
        if is_old(tensor) and mark_of(tensor).is_other():
            raise UsageError(f"a Runner is made of another Runner's model, and {mark_of(tensor).message}")
