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
What the code does only for more tokens than the trial's is not seen: these are as many as the model's, up to
`MOST_TOKENS`, or a few where parameters are large.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stretto.errors import UsageError
from stretto.ir.axes import EP

WAYS = ("after", "inside")

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

ANY_NUMBER = "_is_expert_parallel"
ATTRIBUTES: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("num_experts", lambda experts, ranks: experts // ranks),
    (ANY_NUMBER, lambda *_: True),
)
"""What modules of `transformers` have, and others may: the number of experts, and whether a number beyond it
is of no expert."""


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


class ExpertTrial:
    """The trial of the module of that name. size: ranks. The model is not changed, its tensors not copied."""

    def __init__(self, model: nn.Module, name: str, size: int) -> None:
        self._real = module = model.get_submodule(name)
        inside = set(module.modules())
        self._module = _copied(module, *(m for m in model.modules() if m not in inside))
        for one in self._module.modules():
            if type(one).__module__ == nn.Dropout.__module__:
                one.p = 0.0  # type: ignore[assignment]  # what it draws is no question of the trial
        self._name = f"{name} ({type(module).__name__})"
        self._size = size
        self._experts = next(module.parameters(recurse=False)).shape[0]
        self._found: dict[tuple[Any, ...], str] = {}

    def serves(self, module: nn.Module) -> bool:
        """Whether the trial of another module is this one's: it is of the same code, with the same attributes
        and shapes, and both have no buffers."""
        ones, others = [*module.modules()], [*self._real.modules()]
        shapes = [[(n, p.shape, p.dtype) for n, p in m.named_parameters()] for m in (module, self._real)]
        kept = [*module.buffers(), *self._real.buffers()]
        if len(ones) != len(others) or shapes[0] != shapes[1] or kept:
            return False
        return all(
            type(a) is type(b)
            and vars(a).keys() == vars(b).keys()
            and all(map(_same, vars(a).values(), vars(b).values()))
            for a, b in zip(ones, others, strict=True)
        )

    def weighed(self, module: nn.Module, tokens: Tensor, chosen: Tensor) -> str:
        """Which of `WAYS` is the module's as it is now (training or not), for inputs of these shapes. Raises
        UsageError where none is."""
        trains = tuple(one.training for one in module.modules())
        choices = chosen.numel() // tokens.shape[:-1].numel()
        flat = tokens.shape[:-1] not in (chosen.shape, chosen.shape[:-1])
        large = any(p.numel() > DENSE for p in self._module.parameters())
        count = 0 if large else min(tokens.shape[:-1].numel(), MOST_TOKENS)
        key = (trains, count, tokens.shape[-1], tokens.dim(), choices, chosen.dim(), flat)
        if key not in self._found:
            with ThreadPoolExecutor(1) as apart:  # another thread has none of the modes of tracing
                self._found[key] = apart.submit(self._tried, *key).result()
        if (result := self._found[key]) not in WAYS:
            raise UsageError(
                f"{EP.name} = {self._size} ranks cannot share {self._name}: {result}. Each rank calls its "
                "forward with its part of the parameters (dim 0) and one expert a row, numbered from 0 among "
                "these; what comes of a token's experts is added up. Compute everything else in the module "
                "around it (an added input, a norm of the sum, a mean over tokens, a capacity), and take the "
                "number of experts from parameters or self.num_experts; or leave the module out of ep_plan, "
                f"or give {EP.name} = 1"
            )
        return result

    def _tried(self, trains: tuple[bool, ...], *shapes: Any) -> str:
        """One of `WAYS`, or else why there is none."""
        for one, training in zip(self._module.modules(), trains, strict=True):
            one.training = training
        faults: dict[torch.dtype, str] = {}
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        with torch.random.fork_rng(devices=[]):
            for device in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
                for dtype, tolerance in TOLERANCES.items():
                    try:
                        sample = self._sample(dtype, device, *shapes)
                        full = _outcome(sample, self._full)
                    except Exception as error:
                        faults[dtype] = f"it fails on random inputs: {_reported(error)}"
                        continue
                    return self._compared(sample, full, tolerance)
        own = next(self._module.parameters(recurse=False)).dtype
        return faults.get(own, faults[torch.float64])

    def _compared(self, sample: _Sample, unsharded: list[Tensor], tolerance: float) -> str:
        fault = ""
        for way in WAYS:
            try:
                result = _outcome(sample, partial(self._on_ranks, way=way))
            except Exception as error:
                fault = f"with a rank's experts alone it fails: {_reported(error)}"
                continue
            if _equal(result, unsharded, tolerance):
                return way
            fault = self._difference(sample, tolerance)
        return fault

    @torch.no_grad()
    def _difference(self, sample: _Sample, tolerance: float) -> str:
        """What makes a forward that runs on ranks give something else there."""
        x, chosen, weights = _flat(sample)
        call = partial(self._call, sample.parameters)
        made = call(x, chosen, weights)

        def other(*parts: Tensor) -> bool:
            return not _equal(list(parts), [made], tolerance)

        if other(call(x, chosen, weights)):
            return "two calls differ (it draws at random, other than by nn.Dropout)"
        halves = zip(*(t.tensor_split(2) for t in (x, chosen, weights)), strict=True)
        if other(torch.cat([call(*half) for half in halves])):
            return "what it makes of a token depends on other tokens"
        choices = [call(x, chosen[:, k : k + 1], weights[:, k : k + 1]) for k in range(chosen.shape[1])]
        if other(torch.stack(choices).sum(dim=0)):
            return "what it makes of a token is no sum over the token's experts, as with an added input"
        return (
            "a rank's experts compute something else by themselves (does it know them by number, or does "
            "something besides its own parameters, or are there no gradients for rows of zeros?)"
        )

    def _call(self, parameters: Mapping[str, Tensor], *args: Tensor) -> Tensor:
        """The module's forward, which leaves nothing behind; its hooks stay with the module."""
        module = self._module
        like = args[0].detach()
        tensors = {**parameters, **{name: _buffer(kept, like) for name, kept in module.named_buffers()}}
        named = {f"own.{name}": tensor for name, tensor in tensors.items()}
        made: Tensor = functional_call(_TrialForward(_copied(module)), named, args)
        if made.shape != like.shape:
            raise ValueError(f"of tokens {list(like.shape)} it makes {list(made.shape)}")
        return made

    def _full(self, sample: _Sample) -> Tensor:
        return self._call(sample.parameters, sample.tokens, sample.chosen, sample.weights)

    def _on_ranks(self, sample: _Sample, way: str) -> Tensor:
        """What the ranks make of it together."""
        x, chosen, weights = _flat(sample)
        here, (tokens, choices) = self._experts // self._size, chosen.shape
        x = torch.cat((sample.others, x, sample.others))
        chosen, weights = chosen.repeat(3, 1), weights.repeat(3, 1)
        made = torch.zeros_like(x)
        empty = x.new_zeros(PADDING, x.shape[1])
        for first in range(0, self._experts, here):
            own = chosen.flatten() - first
            rows = ((own >= 0) & (own < here)).nonzero().flatten()
            rows = rows[own[rows].argsort(stable=True)]
            parameters = {
                name: full if "." in name else full[first : first + here]
                for name, full in sample.parameters.items()
            }
            weight_R1 = torch.cat((weights.reshape(-1, 1)[rows], weights.new_zeros(PADDING, 1)))
            with part_of_experts(self._module, self._size):
                call = partial(self._call, parameters)
                given, counts = torch.cat((x[rows // choices], empty)), own[rows].bincount(minlength=here)
                done = rows_by(self._module, call, given, counts, weight_R1 if way == "inside" else None)
            if not bool(done.isfinite().all()):
                raise ValueError(
                    "rows of zeros, with which buffers are filled, give numbers that are not finite"
                )
            weighed = done if way == "inside" else done * weight_R1
            made = made.index_add(0, rows // choices, weighed[: len(rows)].to(made.dtype))
        return made[tokens : 2 * tokens].view_as(sample.tokens)

    def _sample(
        self,
        dtype: torch.dtype,
        device: str,
        count: int,
        width: int,
        dims: int,
        choices: int,
        chosen_dims: int,
        flat: bool,
    ) -> _Sample:
        generator = torch.Generator().manual_seed(20)
        experts = self._experts
        if choices > experts:
            raise ValueError(f"tokens choose {choices} of {experts} experts")
        tokens = max(-(-experts // choices), -(-count // 4), 4)
        places = torch.arange(tokens * choices).view(tokens, choices) % experts
        even = torch.randperm(experts, generator=generator)[places]
        anyhow = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :choices]
        chosen = torch.cat(
            (even, anyhow, even[:1].expand(tokens, choices), anyhow[:1].expand(tokens, choices))
        )
        leading = (2,) * (dims - 2) + (chosen.shape[0] >> (dims - 2),)

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

        shape = (*(chosen.shape[:1] if flat else leading), choices)[:chosen_dims]
        drawn = torch.rand(chosen.shape, generator=generator, dtype=torch.float64) + 0.2
        return _Sample(
            normal(*leading, width).requires_grad_(),
            chosen.view(shape).to(device),
            drawn.view(shape).to(device, dtype).requires_grad_(),
            {name: values(p) for name, p in self._module.named_parameters(remove_duplicate=False)},
            normal(chosen.shape[0], width) * 2,
            normal(*leading, width),
        )


@contextmanager
def part_of_experts(module: nn.Module, size: int) -> Iterator[None]:
    """While the context lasts, the module counts one rank's experts."""
    kept = {name: getattr(module, name) for name, _ in ATTRIBUTES if hasattr(module, name)}
    try:
        for name, change in ATTRIBUTES:
            if name in kept:
                setattr(module, name, change(kept[name], size))
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


class _TrialForward(nn.Module):
    """A module's forward without the module's own hooks."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, *args: Tensor) -> Any:
        return self.own.forward(*args)


def _copied(module: nn.Module, *kept: nn.Module) -> nn.Module:
    """A copy with the same tensors, and the same modules among `kept`."""
    attributes = (value for one in module.modules() for value in vars(one).values())
    tensors = (*module.parameters(), *module.buffers(), *(t for t in attributes if isinstance(t, Tensor)))
    return copy.deepcopy(module, {id(one): one for one in (*tensors, *kept)})


def _same(one: object, other: object) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, (dict, set)) and not one:
        return not other
    if isinstance(one, dict) and isinstance(other, dict):
        known = (Tensor, nn.Module, type(None))  # of parameters and of modules, which are compared
        return one.keys() == other.keys() and all(isinstance(value, known) for value in one.values())
    return isinstance(one, (bool, int, float, str)) and one == other


def _buffer(resident: Tensor, like: Tensor) -> Tensor:
    if resident.is_meta:
        generator = torch.Generator().manual_seed(resident.numel())
        resident = torch.rand(resident.shape, generator=generator).to(resident.dtype)
    return resident.to(like.device, like.dtype if resident.is_floating_point() else resident.dtype, copy=True)


def _flat(sample: _Sample) -> tuple[Tensor, Tensor, Tensor]:
    tokens, chosen, weights = (x.flatten(0, -2) for x in (sample.tokens, sample.chosen, sample.weights))
    return tokens, chosen, weights


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
