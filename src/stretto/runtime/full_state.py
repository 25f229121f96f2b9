"""The full model's values, gathered from all ranks under the names of the plain model's, and put back.

1. Each rank reports what it owns (`Runner.owns`): boxes of full tensors.
2. Rank by rank, box by box, they are broadcast; anyone who wants the full tensors copies each to where it
   lies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from stretto.errors import UsageError, listed
from stretto.ir.program import Job
from stretto.runtime.all_or_none import together
from stretto.runtime.rank_tensors import RankTensors, full_spec, part_of
from stretto.runtime.transport import Transport

LANE = "state"
_CALLING = threading.Lock()
"""Ranks that are threads may share a model, and one at a time has other tensors put in it."""


Entry = str | torch.Tensor
"""What a tensor of the plain model is: by its name among a rank's parts (`model.<first name of the tie>`,
`buffer.<name>`); or a tensor that no stage uses, which stays as it was."""


@dataclass(frozen=True, slots=True)
class PlainState:
    """How the plain model's `state_dict` is made. What other ranks use is named, and not kept alive.

    entries: by the keys of the `state_dict`, whatever names hooks give them. model: where values are made by
    the model's own code (`get_extra_state`, a hook), the model that makes them; entries are then by the
    names of parameters and buffers.
    """

    entries: dict[str, Entry]
    model: nn.Module | None = None

    def with_extra_state(self) -> dict[str, nn.Module]:
        """The model's modules that have extra state, by name."""
        modules = () if self.model is None else self.model.named_modules()
        plain = nn.Module.get_extra_state
        return {name: module for name, module in modules if type(module).get_extra_state is not plain}


def plain_state(model: nn.Module, job: Job) -> PlainState:
    """How the model's `state_dict` is made."""
    used = {p.name: p.tied_to for p in job.parameters if p.stages}
    buffers = {b.name for b in job.buffers if b.stages or b.updates}
    named: dict[str, Entry] = {}
    by_id: dict[int, Entry] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = by_id.get(id(parameter), parameter)
        named[name] = by_id[id(parameter)] = f"model.{used[name]}" if name in used else known
    for name, buffer in model.named_buffers(remove_duplicate=False):
        named[name] = by_id[id(buffer)] = f"buffer.{name}" if name in buffers else buffer
    kept = model.state_dict(keep_vars=True)
    if all(id(value) in by_id for value in kept.values()):
        return PlainState({key: by_id[id(value)] for key, value in kept.items()})
    return PlainState(named, model)


def gather(
    tensors: RankTensors, transport: Transport, plain: PlainState, only_on: int | None
) -> dict[str, torch.Tensor]:
    """`Runner.state_dict`."""
    if only_on is not None and not 0 <= only_on < transport.size:
        raise UsageError(f"only_on = {only_on}: the ranks are 0 to {transport.size - 1}")
    entries = plain.entries
    absent = [key for key, entry in entries.items() if not isinstance(entry, str) and entry.is_meta]
    if absent:
        raise UsageError(
            f'the model has {listed(map(repr, absent))} on "meta", which no stage uses and no one has given '
            "a value. Save what the stages have (stretto.save)"
        )
    wanted = only_on is None or only_on == tensors.rank
    full_tensors = _gather_full(tensors, transport, wanted)
    result = {key: _value(entry, full_tensors) for key, entry in entries.items()} if wanted else {}
    if plain.model is None:
        return result
    return together(transport, lambda: _made(plain.model, result) if wanted else {})


def _value(entry: Entry, full_tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return full_tensors[entry] if isinstance(entry, str) else entry.detach().clone().cpu()


class _Called(nn.Module):
    """A model as a part of a module whose forward calls something of it."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self) -> Any:
        return self._call(self.model)


def _with_values(model: nn.Module, values: Mapping[str, torch.Tensor], call: Callable[[Any], Any]) -> Any:
    """`call(model)` while the model has other tensors, by their names."""
    with _CALLING:
        given = {f"model.{name}": tensor for name, tensor in values.items()}
        return torch.func.functional_call(_Called(model, call), given, ())


def _made(model: Any, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    own = {(value.data_ptr(), value.shape, value.dtype): value for value in values.values()}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = own.get((value.data_ptr(), value.shape, value.dtype))
        return value.detach().clone().cpu() if known is None else known

    built = _with_values(model, values, lambda plain: plain.state_dict())
    return {key: copied(value) for key, value in built.items()}


def take_first_copys_buffers(evaluated: RankTensors, trained: RankTensors, transport: Transport) -> None:
    """An evaluation reads the buffers of the model that `gather` gives; every rank must call it."""
    names = evaluated.of_first_copy(trained.plan)
    if not names:
        return
    keys = {f"buffer.{name}" for name in names}
    full_tensors = _gather_full(trained, transport, True, keys)
    for name, buffer in evaluated.named_buffers():
        if name in names:
            buffer.copy_(full_tensors[f"buffer.{name}"])


def _gather_full(
    tensors: RankTensors, transport: Transport, wanted: bool, keys: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """Steps 1 and 2. keys: what is gathered; None for all."""
    boxes = [
        (name, part.full_shape, *box)
        for name, part in tensors.owned_parts().items()
        for box in part.boxes
        if keys is None or name in keys
    ]
    table = [(name, full, box.dtype, offsets, tuple(box.shape)) for name, full, offsets, box in boxes]
    gathered = transport.all_gather(table)
    if transport.size > 1:
        plan = tensors.plan
        transport.open((*plan.communicators, plan.everyone(LANE)), tensors.device, plan.mesh)
    full_tensors: dict[str, torch.Tensor] = {}
    for rank, owned in enumerate(gathered):
        for k, (name, full, dtype, offsets, shape) in enumerate(owned):
            if rank == tensors.rank:
                box = boxes[k][3].contiguous()
            else:
                box = torch.empty(shape, dtype=dtype, device=tensors.device)
            if transport.size > 1:
                transport.broadcast(LANE, box, rank).wait()
            if wanted:
                if name not in full_tensors:
                    full_tensors[name] = torch.empty(full, dtype=dtype)
                pp_rank = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
                full_tensors[name][pp_rank].copy_(box)
    return full_tensors


class LeftKeys(NamedTuple):
    """What was not loaded: keys of the model that the values lack, and keys of theirs that the model has not.
    The names are PyTorch's."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def put(
    tensors: RankTensors, transport: Transport, plain: PlainState, values: Mapping[str, Any], strict: bool
) -> LeftKeys:
    """`Runner.load_state_dict`."""
    tensors.refuse_on_mesh()
    job, entries, model = tensors.plan.job, plain.entries, plain.model
    if model is None:
        left = together(transport, lambda: _check(job, entries, values, strict))
    else:
        full_tensors = _gather_full(tensors, transport, True)
        named = {key: _value(entry, full_tensors) for key, entry in entries.items()}
        left = together(transport, lambda: _loaded(model, named, values, strict))
        values = named
    named_keys = {entry: key for key, entry in entries.items() if isinstance(entry, str) and key in values}
    with torch.no_grad():
        for parameter, mine in tensors.known_parameters():
            given = named_keys.get(f"model.{parameter.tied_to}")
            if given is not None:
                full = values[given].to(mine.device, mine.dtype)
                mine.copy_(part_of(full, parameter, job, tensors.coordinates))
        buffers = {f"buffer.{name}": buffer for name, buffer in tensors.named_buffers()}
        for key, entry in entries.items():
            own = buffers.get(entry) if isinstance(entry, str) else entry
            if own is not None and key in values and not own.is_meta:
                own.copy_(values[key])
    return left


def _loaded(
    model: nn.Module, named: Mapping[str, torch.Tensor], values: Mapping[str, Any], strict: bool
) -> LeftKeys:
    """Load values into tensors as the model's own code does. named: the tensors, by name."""
    try:
        left = _with_values(model, named, lambda plain: plain.load_state_dict(values, strict))
    except RuntimeError as error:
        gathered = "; ".join(line.strip() for line in str(error).splitlines()[1:] or [str(error)])
        raise UsageError(
            f"load_state_dict: {gathered} Give what the plain model's state_dict() has, or strict=False"
        ) from error
    return LeftKeys(left.missing_keys, left.unexpected_keys)


def _check(job: Job, entries: Mapping[str, Entry], values: Mapping[str, Any], strict: bool) -> LeftKeys:
    """Raises UsageError for keys that are missing or too many, other shapes, and ties that come apart."""
    shapes = {f"model.{p.tied_to}": full_spec(job, p).shape for p in job.parameters}
    shapes |= {f"buffer.{b.name}": b.spec.shape for b in job.buffers}
    ties: dict[str, list[str]] = {}
    for key, entry in entries.items():
        tied = isinstance(entry, str) and entry.startswith("model.")
        ties.setdefault(str(entry) if tied else f" {key}", []).append(key)
    missing = [keys[0] for keys in ties.values() if not any(key in values for key in keys)]
    unexpected = [key for key in values if key not in entries]
    if strict and (missing or unexpected):
        gathered = [f"it lacks {listed(map(repr, missing))}"] if missing else []
        gathered += [f"the model has no {listed(map(repr, unexpected))}"] if unexpected else []
        raise UsageError(
            f"load_state_dict: {' and '.join(gathered)}; give what the plain model's state_dict() has, "
            "or strict=False"
        )
    for key, value in values.items():
        if key not in entries:
            continue
        entry = entries[key]
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"load_state_dict: {key!r} is no tensor ({type(value).__name__})")
        want = shapes[entry] if isinstance(entry, str) else tuple(entry.shape)
        if tuple(value.shape) != want:
            raise UsageError(
                f"load_state_dict: {key!r} has the shape {list(value.shape)}, and the model's full tensor "
                f"{list(want)}: give full tensors, on every rank"
            )
    for keys in ties.values():
        given = [key for key in keys if key in values]
        for other in given[1:]:
            one, two = values[given[0]], values[other]
            if one is not two and not torch.equal(one.to(two), two):
                raise UsageError(
                    f"load_state_dict: {given[0]!r} and {other!r} are one tensor in the model, and are given "
                    "two values: give one of them"
                )
    return LeftKeys(missing, unexpected)
