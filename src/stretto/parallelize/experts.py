"""Expert parallelism: ranks share a layer's experts, and send each other the rows that these are to compute.

    1. A plan, pattern of module names -> "experts", names the modules that have experts: dim 0 of each of
       their own parameters is the expert. A rank has an equal part of it (GShard, arXiv 2006.16668).
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
back by itself. Gradients are summed along the axis as over dp, but those of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stretto.backend.observe_adapter import observe
from stretto.config import ParallelSettings
from stretto.errors import UsageError
from stretto.ir.axes import EP
from stretto.ir.collectives import ALL_TO_ALL
from stretto.ir.metrics import BUFFER, DROPPED, NO_ROOM
from stretto.ir.program import Shard
from stretto.models.adapters import unwrapped
from stretto.models.dispatch import OfRows, OfSlots, counts_of, dropless, inverse, rows_at, within_capacity
from stretto.parallelize import ops
from stretto.parallelize.expert_trial import INSIDE, part_of_experts, rows_by
from stretto.parallelize.parts import bounds
from stretto.parallelize.unseen import put_forward
from stretto.parallelize.wrapped import named_by, no_module, own_plan

AXIS = EP.name
STYLE = "experts"
OF_PARAMETERS = "grouped_gemm"
"""The style of experts' parameters in plans of `transformers`; that of their module has changed its name."""


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """What is shared. modules: names. shards: parameter name -> how."""

    size: int
    modules: tuple[str, ...]
    shards: Mapping[str, Shard]
    buffer: float | None = None
    slices: int = 1
    each_expert: bool = False
    fails: bool = True


def expert_parallel(model: nn.Module, parallel: ParallelSettings) -> ExpertParallel:
    """Which modules' experts are shared, and how: by the plan of the settings, or the model's own. Raises
    UsageError for a model without experts and sizes that do not fit."""
    size, fails = parallel.ep, parallel.ep_overflow == "error"
    names = experts_in(model, parallel.ep_plan)
    # Without a plan, as `transformers` 4 has them.
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and n.endswith("experts")]
    if not names and not lists:
        raise UsageError(
            f"{type(model).__name__} has no plan for expert parallelism: give one, "
            'ep_plan={"layers.*.mlp.experts": "experts"}, or ep = 1'
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    shards: dict[str, Shard] = {}
    for name in names or lists:
        _check_module(modules, name, size, parallel.pipe_experts)
        own_of = modules[name].named_parameters(recurse=False)
        shards |= {f"{name}.{key}": Shard(AXIS, 0) for key, _ in own_of}
    if parallel.ep_buffer is None and not fails:
        raise UsageError(
            "ep_overflow = 'drop' is about what finds no room in ep_buffer; without one there is room for "
            "all: drop it, or give ep_buffer = 2.0"
        )
    slices, each_expert = parallel.pipe_experts_multi_data, parallel.pipe_experts
    return ExpertParallel(size, names, shards, parallel.ep_buffer, slices, each_expert, fails)


def _check_module(modules: Mapping[str, nn.Module], name: str, size: int, each_expert: bool) -> None:
    """Raises UsageError for a module whose experts ranks cannot share so."""
    module: Any = modules[name]
    if isinstance(module, nn.ModuleList):
        raise UsageError(
            f"{name} has each expert in a module of its own, and ranks share experts along dim 0 of "
            "parameters that have all of a layer's: take transformers 5.17 or newer, which has them so, or "
            "give ep = 1"
        )
    counts = {key: p.shape[0] if p.dim() else 1 for key, p in module.named_parameters(recurse=False)}
    if not any(p.dim() > 1 for p in module.parameters(recurse=False)):
        raise UsageError(
            f"ep_plan: {name} has no parameters of its own whose dim 0 could be the expert: name the module "
            "that has such, or leave the pattern out"
        )
    experts = next(iter(counts.values()))
    odd = [key for key, count in counts.items() if count != experts]
    if odd:
        raise UsageError(
            f"dim 0 of all own parameters of {name} must be the expert, and they have other sizes: "
            f"{', '.join(f'{key} {count}' for key, count in counts.items())}. Put what its experts share "
            f"({odd[0]}) into a module of its own, or give ep = 1"
        )
    if experts % size:
        fits = next(n for n in range(min(size, experts), 0, -1) if experts % n == 0)
        raise UsageError(
            f"{name} has {experts} experts, which cannot be shared equally by {AXIS} = {size} ranks: give an "
            f"{AXIS} that divides them, such as {fits}"
        )
    has_slots = states_how(module) and module.slots(1) is not None
    if each_expert and (not has_slots or experts == size):
        why, way = "serves all, so that it is not known where an expert's begin", "experts a capacity"
        if has_slots:
            why, way = f"has one of them on each of {AXIS} = {size} ranks", f"a smaller {AXIS}"
        raise UsageError(
            f"pipe_experts sends each expert's tokens by themselves, and {name} {why}: cut them with "
            f"pipe_experts_multi_data = 2, or give {way}"
        )


def states_how(module: nn.Module) -> bool:
    """Whether it is of `stretto.models.moe`, or has all that makes one of these."""
    return all(callable(getattr(module, name, None)) for name in ("slots", "of_slots", "of_rows"))


@contextmanager
def sharded_experts(module: nn.Module, how: ExpertParallel, way: str) -> Iterator[None]:
    """While the context lasts, the module computes a rank's experts. Its parameters must already be parts.
    way: of a module that does not say how it computes rows, as `expert_trial.weighed`; else ""."""
    undo = put_forward(module, _forward(module, how, way))
    try:
        with part_of_experts(module, how.size):
            yield
    finally:
        undo()


def _forward(module: nn.Module, how: ExpertParallel, way: str) -> Callable[..., Tensor]:
    own: Any = module  # its methods of these names, or its forward
    of_rows = partial(rows_by, module, module.forward) if way else own.of_rows
    experts = next(module.parameters(recurse=False)).shape[0] * how.size

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x_ND = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen_NK = top_k_index.reshape(x_ND.shape[0], -1)
        weights_NK = top_k_weights.reshape(x_ND.shape[0], -1)
        slots = None if way else own.slots(x_ND.shape[0])
        if slots is None:
            served = partial(_of_rows, own=of_rows, how=how)
            made = dropless(x_ND, chosen_NK, weights_NK, experts, served, way == INSIDE)
        else:
            of_slots = partial(_of_slots, own=own.of_slots, how=how)
            made = within_capacity(x_ND, chosen_NK, weights_NK, experts, slots, of_slots)
        return made.view_as(hidden_states)

    return forward


def other_arguments(module: nn.Module) -> UsageError:
    """What a module's call is refused with that is none of tokens, choices and weights."""
    return UsageError(
        f"{type(module).__name__} is not called with tokens (N, D), the experts that each chose "
        f"(N, K) and their weights (N, K) alone, which {AXIS} ranks send each other: leave it out of "
        "ep_plan, or give ep = 1"
    )


def _of_slots(x_ECD: Tensor, own: Callable[..., Tensor], how: ExpertParallel) -> Tensor:
    E, C, D = x_ECD.shape
    size, here = how.size, E // how.size
    _is_room(C, how.slices, "slots of an expert")
    x_PHCD = x_ECD.view(size, here, C, D)
    each = 1 if how.each_expert else here
    made: list[Tensor] = []
    for first in range(0, here, each):
        these = slice(first, first + each)
        slices = [
            _piece(x_PHCD[:, these, start:end], partial(own, at=these), size)
            for start, end in pairwise(bounds(C, how.slices))
        ]
        made.append(_joined(slices, 2))
    return _joined(made, 1).reshape(E, C, D)


def _piece(x_PHCD: Tensor, own: OfSlots, size: int) -> Tensor:
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


def ep_plan_of(model: nn.Module) -> Mapping[str, str]:
    """The model's own plan, pattern -> style: its attribute `ep_plan` or that of a module in it; in
    `transformers` 5.17 the config of the base model says it."""

    def of_base(module: nn.Module) -> Mapping[str, str]:
        plan = getattr(getattr(module, "config", None), "base_model_ep_plan", None) or {}
        return plan if getattr(module, "base_model", module) is module else {}

    return {
        pattern if style == STYLE else pattern.rpartition(".")[0]: STYLE
        for pattern, style in own_plan(model, "ep_plan", of_base).items()
        if style in (STYLE, OF_PARAMETERS)
    }


def experts_in(model: nn.Module, plan: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The names of the modules that have experts, by the plan or the model's own. Raises UsageError for a
    plan that does not fit the model."""
    modules = dict(model.named_modules(remove_duplicate=plan is None))
    names = list(modules)
    given: dict[str, None] = {}
    for pattern, style in (ep_plan_of(model) if plan is None else plan).items():
        where = f"ep_plan[{pattern!r}]"
        if style != STYLE:
            raise UsageError(f"{where}: unknown style {style!r}; the one that there is: {STYLE!r}")
        result = named_by(pattern, names)
        if plan is not None and not result:
            raise UsageError(f"{where}: {no_module(pattern, names)}")
        given |= dict.fromkeys(unwrapped(modules, name) for name in result)
    return tuple(given)
