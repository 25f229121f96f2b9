"""Expert parallelism: ranks share a layer's experts, and send each other the rows that these are to compute.

    1. The plan names the modules that have experts: dim 0 of each of their own parameters is the expert. A
       rank has an equal part of it (GShard, arXiv 2006.16668).
    2. While the model is captured such a module gets another forward. It is given rows for all experts, sends
       each rank those of its experts (an all-to-all), computes what it received, and sends it back.

Two kinds of rows (`stretto.models.dispatch`):

    (E, C, D)       C slots for each expert: part k of dim 0 goes to rank k, so every part is of one size
    (R, D), counts  sorted by expert, with the number of each expert's rows. How many go where is data, and
                    the shapes of a program are fixed: a rank sends each a buffer of `buffer` times the mean,
                    or one for all its rows (None), and the counts, which are small, before it. Rows beyond
                    it become zero, and the end of the step is an error (`fails`; `runtime.observed`).

Pipe-experts (MindSpeed) cuts what is sent: into `slices` of the slots, or of the buffers, and with
`each_expert` also by a rank's experts, where their slots are known. Each piece goes, is computed and comes
back by itself, so that one communicates under the product of another.

Each rank has tokens of its own: along the axis gradients are summed as over dp, but those of experts, of
which each rank has its own. The module is looked at and, but for its forward, not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stretto.backend.observe_adapter import observe
from stretto.errors import UsageError
from stretto.ir.axes import EP
from stretto.ir.collectives import ALL_TO_ALL
from stretto.ir.metrics import BUFFER, DROPPED, NO_ROOM
from stretto.ir.program import Shard
from stretto.models.dispatch import OfRows, OfSlots, counts_of, dropless, inverse, rows_at, within_capacity
from stretto.parallelize import ops
from stretto.parallelize.expert_plan import (
    check_not_adapted,
    ep_plan_of,
    experts_apart,
    experts_in,
    of_modules,
)
from stretto.parallelize.expert_trial import ExpertTrial, part_of_experts, rows_by
from stretto.parallelize.functions import put_forward
from stretto.parallelize.parts import bounds

AXIS = EP.name
ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
"""What `transformers` calls the arguments of a module of experts."""


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """What is shared. modules: names. shards: parameter name -> how. trials: of modules that do not say
    how they compute rows (`of_rows`). Others: see the module."""

    size: int
    modules: tuple[str, ...]
    shards: Mapping[str, Shard]
    buffer: float | None = None
    slices: int = 1
    each_expert: bool = False
    fails: bool = True
    trials: Mapping[str, ExpertTrial] = field(default_factory=dict, repr=False, compare=False)


def expert_parallel(
    model: nn.Module,
    size: int,
    *,
    plan: Mapping[str, Any] | None = None,
    buffer: float | None = None,
    slices: int = 1,
    each_expert: bool = False,
    fails: bool = True,
) -> ExpertParallel:
    """Which modules' experts are shared, and how. plan: pattern of module names -> "experts"; the model's own
    (`ep_plan`) by default. Raises UsageError for a model without experts and sizes that do not fit."""
    if not (plan if plan is not None else ep_plan_of(model)):
        apart = experts_apart(model)
        if apart is not None:
            raise UsageError(of_modules(model, apart))
        raise UsageError(
            f"{type(model).__name__} has no plan for expert parallelism: give one, "
            'ep_plan={"layers.*.mlp.experts": "experts"}, or ep = 1'
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    result = experts_in(model, plan)
    shards: dict[str, Shard] = {}
    for name in result:
        check_not_adapted(modules, name)
        own_of = dict(modules[name].named_parameters(recurse=False))
        _agree(name, own_of)
        for key, parameter in own_of.items():
            _divides(f"{name}.{key}", parameter.shape[0] if parameter.dim() else 1, size)
            shards[f"{name}.{key}"] = Shard(AXIS, 0)
    if not shards:
        raise UsageError(
            f"no module of {type(model).__name__} that its plan for expert parallelism names "
            f"({', '.join(ep_plan_of(model))}) has parameters of its own: give ep_plan, or ep = 1"
        )
    for name in result if each_expert else ():
        own: Any = modules[name]
        if not _states_how(own) or own.slots(1) is None:
            raise UsageError(
                f"pipe_experts sends each expert's tokens by themselves, and {name} serves all, so that "
                "it is not known where an expert's begin: cut them with pipe_experts_multi_data = 2, or give "
                "experts a capacity"
            )
        experts = next(modules[name].parameters(recurse=False)).shape[0]
        if experts == size:
            raise UsageError(
                f"pipe_experts sends each expert's tokens by themselves, and {AXIS} = {size} ranks have one "
                f"each of {name}: cut them with pipe_experts_multi_data = 2, or give a smaller {AXIS}"
            )
    if buffer is None and not fails:
        raise UsageError(
            "ep_overflow = 'drop' is about what finds no room in ep_buffer; without one there is room for "
            "all: drop it, or give ep_buffer = 2.0"
        )
    trials: dict[str, ExpertTrial] = {}
    for name in result:
        if not _states_how(modules[name]):
            served = (one for one in trials.values() if one.serves(modules[name]))
            trials[name] = next(served, None) or ExpertTrial(model, name, size)
    return ExpertParallel(size, result, shards, buffer, slices, each_expert, fails, trials)


def _states_how(module: nn.Module) -> bool:
    """Whether it is of `stretto.models.moe`, or has all that makes one of these."""
    return all(callable(getattr(module, name, None)) for name in ("slots", "of_slots", "of_rows"))


def _agree(name: str, parameters: Mapping[str, Tensor]) -> None:
    """Raises UsageError for parameters whose dim 0 cannot be the expert in all."""
    sizes = {key: p.shape[0] if p.dim() else 1 for key, p in parameters.items()}
    odd = [key for key, size in sizes.items() if size != next(iter(sizes.values()))]
    if odd:
        raise UsageError(
            f"dim 0 of all own parameters of {name} must be the expert, and they have other sizes: "
            f"{', '.join(f'{key} {size}' for key, size in sizes.items())}. Put what its experts share "
            f"({odd[0]}) into a module of its own, or give ep = 1"
        )


def _divides(name: str, experts: int, size: int) -> None:
    if experts % size:
        fits = next(n for n in range(min(size, experts), 0, -1) if experts % n == 0)
        raise UsageError(
            f"{name} has {experts} experts, which cannot be shared equally by {AXIS} = {size} ranks: give an "
            f"{AXIS} that divides them, such as {fits}"
        )


@contextmanager
def sharded_experts(model: nn.Module, how: ExpertParallel) -> Iterator[None]:
    """While the context lasts, the modules compute a rank's experts. Parameters must already be parts."""
    modules = dict(model.named_modules(remove_duplicate=False))
    with ExitStack() as undo:
        for module, name in {modules[name]: name for name in how.modules}.items():
            undo.enter_context(part_of_experts(module, how.size))
            undo.callback(put_forward(module, _forward(module, how, how.trials.get(name))))
        yield


def _forward(module: nn.Module, how: ExpertParallel, trial: ExpertTrial | None) -> Callable[..., Tensor]:
    """The forward of a module with some of the experts: its signature is that of its kind in
    `transformers`."""
    own: Any = module  # its methods of these names, or its forward
    of_rows = own.of_rows if trial is None else partial(rows_by, module, module.forward)
    experts = next(module.parameters(recurse=False)).shape[0] * how.size

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *(kwargs.pop(key) for key in ARGUMENTS[len(args) :] if key in kwargs))
        if kwargs or not _are_of_experts(given):
            raise UsageError(
                f"{type(module).__name__} is not called with tokens (N, D), the experts that each chose "
                f"(N, K) and their weights (N, K) alone, which {AXIS} ranks send each other: leave it out of "
                "ep_plan, or give ep = 1"
            )
        hidden_states, top_k_index, top_k_weights = given
        x_ND = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen_NK = top_k_index.reshape(x_ND.shape[0], -1)
        weights_NK = top_k_weights.reshape(x_ND.shape[0], -1)
        inside = trial is not None and trial.weighed(module, *given[:2]) == "inside"
        slots = own.slots(x_ND.shape[0]) if trial is None else None
        if slots is None:
            served = partial(_of_rows, own=of_rows, how=how)
            made = dropless(x_ND, chosen_NK, weights_NK, experts, served, inside)
        else:
            of_slots = partial(_of_slots, own=own.of_slots, how=how)
            made = within_capacity(x_ND, chosen_NK, weights_NK, experts, slots, of_slots)
        return made.view_as(hidden_states)

    return forward


def _are_of_experts(given: Sequence[Any]) -> bool:
    if len(given) != len(ARGUMENTS) or not all(isinstance(x, Tensor) for x in given):
        return False
    tokens, chosen, weights = given
    fits = chosen.shape == weights.shape and chosen.numel() % max(tokens.shape[:-1].numel(), 1) == 0
    return fits and not chosen.is_floating_point() and weights.is_floating_point()


def _of_slots(x_ECD: Tensor, own: Callable[..., Tensor], how: ExpertParallel) -> Tensor:
    E, C, D = x_ECD.shape
    size, here = how.size, E // how.size
    _is_room(C, how.slices, "slots of an expert")
    x_PHCD = x_ECD.view(size, here, C, D)
    each = 1 if how.each_expert else here
    made: list[Tensor] = []
    for first in range(0, here, each):
        slices = [
            _piece(
                x_PHCD[:, first : first + each, start:end], partial(own, at=slice(first, first + each)), size
            )
            for start, end in pairwise(bounds(C, how.slices))
        ]
        made.append(_joined(slices, 2))
    return _joined(made, 1).reshape(E, C, D)


def _piece(x_PHCD: Tensor, own: OfSlots, size: int) -> Tensor:
    """Some slots of some of each rank's experts: there, computed, and back."""
    _, H, C, D = x_PHCD.shape
    came = ops.exchange(x_PHCD.reshape(size * H, C, D), AXIS, size).view(size, H, C, D)
    made = own(came.transpose(0, 1).reshape(H, size * C, D))
    back = made.view(H, size, C, D).transpose(0, 1).reshape(size * H, C, D)
    return ops.exchange(back, AXIS, size).view(size, H, C, D)


def _is_room(room: int, slices: int, what: str) -> None:
    if slices > room:
        raise UsageError(
            f"pipe_experts_multi_data = {slices} cuts the {room} {what}, which are fewer: give {room} or less"
        )


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _of_rows(
    x_RD: Tensor, counts_E: Tensor, weights_R1: Tensor | None = None, *, own: OfRows, how: ExpertParallel
) -> Tensor:
    R, size, E = x_RD.shape[0], how.size, counts_E.shape[0]
    here = E // size
    room = R if how.buffer is None else min(R, math.ceil(how.buffer * R / size))  # rows of one rank's buffer
    _is_room(room, how.slices, "rows of a rank's buffer")
    row_R = torch.arange(R, device=x_RD.device)

    # 1. What each rank gets: a row's place in the buffer of its expert's rank; one place more is for none.
    wanted_P = counts_E.view(size, here).sum(dim=1)
    most = wanted_P.max()
    over_mean = most.double() * size / R
    observe(BUFFER, over_mean, "max")
    if how.fails and room < R:
        observe(NO_ROOM, torch.where(most > room, over_mean, 0.0), "max")
    start_P = wanted_P.cumsum(dim=0) - wanted_P
    to_R = torch.searchsorted(wanted_P.cumsum(dim=0), row_R, right=True).clamp(max=size - 1)
    at_R = row_R - start_P[to_R]
    place_R = torch.where(at_R < room, to_R * room + at_R, size * room)
    row_of_place = torch.full((size * room + 1,), R, device=x_RD.device).scatter(0, place_R, row_R)[:-1]

    # 2. The counts go first; those of rows that found no room are taken off, the last experts' first.
    ends_PH = counts_E.view(size, here).cumsum(dim=1).clamp(max=room)
    sent_PH = ends_PH.diff(dim=1, prepend=torch.zeros_like(ends_PH[:, :1]))
    came_PH = ops.communicate(ALL_TO_ALL, sent_PH, AXIS, size)
    if not how.fails:
        observe(DROPPED, counts_E - sent_PH.flatten())

    # 3. What came is sorted by expert: each buffer is already, and has empty places behind its rows.
    before_PH = came_PH.cumsum(dim=1)
    sent = [
        rows_at(rows, row_of_place, place_R.unsqueeze(0)).view(size, room, -1)
        for rows in (x_RD, weights_R1)
        if rows is not None
    ]
    made: list[Tensor] = []
    for start, end in pairwise(bounds(room, how.slices)):
        came = [
            ops.exchange(each[:, start:end].reshape(size * (end - start), -1), AXIS, size) for each in sent
        ]
        place = torch.arange(start, end, device=x_RD.device).expand(size, end - start).contiguous()
        expert = torch.searchsorted(before_PH, place, right=True).flatten()
        order = expert.argsort(stable=True)
        went = inverse(order)
        x, *weights = (rows_at(each, order, went.unsqueeze(0)) for each in came)
        done = own(x, counts_of(expert, here + 1)[:here], *weights)
        back = ops.exchange(rows_at(done, went, order.unsqueeze(0)), AXIS, size)
        made.append(back.view(size, end - start, -1))
    return rows_at(_joined(made, 1).flatten(0, 1), place_R, row_of_place.unsqueeze(0))
