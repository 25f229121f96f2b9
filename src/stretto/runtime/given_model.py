"""The model that a Runner was made of: what must be true of it before a step, and when it may be read.

A rank trains the parameters that its stages use: the model's own tensors, but of those that are sharded a
part, which is a copy. As long as the user keeps the model:

    1. Before a step each parameter must be the tensor that it was; one that was frozen in the capture must
       not train; no hook may wait for a gradient that another tensor gets; and nothing that this rank trains
       may be stale, as another Runner of the model leaves it that trains it elsewhere. A part follows the
       model's parameter when that is frozen, or trained again.
    2. What is written to the model reaches the parts: they are cut again.
    3. After a step the model's tensors that this rank does not train are marked (`stale_adapter`): to read
       them is refused as soon as an optimizer has stepped, until they have new values.

Puts marks on the model's tensors, which stay when the Runner is gone, and keeps no tensor of it alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.ir.parameters import Parameter
from stretto.runtime.rank_tensors import RankTensors
from stretto.runtime.shards import part_of
from stretto.runtime.stale_adapter import (
    Mark,
    has_hooks,
    mark_of,
    mark_stale,
    unguarded,
    unmark,
    version_of,
)

SAMPLED = 256
"""Elements of a parameter that are compared, to know whether it has trained: optimizers change nearly all."""

AGAIN = "capture the step again, plan it and make a new Runner"

_TAKE = (
    "Take runner.state_dict(), the whole trained model, which every rank must call, or stretto.save; make "
    "averages and optimizers over runner.parameters(); to go on with the plain model, "
    "model.load_state_dict(runner.state_dict())"
)

_LIVE: weakref.WeakSet[GivenModel] = weakref.WeakSet()
_ADDING = threading.Lock()
"""Ranks that are threads make their Runners at the same time."""


@dataclass(slots=True)
class GivenTensor:
    """A parameter in a module of the model, or a buffer that steps write.

    known: the parameter in the plan. here: whether this rank trains any of it. part: what this rank trains of
    it, where that is another tensor. changes: whether steps change it. requires_grad, version: of the tensor,
    when it was last looked at.
    """

    name: str
    module: weakref.ref[nn.Module]
    attribute: str
    tensor: weakref.ref[torch.Tensor]
    known: Parameter | None
    here: bool
    part: torch.Tensor | None
    changes: bool
    requires_grad: bool
    version: int

    @property
    def is_apart(self) -> bool:
        """Whether the model's tensor is another than what is trained, here or on other ranks."""
        return not self.here or self.part is not None


class Owner:
    """Of marks, and of parts: a Runner, with those that share its parts."""

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank = world, rank

    def is_another(self, other: object) -> bool:
        """Whether that is another Runner, and not one that is another rank of the same run, as a thread."""
        assert isinstance(other, Owner)
        return other is not self and (other.world != self.world or other.rank == self.rank)


class GivenModel:
    """Watches the model of one Runner."""

    def __init__(self, model: nn.Module, tensors: RankTensors, shares: GivenModel | None) -> None:
        """tensors: what the runner trains. shares: of the Runner whose parts these are.

        Raises UsageError where the model cannot be trained by the plan."""
        self._rank = tensors
        self._shares = shares
        self._owner: Owner = Owner(tensors.plan.world, tensors.rank) if shares is None else shares._owner
        self._tensors = list(_tensors_of(model, tensors))
        self._first = self._samples()
        self._has_trained = self._looked = False
        job = tensors.plan.job
        known = {parameter.name for parameter in job.parameters}
        given = model.named_parameters(remove_duplicate=False)
        new = [name for name, parameter in given if parameter.requires_grad and name not in known]
        if new and job.trains:
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            raise UsageError(
                f"parameter {new[0]!r}{more} requires a gradient, and the model that was captured did not "
                f"have it: {AGAIN}, or freeze it (requires_grad_(False))"
            )
        self.check()
        with _ADDING:
            _LIVE.add(self)

    def _samples(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        trained = [p for p in self._rank.parameters.values() if p.requires_grad and not p.is_meta]
        return {id(parameter): (parameter, _sample_of(parameter)) for parameter in trained}

    def _is_as_first(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter of this rank has the value that it had when the Runner was made."""
        tensor, sample = self._first.get(id(parameter), (None, None))
        return tensor is None or sample is None or torch.equal(_sample_of(tensor), sample)

    def check(self) -> None:
        """Step 1 of what gradients need. Raises UsageError."""
        with unguarded():
            for one in self._tensors if self._rank.plan.job.trains else ():
                tensor = one.tensor()
                if tensor is not None and one.known is not None:
                    self._check_frozen(one, tensor, one.known)
                    self._check_hooks(one, tensor, one.known)

    def _check_frozen(self, one: GivenTensor, tensor: torch.Tensor, known: Parameter) -> None:
        trains = tensor.requires_grad
        if known.frozen and (trains or (one.part is not None and one.part.requires_grad)):
            raise UsageError(
                f"parameter {known.name!r} was frozen when the step was captured, and requires a gradient "
                f"now, which the plan does not make: {AGAIN}, or freeze it (requires_grad_(False))"
            )
        if one.part is not None and trains != one.requires_grad:
            one.part.requires_grad_(trains)
        one.requires_grad = trains

    def _check_hooks(self, one: GivenTensor, tensor: torch.Tensor, known: Parameter) -> None:
        """Of parameters that other ranks train in parts, too, so that all ranks refuse."""
        in_parts = bool(known.shards) or one.here or tensor.is_meta
        if one.is_apart and one.changes and in_parts and has_hooks(tensor):
            raise UsageError(
                f"parameter {one.name!r} of the model has a hook (register_hook or "
                "register_post_accumulate_grad_hook), which would not run: ranks train their parts of it "
                "as tensors of their own. Register it on the parameter in runner.named_parameters(), "
                "where it is given the gradient of this rank's part; or leave the parameter's module out "
                "of the tp_plan; or remove the hook"
            )

    def synchronise(self) -> None:
        """Step 1 of what is read, and step 2. Raises UsageError."""
        if self._shares is not None:
            self._shares.synchronise()
        anew, self._looked = not self._looked, True
        changed = False
        for one in self._tensors if not self._rank.on_mesh else ():
            tensor, module = one.tensor(), one.module()
            if tensor is None or not one.here:
                continue
            now = None if module is None else getattr(module, one.attribute, None)
            if isinstance(now, nn.Parameter) and now is not tensor:
                raise UsageError(
                    f"{one.name!r} of the model is another tensor since the Runner was made "
                    "(load_state_dict(assign=True), or set by hand), and the Runner trains the one before: "
                    "load without assign, or make a new Runner"
                )
            mark = mark_of(tensor)
            if mark is not None:
                if self._owner.is_another(mark.owner) and mark.is_stale():
                    raise UsageError(
                        "another Runner of this model has trained since, and this one has stale values of "
                        f"{one.name!r}, which it has on other ranks, or in parts of its own. Cut both plans "
                        "alike (split=, the same layout), with shares= where parameters are sharded; or load "
                        "the trained values first, runner.load_state_dict(other.state_dict()); or make this "
                        "Runner of a model of its own (copy.deepcopy)"
                    )
            elif one.part is not None and self._shares is None and self._is_written(one, tensor, anew):
                changed = self._cut(one, tensor) or changed
        if changed and not self._has_trained:
            self._first = self._samples()

    def _is_written(self, one: GivenTensor, tensor: torch.Tensor, anew: bool) -> bool:
        """Whether the model's tensor may have another value than that of which the part was cut. anew: before
        the first step, when what was written through `.data` counts, too."""
        assert one.part is not None
        return version_of(tensor) != one.version or (anew and self._is_as_first(one.part))

    def _cut(self, one: GivenTensor, tensor: torch.Tensor) -> bool:
        """The part gets what the model's tensor has; whether that has values."""
        one.version = version_of(tensor)
        if one.part is None or one.known is None or tensor.is_meta:
            return False
        with torch.no_grad():
            one.part.copy_(part_of(tensor, one.known, self._rank.plan.job, self._rank.coordinates))
        return True

    def changed(self, *, loaded: bool = False) -> None:
        """Step 3: the runner has taken a step, or all of its values were loaded."""
        self._has_trained = self._has_trained or loaded
        mine: set[int] | None = None
        for one in self._tensors if not self._rank.on_mesh else ():
            tensor = one.tensor()
            if tensor is None or (one.known is not None and not one.known.stages):
                continue
            if not one.is_apart:
                if loaded:
                    unmark(tensor)
                continue
            mark = mark_of(tensor)
            if not (one.changes or loaded) or (mark is not None and mark.owner is self._owner):
                continue
            mine = self._trained_in_this_process() if mine is None else mine
            if one.part is not None or id(tensor) not in mine:
                mark_stale(tensor, self._mark(one))

    def _trained_in_this_process(self) -> set[int]:
        """Tensors that Runners of this plan train themselves: ranks that are threads may share a model, which
        is then trained in full."""
        with _ADDING:
            live = [one._rank for one in _LIVE if one._rank.plan is self._rank.plan]
        return {id(t) for kept in live for t in (*kept.parameters.values(), *kept.buffers.values())}

    def _mark(self, one: GivenTensor) -> Mark:
        me, is_buffer = weakref.ref(self), one.known is None

        def is_stale() -> bool:
            it = me()
            return it is None or is_buffer or it.has_trained()

        def written(tensor: torch.Tensor) -> None:
            it = me()
            for mine in () if it is None else it._tensors:
                if it is not None and mine.tensor() is tensor:
                    it._cut(mine, tensor)

        return Mark(_message(one), one.part is None, is_stale, written, self._owner)

    def has_trained(self) -> bool:
        """Whether ranks may have other values than those of the model by now: an optimizer has stepped here,
        or a value of this rank is another than when the Runner was made. A rank without any cannot know."""
        self._has_trained = (
            self._has_trained
            or not self._first
            or bool(self._rank.optimizers)
            or not all(self._is_as_first(tensor) for tensor, _ in self._first.values())
        )
        return self._has_trained

    def refuse_in_optimizer(self, tensor: torch.Tensor) -> None:
        """Raises UsageError for a tensor of the model of which the runner trains a part."""
        for one in self._tensors:
            if one.part is not None and one.tensor() is tensor:
                raise UsageError(_message(one))


def _message(one: GivenTensor) -> str:
    if one.part is None:
        why = "this rank's Runner trains nothing of it, and the model has the value from before"
    else:
        why = (
            "this rank's Runner trains a part of it as its own tensor; the model has the value from "
            "before, and gets no gradient"
        )
    return f"the model's {one.name!r} is not what was trained: {why}. {_TAKE}"


def _tensors_of(model: nn.Module, tensors: RankTensors) -> Iterator[GivenTensor]:
    """What of the model the plan uses, module by module; a tied parameter in each of its modules."""
    job = tensors.plan.job
    names = {parameter.name: parameter for parameter in job.parameters}
    given = model.named_parameters(remove_duplicate=False)
    known = {id(tensor): names[name] for name, tensor in given if name in names}
    changes = {parameter.tied_to for parameter in job.parameters if parameter.grads}
    written = {buffer.name for buffer in job.buffers if buffer.updates and job.trains}
    trained, mine = tensors.by_tie(), {id(buffer) for buffer in tensors.buffers.values()}
    for prefix, module in model.named_modules():
        at = f"{prefix}." if prefix else ""
        make: Callable[..., GivenTensor] = partial(GivenTensor, module=weakref.ref(module))
        for attribute, tensor in module.named_parameters(recurse=False):
            parameter = known.get(id(tensor))
            if parameter is not None:
                here = trained.get(parameter.tied_to)
                yield make(
                    at + attribute,
                    attribute=attribute,
                    tensor=weakref.ref(tensor),
                    known=parameter,
                    here=here is not None,
                    part=None if here is tensor else here,
                    changes=parameter.tied_to in changes,
                    requires_grad=tensor.requires_grad,
                    version=version_of(tensor),
                )
        for attribute, buffer in module.named_buffers(recurse=False):
            if at + attribute in written and id(buffer) not in mine:
                yield make(
                    at + attribute,
                    attribute=attribute,
                    tensor=weakref.ref(buffer),
                    known=None,
                    here=False,
                    part=None,
                    changes=True,
                    requires_grad=False,
                    version=0,
                )


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED)].clone()
