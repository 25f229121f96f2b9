"""What the race of experts trains: a stack of blocks with experts on activations, as the middle of a model.

The router is the model's own, or one that sends every token to the next experts in turn, so that all get the
same number of every chunk (Megatron's forced load balancing draws them by chance, which evens out on average
only). A capacity then drops nothing; with the router's own choices all are served.

Beside it, the order of Tutel's and FasterMoE's pipeline, in which only experts hide an all-to-all:

Tutel (arXiv 2206.03382) and FasterMoE (PPoPP 2022) cut what experts get into slices;
the all-to-alls of one slice run under the experts of another, forward and backward, and all else of a block
waits for the last of them. Here:

    1. A module with experts has a stretch of each program, from its first op to its last. Its weight
       gradients belong to that of the backward, as where one backward makes both.
    2. Each stretch gets the best order that is found for it alone (`order.policies`), without a limit of
       memory. So within it slices overlap at least as well as theirs.
    3. All else runs as captured, before or behind the stretch.

An ordering policy: `register` makes it known, and it must not be given windows of several actions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.ir.action import Phase
from stretto.ir.program import Job, Op
from stretto.models.dispatch import counts_of
from stretto.models.moe import EP_PLAN, MoE, MoEBlock, MoEConfig, Routed, Router, weighed
from stretto.order.depend import WindowGraph
from stretto.order.policies import Policy, improve_order

Routing = Literal["balanced", "router"]
ROUTINGS: tuple[Routing, ...] = ("balanced", "router")

INIT_STD = 0.02
"""As GPT-2's."""


class EvenRouter(Router):
    """Token n goes to experts n K, n K + 1, ... in turn; their weights are what it scores them."""

    def forward(self, x_ND: Tensor) -> Routed:
        score_NE = F.linear(x_ND, self.weight).softmax(dim=-1)
        (N, E), K = score_NE.shape, self.config.top_k
        first_N1 = torch.arange(0, N * K, K, device=x_ND.device).unsqueeze(1)
        chosen_NK = (first_N1 + torch.arange(K, device=x_ND.device)) % E
        weights_NK = weighed(score_NE.gather(1, chosen_NK))
        return Routed(chosen_NK, weights_NK, score_NE.new_zeros(2), counts_of(chosen_NK, E))


class Stack(nn.Module):
    """Blocks with experts: (B, S, D) to the same and the routers' losses. Equal in all processes."""

    ep_plan: ClassVar[Mapping[str, str]] = EP_PLAN

    def __init__(self, config: MoEConfig, routing: Routing) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(MoEBlock(config, dense=False) for _ in range(config.layers))
        for block in self.blocks if routing == "balanced" else ():
            assert isinstance(block, MoEBlock)
            assert isinstance(block.mlp, MoE)
            block.mlp.router = EvenRouter(config)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INIT_STD, generator=generator)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        losses = x_BSD.new_zeros(2)
        for block in self.blocks:
            x_BSD, losses = block(x_BSD, losses)
        return x_BSD, losses


def squared_error(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean squared error against a target (B, S, D), with the routers' weighted losses."""
    made_BSD, losses = model(batch["x"])
    config = model.config
    assert isinstance(config, MoEConfig)
    balance, z = losses.unbind()
    routers: Tensor = config.aux_weight * balance + config.z_weight * z
    return F.mse_loss(made_BSD, batch["target"]) + routers


def under_experts(job: Job, modules: Collection[str]) -> Policy:
    """The policy for windows of a job. modules: names of those that have experts."""
    weights = {op.name: op for stage in job.stages for op in stage.ops[Phase.W]}
    programs = {
        op.name: op for stage in job.stages for phase in (Phase.F, Phase.I) for op in stage.ops[phase]
    }

    def order(graph: WindowGraph) -> list[int]:
        assert len(graph.window.parts) == 1, "stretches are of one program"
        names = [str(node.item.ref) for node in graph.nodes]
        places = _stretches([programs.get(name) for name in names], modules)
        last = max(places.values(), default=0) + 1
        of_module = {programs[names[at]].module: place for at, place in places.items()}
        result: dict[int, list[int]] = {}
        for at, name in enumerate(names):
            place = places.get(at, last)
            if name in weights:
                place = of_module.get(weights[name].module, last)
            result.setdefault(place, []).append(at)
        ordered: list[int] = []
        for place in sorted(result):
            part = _part(graph, result[place])
            inner = improve_order(part) if part.communicates else range(len(part.nodes))
            ordered += [result[place][at] for at in inner]
        return ordered

    return order


def _stretches(ops: Sequence[Op | None], modules: Collection[str]) -> dict[int, int]:
    """Step 1: the number of its stretch, by op. Those of experts are odd. Ops that are None have none."""
    ends: dict[str, tuple[int, int]] = {}
    for at, op in enumerate(ops):
        if op is not None and op.module in modules:
            ends[op.module] = ends.get(op.module, (at, at))[0], at
    spans = sorted(ends.values())
    assert all(end < start for (_, end), (start, _) in pairwise(spans)), "modules' ops are apart"
    result: dict[int, int] = {}
    for at, op in enumerate(ops):
        if op is not None:
            before = sum(end < at for _, end in spans)
            result[at] = 2 * before + (before < len(spans) and spans[before][0] <= at)
    return result


def _part(graph: WindowGraph, nodes: Sequence[int]) -> WindowGraph:
    """The graph of some of its nodes, ascending, as if others had run."""
    places = {index: at for at, index in enumerate(nodes)}

    def among(found: Sequence[int]) -> tuple[int, ...]:
        return tuple(places[index] for index in found if index in places)

    return replace(
        graph,
        nodes=tuple(replace(graph.nodes[n], start=places.get(graph.nodes[n].start, -1)) for n in nodes),
        before=tuple(among(graph.before[n]) for n in nodes),
        after=tuple(among(graph.after[n]) for n in nodes),
        storages=(),
    )
