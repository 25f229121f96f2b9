"""Plans that race on every rank of a lab: one step of each whose gradients are looked at, then their turns.

Every rank calls these with equal names in order. Touches `torch.distributed` and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.race import SAME, Step, Times, drop_gradients, fresh, race, say_on_first
from stretto.errors import RunError
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.runtime.runner import Runner
from stretto.runtime.shards import part_of

Batch = dict[str, torch.Tensor]

Loss = Callable[[nn.Module, Batch], torch.Tensor]
"""Of a model and some rows of a batch, the mean over them."""

WARM_UPS = 1
"""Turns that do not count; the comparison of gradients was one more."""

Found = tuple[float, Batch]
"""A step's loss and its gradients, by parameter."""


def one_step(runner: Runner, batch: Batch) -> Found:
    """What one step finds; no gradients are left."""
    dist.barrier()
    loss = float(runner.step(batch))
    grads = {name: p.grad.clone() for name, p in runner.named_parameters() if p.grad is not None}
    drop_gradients(runner.parameters())
    return loss, grads


def plain_step(model: nn.Module, batch: Batch, loss: Loss, pieces: int) -> Found:
    """The plain model's loss and gradients, of a batch in equal pieces; each rank computes some of them,
    and has at least one."""
    rows = next(iter(batch.values())).shape[0] // pieces
    total = torch.zeros((), dtype=torch.float64)
    for piece in range(dist.get_rank(), pieces, dist.get_world_size()):
        own = {name: leaf[piece * rows : (piece + 1) * rows] for name, leaf in batch.items()}
        part = loss(model, own) / pieces
        part.backward()  # type: ignore[no-untyped-call]
        total += part.detach()
    dist.all_reduce(total)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for grad in grads.values():
        dist.all_reduce(grad)
    drop_gradients(model.parameters())
    return float(total), grads


def check_loss(name: str, found: float, plain: float) -> None:
    """Raises RunError where a system's loss is not the plain model's."""
    if abs(found / plain - 1.0) > SAME:
        raise RunError(f"the loss of {name} is {found}, the plain model's {plain}")


def check_bitwise(name: str, found: Found, base_name: str, base: Found) -> None:
    """Raises RunError where a step found anything else than another."""
    differs = [key for key, grad in found[1].items() if not torch.equal(grad, base[1][key])]
    if differs or found[0] != base[0]:
        raise RunError(
            f"{name} must be bitwise equal to {base_name}, and differs in {', '.join(differs) or 'the loss'}"
        )


def own_parts(runner: Runner, whole: Mapping[str, torch.Tensor]) -> Batch:
    """This rank's part of each of a plain model's gradients, by parameter."""
    job = runner.plan.job
    known = {parameter.name: parameter for parameter in job.parameters}
    return {
        name: part_of(whole[name], known[name], job, runner.coordinates).clone()
        for name, _ in runner.named_parameters()
    }


def take_turns(
    runners: Mapping[str, Runner], others: Mapping[str, Step], batch: Batch, rounds: int
) -> tuple[dict[str, Times], dict[str, list[Timeline]]]:
    """The times of all systems, `others` first, and the timelines of the runners' counted steps."""
    systems = dict(others)
    for name, runner in runners.items():
        systems[name] = fresh(runner.parameters(), partial(runner.step, batch))
    timelines: dict[str, list[Timeline]] = {name: [] for name in runners}

    def after(name: str) -> None:
        if name in runners:
            timelines[name].append(runners[name].timeline())

    times = race(systems, rounds, after=after, say=say_on_first, warm_ups=WARM_UPS)
    return times, timelines


def plans_of(runners: Mapping[str, Runner]) -> dict[str, Plan]:
    """By name, what runs."""
    return {name: runner.plan for name, runner in runners.items()}
