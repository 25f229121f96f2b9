"""Optimizers over a Runner's parameters: known to it by their first step, and some refused then.

A rank of tensor or expert parallelism has parts of tensors; one of a pipeline has some of the tensors. An
optimizer that updates each element by itself (AdamW, SGD) needs no more. One that does not would train other
weights than the plain model, so each is tried once, before its first step:

    1. A new optimizer of its class and options updates a small tensor of the parameter's kind; others update
       the halves that ranks would have. Where the updates differ, it looks at the full tensor.
    2. The same with two tensors, together and each alone: where updates differ, one depends on the other.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from stretto.errors import UsageError
from stretto.runtime.part_gradient_adapter import guard_torch_clip
from stretto.runtime.rank_tensors import RankTensors

SIDE = 4
"""Elements of a half along each dim, where the parameter has as many."""

SCALES = (1.0, 1e-3, 1e3)
"""Of the gradients in the steps of a trial: small and large ones, on either side of a limit."""

RATE = 0.1
"""The trial's learning rate: a warm-up begins at 0, which shows nothing."""

TOLERANCE = 0.02
"""Relative; rounding in bfloat16 stays below it, and halves of other magnitudes differ by far more."""

Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank trains of a model. cut: dims along which it has a part. partial: whether the rank has a
    part of any parameter, lacks one, or updates some at a time. owner: dead when the Runner is."""

    name: str
    cut: tuple[int, ...]
    partial: bool
    owner: weakref.ref[RankTensors]


_PIECES = WeakTensorKeyDictionary()
_HERE = threading.local()
_ADDING = threading.Lock()
"""Ranks that are threads make their Runners at the same time."""


class _UntriedError(Exception):
    """Why an optimizer could not be tried."""


def watch(kept: RankTensors) -> None:
    """From now on optimizers over the rank's tensors are known, and tried if these are a part of it all."""
    trained = {p.tied_to for p in kept.plan.job.parameters if p.grads}
    known = [(p, tensor) for p, tensor in kept.known_parameters() if p.tied_to in trained]
    partial = kept.plan.job.updates or len(known) < len(trained)
    partial |= any(p.name in kept.cut_along or p.slot is not None for p, _ in known)
    for p, tensor in known:
        _PIECES[tensor] = Piece(p.name, kept.cut_along.get(p.name, ()), partial, weakref.ref(kept))
    with _ADDING:
        _guard_optimizers()


def piece_of(tensor: torch.Tensor) -> Piece | None:
    """What the tensor is of a live Runner's model."""
    piece: Piece | None = _PIECES.get(tensor)  # type: ignore[no-untyped-call]
    return piece if piece is not None and piece.owner() is not None else None


@functools.cache
def _guard_optimizers() -> None:
    register_optimizer_step_pre_hook(meet)
    guard_torch_clip(lambda tensor: (piece := piece_of(tensor)) is not None and piece.partial)


def meet(optimizer: Optimizer, *_: Any) -> None:
    """An optimizer is to step, with all its parameters. Raises UsageError for one whose updates depend on
    what this rank does not have."""
    if getattr(_HERE, "trying", False):
        return
    pieces = (piece_of(tensor) for group in optimizer.param_groups for tensor in group["params"])
    first = next(filter(None, pieces), None)
    owner = None if first is None else first.owner()
    if first is None or owner is None or optimizer in owner.optimizers:
        return
    for group in optimizer.param_groups if first.partial else ():
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        seen = set()
        for tensor in group["params"]:
            piece = piece_of(tensor)
            if piece is not None:
                kind = (tensor.dim(), piece.cut, tensor.dtype, tensor.device)
                if kind not in seen:
                    seen.add(kind)
                    _try_with(optimizer, options, tensor, piece)
    owner.optimizers.add(optimizer)


def _try_with(optimizer: Optimizer, options: Mapping[str, Any], tensor: torch.Tensor, piece: Piece) -> None:
    name = type(optimizer).__name__
    _HERE.trying = True
    try:
        if piece.cut:
            full, cut = _full(tensor, piece.cut), functools.partial(_halves, dims=piece.cut)
            if off := _difference(optimizer, options, [full], lambda kept: cut(kept[0])):
                raise UsageError(
                    f"{name} looks at a full tensor, and this rank has a part of {piece.name!r} "
                    f"({list(tensor.shape)}): tried on a small tensor and on its halves, its updates differ "
                    f"by {off:.0%}. Take an optimizer that updates each element by itself (AdamW, SGD) for "
                    "parameters of which ranks have parts, or a layout that keeps them full (dp or pp; tp = "
                    "ep = 1; zero = 0, or zero = 1 with owners)"
                )
        two = [_full(tensor, ()), 3 * _full(tensor, ())]
        if off := _difference(optimizer, options, two, lambda kept: [[one] for one in kept]):
            raise UsageError(
                f"{name} updates a parameter by what others are, and this rank has a part of the model's, or "
                "updates some at a time (updates = true): "
                f"tried on two tensors together and on each alone, its updates differ by {off:.0%}. Take an "
                "optimizer that updates each parameter by itself (AdamW, SGD), or a layout in which each "
                "rank has all parameters (dp; pp = tp = ep = 1, zero = 0), without updates in the plan"
            )
    except _UntriedError as why:
        warnings.warn(
            f"{name} could not be tried on parts of tensors ({why}), and this rank has a part of the "
            f"model ({piece.name!r} and others): it trains as in the plain model only if it updates each "
            "element by itself, as AdamW and SGD do",
            stacklevel=6,
        )
    finally:
        _HERE.trying = False


def _full(tensor: torch.Tensor, cut: Sequence[int]) -> torch.Tensor:
    """A small tensor of the parameter's kind, twice as long along the dims that are cut."""
    # Of an empty part, as others have it.
    shape = [min(size or SIDE, SIDE) * (2 if dim in cut else 1) for dim, size in enumerate(tensor.shape)]
    count = torch.Size(shape).numel()
    built = (0.2 * torch.arange(1, count + 1, dtype=torch.float64).mul(1.7).sin()).reshape(shape)
    for dim in cut:  # halves of other magnitudes
        built.narrow(dim, shape[dim] // 2, shape[dim] // 2).mul_(5)
    return built.to(tensor.device, tensor.dtype)


def _halves(full: torch.Tensor, dims: Sequence[int]) -> list[Tensors]:
    kept = [full]
    for dim in dims:
        kept = [half for one in kept for half in one.chunk(2, dim)]
    return [[one] for one in kept]


def _difference(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    full: Tensors,
    cut: Callable[[Tensors], list[Tensors]],
) -> float:
    """The largest difference between updates of a tensor and of its pieces, relative to the largest; 0 for
    what rounding makes. Raises _UntriedError."""
    try:
        together = _updates(optimizer, options, full)
        apart = [_updates(optimizer, options, piece) for piece in cut(full)]
    except Exception as error:
        raise _UntriedError(f"{type(error).__name__}: {error!s:.200}") from error
    most = largest = 0.0
    for step, updated in enumerate(together):
        for want, got in zip(cut(updated), (piece[step] for piece in apart), strict=True):
            for one, other in zip(want, got, strict=True):
                most = max(most, float((one - other).abs().max()))
                largest = max(largest, float(one.abs().max()), float(other.abs().max()))
    if not largest:
        raise _UntriedError("it changed nothing")
    return most / largest if most > TOLERANCE * largest else 0.0


def _updates(optimizer: Optimizer, options: Mapping[str, Any], tensors: Tensors) -> list[Tensors]:
    """By step: how far each tensor is from its start (float64), under a new optimizer of the class."""
    kept = [nn.Parameter(tensor.clone()) for tensor in tensors]
    built = _anew(optimizer, options, kept)
    wants = "closure" in inspect.signature(built.step).parameters
    closure = (lambda: torch.ones((), device=kept[0].device),) if wants else ()
    result = []
    for scale in SCALES:
        for parameter, tensor in zip(kept, tensors, strict=True):
            # By the value's square, so that no ratio of norms is that of a half; of either sign.
            parameter.grad = tensor.square().add(1e-3).mul(scale) * tensor.mul(40).cos().sign()
        built.step(*closure)
        moved = zip(kept, tensors, strict=True)
        result.append([torch.nan_to_num(p.detach().double() - t.double()) for p, t in moved])
    return result


def _anew(optimizer: Optimizer, options: Mapping[str, Any], kept: list[nn.Parameter]) -> Optimizer:
    """A new optimizer of the class, with the options of a group; arguments of its constructor are found
    among these, the defaults, and the attributes that have their names."""
    known = {**vars(optimizer), **optimizer.defaults, **options}
    known["lr"] = torch.full_like(lr, RATE) if isinstance(lr := known.get("lr"), torch.Tensor) else RATE
    _, *wanted = inspect.signature(type(optimizer)).parameters.values()
    given = {
        p.name: copy.deepcopy(known[p.name])
        for p in wanted
        if p.name in known and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if any(isinstance(value, Optimizer) for value in known.values()):
        raise _UntriedError("it steps another optimizer")
    group = {key: known[key] for key in options}
    return type(optimizer)([{**group, "params": kept}], **given)
