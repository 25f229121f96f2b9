"""Whether ranks can share a module of experts: its forward is tried on random inputs, unsharded and in parts.

What expert-parallel ranks compute in the place of `forward(tokens, chosen, weights)` is, for each token n,

    after     the sum over k of  weights[n, k] * f(tokens[n], chosen[n, k], 1)
    inside    the sum over k of  f(tokens[n], chosen[n, k], weights[n, k])

where f is the forward on the rank that has the expert: with its part of the parameters, its experts
numbered from 0, the rows of all ranks sorted by expert, and rows of zeros behind them. "after" communicates
less; "inside" is for weights that are applied before the experts, or not at all.

A forward that is neither (it adds its input, norms the sum, mixes tokens, or knows experts by number) is
refused. Results and gradients of the full module and its parts are compared, with random parameters of the
real shapes, for tokens that reach all experts evenly, that choose at random, and that all choose the same.
What the code does only for more tokens than the trial has is not seen: as many as the model, up to
`MOST_TOKENS`, or a few where parameters are large.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stretto.errors import UsageError
from stretto.ir.axes import EP

AFTER, INSIDE = "after", "inside"

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Precisions in which a module is tried, the finest first, and the relative difference that each allows.
Assumed."""

DENSE = 1 << 22
"""Elements of a parameter up to which its random values are independent. A larger one is a view in which
experts overlap in memory, and gets no gradient. Assumed."""

MOST_TOKENS = 4096
"""Of a trial. Assumed: seconds of one core for parameters of that size."""

SHIFT = 1040
"""Elements from one expert to the next in such a view. Assumed: kernels want multiples of 16."""

PADDING = 2
"""Rows of zeros behind those of a rank's experts, as buffers have them."""

NUMBER, ANY_NUMBER = "num_experts", "_is_expert_parallel"
"""What modules of `transformers` have, and others may: the number of experts, and whether a number beyond it
is of no expert."""


def weighed(model: nn.Module, name: str, size: int, tokens: Sequence[int], chosen: Sequence[int]) -> str:
    """`AFTER` or `INSIDE`: the way of the module of that name as it is now (training or not), for inputs of
    these shapes. size: ranks. The model is not changed, its tensors not copied. Raises UsageError where the
    module's is none."""
    module = model.get_submodule(name)
    own = {id(one) for one in module.modules()}
    tried = _copied(module, *(one for one in model.modules() if id(one) not in own))
    tried._forward_hooks.clear()
    tried._forward_pre_hooks.clear()
    for one in tried.modules():
        if type(one).__module__ == nn.Dropout.__module__:
            one.p = 0.0  # type: ignore[assignment]  # what it draws is no question of the trial
    with (
        torch.random.fork_rng(devices=[]),
        ThreadPoolExecutor(1) as apart,
    ):  # a thread has no modes of a caller's
        way, fault = apart.submit(_tried, tried, size, tokens, chosen).result()
    if way:
        return way
    raise UsageError(
        f"{EP.name} = {size} ranks cannot share {name} ({type(module).__name__}): {fault}. Each rank calls "
        "its forward with its part of the parameters (dim 0) and one expert a row, numbered from 0 among "
        "these; what comes of a token's experts is added up. Compute everything else in the module around it "
        "(an added input, a norm of the sum, a mean over tokens, a capacity), and take the number of experts "
        f"from parameters or self.num_experts; or leave the module out of ep_plan, or give {EP.name} = 1"
    )


def _tried(module: nn.Module, size: int, tokens: Sequence[int], chosen: Sequence[int]) -> tuple[str, str]:
    """The way, or why there is none."""
    fault = ""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for device in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
        for dtype, tolerance in TOLERANCES.items():
            try:
                sample = _sample(module, tokens, chosen, dtype, device)
                full = _outcome(sample, partial(_full, module))
            except Exception as error:
                fault = f"it fails on random inputs: {_reported(error)}"
                continue
            for way in (AFTER, INSIDE):
                try:
                    result = _outcome(sample, partial(_on_ranks, module, size, way))
                except Exception as error:
                    fault = f"with a rank's experts alone it fails: {_reported(error)}"
                    continue
                fault = (
                    "a rank's experts by themselves give other results or gradients than all (is what it "
                    "makes of a token no sum over the token's experts, or does it depend on other tokens, "
                    "on chance, on the experts' numbers, or on something besides its own parameters, or is "
                    "it not finite for rows of zeros?)"
                )
                if _equal(result, full, tolerance):
                    return way, ""
            return "", fault
    return "", fault


@dataclass(frozen=True, slots=True)
class _Sample:
    """tokens (..., D), chosen and weights (..., K), parameters by name; others (N, D): tokens of the ranks
    before and after this one, which choose the same; loss (..., D): what results are multiplied by."""

    tokens: Tensor
    chosen: Tensor
    weights: Tensor
    parameters: Mapping[str, Tensor]
    others: Tensor
    loss: Tensor


def _sample(
    module: nn.Module, tokens: Sequence[int], chosen: Sequence[int], dtype: torch.dtype, device: str
) -> _Sample:
    generator = torch.Generator().manual_seed(20)
    experts, large = _experts(module), any(p.numel() > DENSE for p in module.parameters())
    count, dims = math.prod(tokens[:-1]), len(tokens)
    choices = math.prod(chosen) // count
    each = max(-(-experts // choices), 0 if large else min(count, MOST_TOKENS) // 4, 4)
    each += -each % (1 << dims)
    even = torch.arange(each * choices).view(each, choices) % experts
    even = torch.randperm(experts, generator=generator)[even]
    anyhow = torch.rand(each, experts, generator=generator).argsort(dim=1)[:, :choices]
    alike = (one[:1].expand(each, choices) for one in (even, anyhow))
    all_chosen = torch.cat((even, anyhow, *alike))
    rows = all_chosen.shape[0]
    leading = (*(2,) * (dims - 2), rows >> (dims - 2))
    is_flat = tuple(tokens[:-1]) not in (tuple(chosen), tuple(chosen[:-1]))
    shape = (*((rows,) if is_flat else leading), choices)[: len(chosen)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def values(parameter: Tensor) -> Tensor:
        if not parameter.is_floating_point():
            raise TypeError(f"it has parameters of {parameter.dtype}")
        shape = parameter.shape
        scale = max(shape[-2] if len(shape) > 1 else 4, 1) ** -0.5
        if parameter.numel() <= DENSE:
            return torch.mul(normal(*shape), scale).requires_grad_()
        each = parameter.numel() // shape[0]
        base = (normal(997 * SHIFT + 1) * scale).repeat((each + SHIFT * shape[0]) // (997 * SHIFT) + 1)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(1, len(shape))]
        view: Tensor = base.as_strided(shape, (SHIFT, *strides))
        return view

    drawn = torch.rand(all_chosen.shape, generator=generator, dtype=torch.float64) + 0.2
    return _Sample(
        normal(*leading, tokens[-1]).requires_grad_(),
        all_chosen.view(shape).to(device),
        drawn.view(shape).to(device, dtype).requires_grad_(),
        {name: values(p) for name, p in module.named_parameters(remove_duplicate=False)},
        normal(rows, tokens[-1]) * 2,
        normal(*leading, tokens[-1]),
    )


def _experts(module: nn.Module) -> int:
    return next(module.parameters(recurse=False)).shape[0]


def _call(module: nn.Module, parameters: Mapping[str, Tensor], *args: Tensor) -> Tensor:
    """The module's forward, which leaves nothing behind in buffers."""
    like = args[0].detach()
    buffers = {name: _buffer(kept, like) for name, kept in module.named_buffers()}
    made: Tensor = functional_call(module, {**parameters, **buffers}, args)
    if made.shape != like.shape:
        raise ValueError(f"of tokens {list(like.shape)} it makes {list(made.shape)}")
    return made


def _full(module: nn.Module, sample: _Sample) -> Tensor:
    return _call(module, sample.parameters, sample.tokens, sample.chosen, sample.weights)


def _on_ranks(module: nn.Module, size: int, way: str, sample: _Sample) -> Tensor:
    """What the ranks make of it together."""
    here, choices = _experts(module) // size, sample.chosen.numel() // len(sample.others)
    x = torch.cat((sample.others, sample.tokens.flatten(0, -2), sample.others))
    chosen, weights = (y.reshape(-1, choices).repeat(3, 1) for y in (sample.chosen, sample.weights))
    made = torch.zeros_like(x)
    empty = x.new_zeros(PADDING, x.shape[1])
    for first in range(0, size * here, here):
        own = chosen.flatten() - first
        rows = ((own >= 0) & (own < here)).nonzero().flatten()
        rows = rows[own[rows].argsort(stable=True)]
        parameters = {
            name: full if "." in name else full[first : first + here]
            for name, full in sample.parameters.items()
        }
        weight_R1 = torch.cat((weights.reshape(-1, 1)[rows], weights.new_zeros(PADDING, 1)))
        given, counts = torch.cat((x[rows // choices], empty)), own[rows].bincount(minlength=here)
        with part_of_experts(module, size):
            call = partial(_call, module, parameters)
            done = rows_by(module, call, given, counts, weight_R1 if way == INSIDE else None)
        done, beyond = done[: len(rows)], done[len(rows) :]
        terms = done if way == INSIDE else done * weight_R1[: len(rows)]
        made = made.index_add(0, rows // choices, terms.to(made.dtype)) + 0 * beyond.sum()
    tokens = len(sample.others)
    return made[tokens : 2 * tokens].view_as(sample.tokens)


@contextmanager
def part_of_experts(module: nn.Module, size: int) -> Iterator[None]:
    """While the context lasts, the module counts one rank's experts."""
    kept = {name: getattr(module, name) for name in (NUMBER, ANY_NUMBER) if hasattr(module, name)}
    try:
        for name, value in kept.items():
            setattr(module, name, value // size if name == NUMBER else True)
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def rows_by(
    module: nn.Module,
    own: Callable[..., Tensor],
    x_RD: Tensor,
    counts_E: Tensor,
    weights_R1: Tensor | None = None,
) -> Tensor:
    """Rows that are sorted by expert, by a forward that takes them with their experts' numbers and weights.
    Rows behind them have the last expert, where the module knows no number of none."""
    row_R = torch.arange(x_RD.shape[0], device=x_RD.device)
    expert_R = torch.searchsorted(counts_E.cumsum(dim=0), row_R, right=True)
    if not hasattr(module, ANY_NUMBER):
        expert_R = expert_R.clamp(max=counts_E.shape[0] - 1)
    ones = x_RD.new_ones(x_RD.shape[0], 1) if weights_R1 is None else weights_R1
    return own(x_RD, expert_R.unsqueeze(1), ones)


def _copied(module: nn.Module, *kept: nn.Module) -> nn.Module:
    """A copy with the same tensors, and the same modules among `kept`."""
    attributes = (value for one in module.modules() for value in vars(one).values())
    tensors = (*module.parameters(), *module.buffers(), *(t for t in attributes if isinstance(t, Tensor)))
    return copy.deepcopy(module, {id(one): one for one in (*tensors, *kept)})


def _buffer(resident: Tensor, like: Tensor) -> Tensor:
    if resident.is_meta:
        generator = torch.Generator().manual_seed(resident.numel())
        resident = torch.rand(resident.shape, generator=generator).to(resident.dtype)
    return resident.to(like.device, like.dtype if resident.is_floating_point() else resident.dtype, copy=True)


def _outcome(sample: _Sample, compute: Callable[[_Sample], Tensor]) -> list[Tensor]:
    """The result, and the gradients of a loss of it."""
    torch.default_generator.manual_seed(0)
    made = compute(sample)
    leaves = [t for t in (sample.tokens, sample.weights, *sample.parameters.values()) if t.requires_grad]
    loss = (made * sample.loss).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [made.detach(), *grads]


def _equal(found: list[Tensor], unsharded: list[Tensor], tolerance: float) -> bool:
    pairs = zip(found, unsharded, strict=True)
    return all(bool((one - other).norm() <= tolerance * other.norm() + 1e-12) for one, other in pairs)


def _reported(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
