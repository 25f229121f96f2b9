"""The model that a Runner was made of: what must be true of it before a step, and when it may be read.

A rank trains the model's own tensors, but of a sharded parameter a part, which is a copy. As long as the user
keeps the model:

    1. Before a step what was frozen in the capture must not train, and no hook may wait for a gradient that
       another tensor gets. A part follows the model's parameter when that is frozen, or trained again.
    2. What is written to the model reaches the parts: they are cut again. Other tensors in its place are
       refused, and values that another Runner of the model has trained since.
    3. After a step the model's tensors that this rank does not train are marked (`stale_adapter`): to read
       them is refused until they have new values.

Marks stay when the Runner is gone, and keep none of its tensors alive.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.ir.parameters import Parameter
from stretto.runtime.rank_tensors import RankTensors, part_of
from stretto.runtime.stale_adapter import has_hooks, mark_of, mark_stale, unguarded, unmark, version_of

AGAIN = "capture the step again, plan it and make a new Runner"

_LIVE: weakref.WeakSet[GivenModel] = weakref.WeakSet()
_ADDING = threading.Lock()
"""Ranks that are threads make their Runners at the same time."""


class Owner:
    """Of marks, and of parts: a Runner, with those that share its parts."""

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank = world, rank


@dataclass(slots=True)
class GivenTensor:
    """A parameter of the model, or a buffer that steps write; and the mark where it is not trained here.

    known: the parameter in the plan. here: whether this rank trains any of it. part: what it trains, where
    that is another tensor. changes: whether steps change it. requires_grad, version: of the tensor, when it
    was last looked at; part_version: of the part, at first. places: the modules that have it, and under
    which attribute.
    """

    name: str
    given: weakref.ref[GivenModel]
    owner: Owner
    tensor: weakref.ref[torch.Tensor]
    known: Parameter | None
    here: bool
    part: weakref.ref[nn.Parameter] | None
    changes: bool
    requires_grad: bool
    version: int
    part_version: int
    places: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)

    @property
    def is_apart(self) -> bool:
        """Whether the model's tensor is another than what is trained, here or on other ranks."""
        return not self.here or self.part is not None

    @property
    def refuses_grad(self) -> bool:
        """Whether a read of its gradient is refused: it never gets one, and the optimizer would not train."""
        return self.part is not None

    def written(self) -> None:
        """The model's tensor may have another value: the part gets it."""
        tensor, given = self.tensor(), self.given()
        part = None if self.part is None else self.part()
        if tensor is None or given is None:
            return
        self.version = version_of(tensor)
        if part is not None and self.known is not None and not tensor.is_meta:
            with torch.no_grad():
                part.copy_(part_of(tensor, self.known, given.rank.plan.job, given.rank.coordinates))

    def __str__(self) -> str:
        why = "this rank's Runner trains nothing of it, and the model has the value from before"
        if self.part is not None:
            why = (
                "this rank's Runner trains a part of it as its own tensor; the model has the value from "
                "before, and gets no gradient"
            )
        return (
            f"the model's {self.name!r} is not what was trained: {why}. Take runner.state_dict(), the full "
            "trained model, which every rank must call, or stretto.save; make averages and optimizers over "
            "runner.parameters(); to go on with the plain model, model.load_state_dict(runner.state_dict())"
        )


class GivenModel:
    """Watches the model of one Runner."""

    def __init__(self, model: nn.Module, rank: RankTensors, shares: GivenModel | None) -> None:
        """rank: what the runner trains. shares: of the Runner whose parts these are.

        Raises UsageError where the model cannot be trained by the plan."""
        self.rank = rank
        self._shares = shares
        self._owner: Owner = Owner(rank.plan.world, rank.rank) if shares is None else shares._owner
        self._tensors = self._given_tensors(model)
        self._synchronised = False
        known = {parameter.name for parameter in rank.plan.job.parameters}
        given = model.named_parameters(remove_duplicate=False)
        new = [name for name, parameter in given if parameter.requires_grad and name not in known]
        if new and rank.plan.job.trains:
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            raise UsageError(
                f"parameter {new[0]!r}{more} requires a gradient, and the model that was captured did not "
                f"have it: {AGAIN}, or freeze it (requires_grad_(False))"
            )
        self.check()
        with _ADDING:
            _LIVE.add(self)

    def _given_tensors(self, model: nn.Module) -> list[GivenTensor]:
        """What of the model the plan uses, each tensor once."""
        job, trained = self.rank.plan.job, self.rank.by_tie()
        names = {parameter.name: parameter for parameter in job.parameters}
        changing = {parameter.tied_to for parameter in job.parameters if parameter.grads}
        written = {buffer.name for buffer in job.buffers if buffer.updates and job.trains}
        mine = {id(buffer) for buffer in self.rank.buffers.values()}
        result: dict[int, GivenTensor] = {}

        def add(name: str, tensor: torch.Tensor, known: Parameter | None) -> None:
            here = None if known is None else trained.get(known.tied_to)
            result[id(tensor)] = GivenTensor(
                name,
                weakref.ref(self),
                self._owner,
                weakref.ref(tensor),
                known,
                here is not None,
                None if here is None or here is tensor else weakref.ref(here),
                known is None or known.tied_to in changing,
                tensor.requires_grad,
                version_of(tensor),
                0 if here is None else version_of(here),
            )

        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in names and id(parameter) not in result:
                add(name, parameter, names[name])
        for name, buffer in model.named_buffers():
            if name in written and id(buffer) not in mine:
                add(name, buffer, None)
        for module in model.modules():
            for attribute, tensor in module.named_parameters(recurse=False):
                if id(tensor) in result:
                    result[id(tensor)].places.append((weakref.ref(module), attribute))
        return list(result.values())

    def check(self) -> None:
        """Step 1. Raises UsageError."""
        with unguarded():
            for one in self._tensors if self.rank.plan.job.trains else ():
                tensor = one.tensor()
                if tensor is not None and one.known is not None:
                    _check_frozen(one, tensor, one.known)
                    _check_hooks(one, tensor, one.known)

    def synchronise(self) -> None:
        """Step 2. Raises UsageError."""
        if self._shares is not None:
            self._shares.synchronise()
        again, self._synchronised = not self._synchronised, True
        for one in self._tensors if not self.rank.on_mesh else ():
            tensor = one.tensor()
            if tensor is None or not one.here:
                continue
            mark = mark_of(tensor)
            if any(isinstance(now, nn.Parameter) and now is not tensor for now in _now_at(one)):
                raise UsageError(
                    f"{one.name!r} of the model is another tensor since the Runner was made "
                    "(load_state_dict(assign=True), or set by hand), and the Runner trains the one before: "
                    "load without assign, or make a new Runner"
                )
            if mark is not None:
                # Another rank of the same run, a thread of this process, may share the model.
                theirs = mark.owner
                another = theirs.world != self._owner.world or theirs.rank == self._owner.rank
                if theirs is not self._owner and another:
                    raise UsageError(
                        "another Runner of this model has trained since, and this one has stale values of "
                        f"{one.name!r}, which it has on other ranks, or in parts of its own. Cut both plans "
                        "alike (split=, the same layout), with shares= where parameters are sharded; or load "
                        "the trained values first, runner.load_state_dict(other.state_dict()); or make this "
                        "Runner of a model of its own (copy.deepcopy)"
                    )
            elif self._shares is None and one.part is not None and (part := one.part()) is not None:
                # Before the first step, what was written through `.data` counts, too.
                uncounted = again and version_of(part) == one.part_version
                if uncounted or version_of(tensor) != one.version:
                    one.written()

    def changed(self, *, loaded: bool = False) -> None:
        """Step 3: the runner has taken a step, or all of its values were loaded."""
        trained: set[int] | None = None
        for one in self._tensors if not self.rank.on_mesh else ():
            tensor = one.tensor()
            if tensor is None or (one.known is not None and not one.known.stages):
                continue
            mark = mark_of(tensor)
            if loaded and not one.is_apart:
                unmark(tensor)
            elif one.is_apart and (one.changes or loaded) and (mark is None or mark.owner is not self._owner):
                trained = self._trained_in_this_process() if trained is None else trained
                if one.part is not None or id(tensor) not in trained:
                    mark_stale(tensor, one)

    def _trained_in_this_process(self) -> set[int]:
        """Ranks that are threads may share a model, which is then trained in full."""
        with _ADDING:
            ranks = [one.rank for one in _LIVE if one.rank.plan is self.rank.plan]
        return {id(t) for rank in ranks for t in (*rank.parameters.values(), *rank.buffers.values())}

    def refuse_in_optimizer(self, tensor: torch.Tensor) -> None:
        """Raises UsageError for a tensor of the model of which the runner trains a part."""
        for one in self._tensors:
            if one.part is not None and one.tensor() is tensor:
                raise UsageError(str(one))


def _now_at(one: GivenTensor) -> list[object]:
    """What the model has now where the tensor was."""
    modules = ((module(), attribute) for module, attribute in one.places)
    return [getattr(module, attribute, None) for module, attribute in modules if module is not None]


def _check_frozen(one: GivenTensor, tensor: torch.Tensor, known: Parameter) -> None:
    trains, part = tensor.requires_grad, None if one.part is None else one.part()
    if known.frozen and (trains or (part is not None and part.requires_grad)):
        raise UsageError(
            f"parameter {known.name!r} was frozen when the step was captured, and requires a gradient "
            f"now, which the plan does not make: {AGAIN}, or freeze it (requires_grad_(False))"
        )
    if part is not None and trains != one.requires_grad:
        part.requires_grad_(trains)
    one.requires_grad = trains


def _check_hooks(one: GivenTensor, tensor: torch.Tensor, known: Parameter) -> None:
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
