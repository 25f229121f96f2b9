"""What of a user's model a Runner's plan uses, tensor by tensor: what this rank trains of each, and where all
ranks hold it. Keeps no tensor of the model alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from stretto.ir.axes import PIPELINE
from stretto.ir.parameters import Shard
from stretto.runtime.held import Held
from stretto.runtime.shards import part_of

SAMPLED = 256
"""Elements of a parameter that are looked at again; whoever loads or draws weights changes all."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where the ranks of a plan hold a parameter: the pipeline's places, and how it is spread. memory: whose
    parts they are, where they are not the model's own tensors."""

    axes: tuple[tuple[str, int], ...]
    places: frozenset[int]
    shards: tuple[Shard, ...]
    memory: object

    def follows(self, other: Where) -> bool:
        """Whether all that is held here is what is trained there."""
        if other.is_everywhere:
            return self.memory is None
        alike = (self.axes, self.shards, self.memory) == (other.axes, other.shards, other.memory)
        return alike and self.places <= other.places

    @property
    def is_everywhere(self) -> bool:
        """Whether every rank trains the model's own tensor."""
        return self.memory is None and len(self.places) == dict(self.axes).get(PIPELINE, 1)


@dataclass(slots=True)
class Own:
    """A parameter in a module of the model, or a buffer that steps write. part: what the runner trains of it,
    and how it is cut; None where that is the parameter itself. here: whether this rank trains any of it.
    sample: of what the part was cut from. trains: whether steps change it."""

    name: str
    module: weakref.ref[nn.Module]
    attribute: str
    tensor: weakref.ref[torch.Tensor]
    part: tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None
    here: bool
    sample: torch.Tensor | None
    trains: bool
    where: Where

    @property
    def is_buffer(self) -> bool:
        """Whether it is no parameter: steps change it, not optimizers."""
        return not isinstance(self.tensor(), nn.Parameter)

    @property
    def is_apart(self) -> bool:
        """Whether the model's tensor is another than what is trained, here or on other ranks."""
        return not self.here or self.part is not None

    def is_in(self, module: nn.Module) -> bool:
        """Whether the module has this very tensor: not while others stand in."""
        return getattr(module, self.attribute, None) is self.tensor()


def owns_of(model: nn.Module, held: Held, memory: object, sampled: bool) -> Iterator[Own]:
    """What of the model the plan uses, module by module; a tied parameter in each of its modules."""
    plan, job = held.plan, held.plan.job
    used = {p.name: p for p in job.parameters if p.stages}
    named = model.named_parameters(remove_duplicate=False)
    known = {id(tensor): used[name] for name, tensor in named if name in used}
    stages: dict[str, set[int]] = {}
    trains: set[str] = set()
    for parameter in used.values():
        stages.setdefault(parameter.tied_to, set()).update(parameter.stages)
        trains |= {parameter.tied_to} if parameter.grads else set()
    written = {b.name: {s for s, _, _ in b.updates} for b in job.buffers if b.updates and job.trains}
    trained, mine = held.by_tie(), {id(buffer) for buffer in held.buffers.values()}

    def where(of: set[int], shards: tuple[Shard, ...], own_memory: bool) -> Where:
        places = frozenset(map(plan.rank_of, of))
        return Where(plan.mesh.sizes, places, shards, memory if own_memory else None)

    for prefix, module in model.named_modules():
        at = f"{prefix}." if prefix else ""
        of, give = weakref.ref(module), weakref.ref
        for attribute, tensor in module.named_parameters(recurse=False):
            known_as = known.get(id(tensor))
            if known_as is None:
                continue
            tie, mine_of_it = known_as.tied_to, trained.get(known_as.tied_to)
            part = None
            if mine_of_it is not None and mine_of_it is not tensor:
                part = mine_of_it, partial(part_of, parameter=known_as, job=job, coordinates=held.coordinates)
            place = where(stages[tie], known_as.shards, bool(known_as.shards) or tensor.is_meta)
            sample = sample_of(tensor) if part is not None and sampled else None
            here = mine_of_it is not None
            yield Own(at + attribute, of, attribute, give(tensor), part, here, sample, tie in trains, place)
        for attribute, buffer in module.named_buffers(recurse=False):
            if at + attribute in written and id(buffer) not in mine:
                place = where(written[at + attribute], (), False)
                yield Own(at + attribute, of, attribute, give(buffer), None, False, None, True, place)


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED)].clone()
