"""Runners without steps, over what ranks keep in parts, and updates of it all the same: gradients that are
given, and an optimizer. What is compared with is the plain model, which PyTorch alone updates.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from stretto.ir.plan import Plan
from stretto.models.gpt import next_token_loss
from stretto.models.moe import moe_token_sum
from stretto.runtime.rank_tensors import part_of
from stretto.runtime.runner import Runner
from tests.capturing.zoo import WIDTH, Chain, mean_square, rows
from tests.parallelize.equality import gpt
from tests.parallelize.mixtures import batch, model_of
from tests.runtime.equality import lowered

RATE = 0.05


class Small(Chain):
    """Parameters with fewer rows than there are ranks: none, one, three, a number; and a frozen one."""

    def __init__(self) -> None:
        super().__init__(1)
        self.out = nn.Linear(WIDTH, 3).double()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.shift = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.none = nn.Parameter(torch.ones(0, 3, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.arange(10.0, dtype=torch.float64)[:, None], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * self.scale + self.shift
        return x + self.fixed.mean() + self.none.sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "small": (Small, lambda: rows(32), mean_square),
    "gpt": (
        lambda: gpt(tie_embeddings=True, positions="learned", context=8).double(),
        lambda: torch.randint(0, 61, (8, 9), generator=torch.Generator().manual_seed(5)),
        next_token_loss,
    ),
    "experts": (lambda: model_of(None), batch, moe_token_sum),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "zero": {"dp": 2, "zero": 1},
    "zero of 4": {"dp": 4, "zero": 3},
    "zero of 8": {"dp": 8, "zero": 2},
    "zero pp": {"dp": 2, "pp": 2, "zero": "auto"},
    "zero tp": {"dp": 4, "tp": 2, "zero": 3, "sequence_parallel": True},
    "zero cp": {"dp": 2, "cp": 2, "zero": 3},
    "zero ep": {"dp": 4, "ep": 2, "zero": 3},
    "in groups": {"dp": 4, "zero": 1, "dp_shard": 2},
    "in groups, ep": {"dp": 8, "ep": 2, "zero": 1, "dp_shard": 4},
}


class NoSteps:
    """In the place of `RankState`: nothing that a step needs is made."""

    def __init__(self, *_: Any) -> None:
        self.steps = 0


@functools.cache
def model(kind: str) -> nn.Module:
    return MODELS[kind][0]()


@functools.cache
def plan_of(kind: str, layout: str) -> Plan:
    _, batch, loss = MODELS[kind]
    job = stretto.capture(model(kind), batch(), loss, stretto.Parallel(**LAYOUTS[layout]))
    return lowered(job, "1f1b")


def given(kind: str, step: int) -> dict[str, Tensor]:
    """The full gradients of a step."""
    draw = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(p.shape, generator=draw, dtype=p.dtype)
        for name, p in model(kind).named_parameters()
        if p.requires_grad
    }


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    own = list(parameters)
    groups = [[p for p in own if (p.dim() > 1) is many] for many in (True, False)]
    decay = [{"params": group, "weight_decay": 0.1 * at} for at, group in enumerate(groups) if group]
    return torch.optim.AdamW(decay, lr=RATE)


def plain(kind: str, steps: int) -> dict[str, Tensor]:
    """The plain model after so many updates."""
    own = copy.deepcopy(model(kind))
    optimizer = adamw(own.parameters())
    for step in range(steps):
        for name, gradient in given(kind, step).items():
            own.get_parameter(name).grad = gradient
        optimizer.step()
    return own.state_dict()


def update(runner: Runner, optimizer: torch.optim.Optimizer, kind: str, steps: Iterable[int]) -> None:
    for step in steps:
        full = given(kind, step)
        for known, parameter in runner.tensors.known_parameters():
            if parameter.requires_grad:
                own = part_of(full[known.name], known, runner.plan.job, runner.coordinates)
                assert own.shape == parameter.shape
                parameter.grad = own.clone()
        optimizer.step()


def run(kind: str, layout: str, work: Callable[[Runner], Any], of: nn.Module | None = None) -> Any:
    """of: the model of each rank; one on "meta" is given memory."""
    own = model(kind) if of is None else of
    empty = any(parameter.is_meta for parameter in own.parameters())
    return stretto.run_threads(plan_of(kind, layout), lambda _: copy.deepcopy(own), work, empty=empty)


def on_meta(kind: str) -> nn.Module:
    """The model without values of its parameters."""
    own = copy.deepcopy(model(kind))
    emptied: dict[int, nn.Parameter] = {}
    for module in own.modules():
        for name, p in module._parameters.items():
            if p is not None:
                made = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
                module._parameters[name] = emptied.setdefault(id(p), made)
    return own


def halved(kind: str) -> nn.Module:
    """The model with other values."""
    own = copy.deepcopy(model(kind))
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.mul_(0.5)
    return own
