"""Training in which ranks keep parts of parameters, gradients and states, beside the plain model's.

A model with experts, tied or not, of odd sizes, of which some parameters are frozen. Ranks are threads; each
has an optimizer of its own over what its Runner gives it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.plan import Plan
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum
from stretto.runtime import Runner, run_threads
from stretto.runtime.rank_tensors import pieces_of
from stretto.train.clip import GradientClip
from tests.clusters import cores
from tests.parallelize.equality import plain_step

VOCAB, CONTEXT, HIDDEN, DP, MICROBATCHES, STEPS = 22, 8, 12, 4, 4, 3
RATE, MOST_NORM = 1e-2, 0.3
"""The norm is less than that of any step's gradient."""

FROZEN = ("blocks.0.attention.qkv.weight", "blocks.1.mlp.experts.up", "norm.bias")

Trained = dict[str, Tensor]
"""Full parameters after `STEPS` steps, by the first name of a tie."""


@dataclass(frozen=True, slots=True)
class ZeroCell:
    """How a model is trained. `pp` is 1 or 2, with what `schedule` needs of stages; 2 tensor-parallel ranks
    also share the sequence, and 2 expert-parallel ones work in two chunks. A kind of cp has 2 ranks.
    frozen_later: of the Runner's parameters, behind the capture."""

    zero: Literal[0, 1, 2, 3, "auto"]
    dp_shard: int | None = None
    pp: int = 1
    schedule: str = "1f1b"
    tp: int = 1
    ep: int = 1
    cp_kind: Literal["", "ring", "gathered"] = ""
    recompute: str = "none"
    tied: bool = False
    frozen: bool = False
    frozen_later: bool = False
    clipped: bool = False
    precision: Literal["float64", "bf16"] = "float64"
    experts: int = 4
    updates: bool = False
    owners: tuple[str, ...] = ()
    """Where there are some, the optimizer looks at full matrices."""
    microbatches: int = MICROBATCHES

    @property
    def parallel(self) -> Parallel:
        stages = {"stages": 4} if self.schedule in ("interleaved-1f1b", "zb-v") else {}
        return Parallel(
            **stages,
            pp=self.pp,
            dp=DP,
            zero=self.zero,
            updates=self.updates,
            owners=self.owners,
            clip_norm=MOST_NORM if self.updates and self.clipped else None,
            dp_shard=self.dp_shard,
            tp=self.tp,
            sequence_parallel=self.tp > 1,
            ep=self.ep,
            **({"cp": 2, "cp_kind": self.cp_kind} if self.cp_kind else {}),
            ampipe_degree=2 if self.ep > 1 else 1,
            microbatches=self.microbatches,
            schedule=self.schedule,
            recompute=self.recompute,
        )

    def model(self) -> nn.Module:
        """Its own copy."""
        dtype = torch.float64 if self.precision == "float64" else None
        model = copy.deepcopy(_model(self.tied, self.experts)).to(dtype)
        for name in FROZEN if self.frozen else ():
            model.get_parameter(name).requires_grad_(False)
        return model

    def plan(self, **how: Any) -> Plan:
        """how: more of `stretto.plan`. The order is a list scheduler's by default, which is fast."""
        precision = "bf16" if self.precision == "bf16" else "float32"
        job = capture(self.model(), batch(0), moe_token_sum, self.parallel, precision=precision)
        cluster = cores(**how.pop("figures", {}))
        return stretto.plan(job, cluster, **{"order": "list", **how})


@cache
def _model(tied: bool, experts: int) -> MoEGPT:
    config = MoEConfig(
        vocab_size=VOCAB,
        layers=2,
        hidden=HIDDEN,
        heads=2,
        context=CONTEXT,
        experts=experts,
        top_k=2,
        expert_ratio=1.5,
        capacity_factor=None,
        tie_embeddings=tied,
    )
    return MoEGPT(config, seed=3)


def batch(step: int) -> Tensor:
    """Of one step, on all ranks."""
    rows = DP * MICROBATCHES
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (rows, CONTEXT + 1), generator=generator)


class Orthogonal(torch.optim.Optimizer):
    """The average of gradients with its singular values made about equal (Muon's update, in float64 and by an
    SVD; those near zero stay so, as the direction of zeros is anybody's), of each matrix of a stack; of a
    vector its direction."""

    def __init__(self, params: Any, lr: float = RATE) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    average = state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    if p.dim() > 1:
                        left, values, right = torch.linalg.svd(average, full_matrices=False)
                        least = 0.1 * values.amax(-1, keepdim=True).clamp(min=1e-30)
                        evened = values / (values.square() + least.square()).sqrt()
                        p.add_(left * evened.unsqueeze(-2) @ right, alpha=-group["lr"])
                    else:
                        p.add_(average / average.norm().clamp(min=1e-30), alpha=-group["lr"])


def _trainer(cell: ZeroCell) -> Any:
    return whole_optimizer if cell.owners else optimizer_of


def whole_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return Orthogonal([p for p in parameters if p.requires_grad])


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=RATE, weight_decay=0.1)


def plain_training(cell: ZeroCell) -> Trained:
    """By PyTorch alone, on full batches."""
    model = cell.model()
    for name in FROZEN if cell.frozen_later else ():
        model.get_parameter(name).requires_grad_(False)
    optimizer = _trainer(cell)(model.parameters())
    for step in range(STEPS):
        _, grads = plain_step(model, moe_token_sum, batch(step), DP * cell.microbatches)
        for name, parameter in model.named_parameters():
            parameter.grad = grads.get(name)
        if cell.clipped:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
            assert norm > MOST_NORM
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def training(cell: ZeroCell, plan: Plan) -> Trained:
    """By a plan. What several ranks keep is the same on each, bit by bit, and all rows are kept somewhere."""

    def work(runner: Runner) -> tuple[Mapping[str, int], Trained]:
        for name, parameter in runner.named_parameters() if cell.frozen_later else ():
            if name in FROZEN:
                parameter.requires_grad_(False)
        if runner.optimizer is not None:
            for step in range(STEPS):
                runner.step(batch(step))
            return runner.coordinates, {name: p.detach().clone() for name, p in runner.named_parameters()}
        clip = GradientClip(runner, MOST_NORM)
        optimizer = _trainer(cell)(runner.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            runner.step(batch(step))
            if cell.clipped:
                clip()
            optimizer.step()
        return runner.coordinates, {name: p.detach().clone() for name, p in runner.named_parameters()}

    make = _trainer(cell) if cell.updates else None
    results = run_threads(plan, lambda _: cell.model(), work, optimizer=make)
    return put_together(cell.model(), plan, results)


def put_together(
    model: nn.Module, plan: Plan, results: Sequence[tuple[Mapping[str, int], Trained]]
) -> Trained:
    """Full parameters of what ranks keep, by the coordinates of each."""
    known = {p.name: p for p in plan.job.parameters}
    full: Trained = {}
    for name, parameter in model.named_parameters():
        full[name] = torch.full_like(parameter, torch.nan, requires_grad=False)
    for at, kept in results:
        for name, part in kept.items():
            into = full[known[name].tied_to]
            for offsets, box in pieces_of(part, known[name], plan.job, at):
                there = into[tuple(slice(o, o + n) for o, n in zip(offsets, box.shape, strict=True))]
                assert bool((there.isnan() | (there == box)).all()), f"{name} differs between ranks"
                there.copy_(box)
    assert [name for name, parameter in full.items() if parameter.isnan().any()] == []
    return full


def worst_error(found: Trained, expected: Trained) -> tuple[float, str]:
    """The largest relative error by the norm of a parameter, and whose it is."""
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - want).norm() / want.norm()) for name, want in expected.items()}
    return max((error, name) for name, error in errors.items())


def assert_same_parameters(found: Trained, expected: Trained) -> None:
    """To the bit."""
    assert found.keys() == expected.keys()
    assert [name for name, want in expected.items() if not torch.equal(found[name], want)] == []
