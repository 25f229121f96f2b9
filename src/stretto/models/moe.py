"""A GPT whose blocks have experts in place of one MLP: each token goes to the few that its router chooses.

The plain, single-process model. A router's scores and losses are taken in float32 or finer, as in Switch
Transformers (Fedus et al., arXiv 2101.03961). A router may score each expert by itself, and choose by scores
and a bias that balances loads without a loss, as DeepSeek-V3's does (arXiv 2412.19437, 2.1.2). Tokens go to
experts within a capacity, of which each takes at most `capacity_factor` times its even share of a
microbatch's choices, or dropless (`dispatch`).

Dims of tensors, as suffixes:
  B batch   S sequence   N tokens of a microbatch   D hidden   E experts   K choices of a token
  C slots of an expert   R rows, N x K of them   M width of an expert   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.backend.grouped_adapter import grouped_mm
from stretto.config import MoESettings
from stretto.models.dispatch import counts_of, dropless, within_capacity
from stretto.models.gpt import (
    GPT,
    MLP,
    TP_PLAN,
    Block,
    GPTConfig,
    count_targets,
    cross_entropy,
    document_mask,
    inputs_and_targets,
    positions_of,
)

LOAD = "load."
"""Begins the metrics of experts' loads, before the block's number."""

EP_PLAN = {"blocks.*.mlp.experts": "experts"}
"""The modules whose parameters have one expert a row, which expert-parallel ranks share."""


class MoEConfig(GPTConfig, MoESettings):
    """The shape of a GPT with experts, likewise."""

    kind: Literal["moe"] = "moe"

    def capacity(self, tokens: int) -> int:
        """Rows that an expert takes of a microbatch of so many tokens."""
        return min(tokens, math.ceil(self.capacity_factor * tokens * self.top_k / self.experts))

    def dense(self, block: int) -> bool:
        """Whether a block has a plain MLP."""
        return block < self.dense_first or (self.dense_every > 0 and block % self.dense_every == 0)


class Routed(NamedTuple):
    """chosen: experts of each token (N, K), the best first. weights: of their results (N, K), by `weighed`.
    losses: the balancing loss and the z loss, unweighted. load: choices of each expert (E,)."""

    chosen: Tensor
    weights: Tensor
    losses: Tensor
    load: Tensor


def weighed(score_NK: Tensor) -> Tensor:
    """Weights of the chosen experts' results, by their scores: they sum to 1. That of one alone is its score
    (Switch Transformers), since 1 would give the router no gradient of the loss."""
    return score_NK if score_NK.shape[-1] == 1 else score_NK / score_NK.sum(dim=-1, keepdim=True)


class Router(nn.Module):
    """Scores tokens against experts: (N, D) to `Routed`. bias: added to scores (E,) where experts are chosen,
    of a router that scores them by themselves; `balance_loads` moves it."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(config.experts) if config.router == "sigmoid" else None)

    def forward(self, x_ND: Tensor) -> Routed:
        precise = torch.float64 if x_ND.dtype == torch.float64 else torch.float32
        logits_NE = F.linear(x_ND.to(precise), self.weight.to(precise))
        if self.bias is None:
            share_NE = score_NE = logits_NE.softmax(dim=-1)
            best_NK, chosen_NK = score_NE.topk(self.config.top_k, dim=-1)
        else:
            score_NE = logits_NE.sigmoid()
            share_NE = score_NE / score_NE.sum(dim=-1, keepdim=True)
            chosen_NK = self._chosen(score_NE.detach() + self.bias.to(precise))
            best_NK = score_NE.gather(1, chosen_NK)
        experts = score_NE.shape[1]
        load_E = counts_of(chosen_NK, experts)
        balance = experts * (load_E.to(precise) / chosen_NK.numel() * share_NE.mean(dim=0)).sum()
        z = logits_NE.logsumexp(dim=-1).square().mean()
        weights_NK = weighed(best_NK)
        if self.config.scaling != 1:
            weights_NK = weights_NK * self.config.scaling
        return Routed(chosen_NK, weights_NK.to(x_ND.dtype), torch.stack((balance, z)), load_E)

    def _chosen(self, score_NE: Tensor) -> Tensor:
        """The best experts (N, K), of each token's best groups. A group is as good as its best few
        together, as many as a token would choose of each (two in DeepSeek-V3; as Megatron-Core counts)."""
        groups, best = self.config.groups, self.config.top_groups
        if groups > 1:
            score_NGE = score_NE.view(len(score_NE), groups, -1)
            best_NG = score_NGE.topk(max(1, self.config.top_k // best), dim=-1).values.sum(dim=-1)
            kept_NG = torch.zeros_like(best_NG).scatter(1, best_NG.topk(best).indices, 1.0)
            score_NE = score_NGE.masked_fill(kept_NG.unsqueeze(-1) == 0, float("-inf")).flatten(1)
        return score_NE.topk(self.config.top_k, dim=-1).indices


class Experts(nn.Module):
    """The experts' MLPs: tokens (N, D), the experts that each chose (N, K) and the weights of their results
    to (N, D)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.expert_hidden, config.hidden))

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        experts, slots = self.config.experts, self.slots(x_ND.shape[0])
        if slots is None:
            return dropless(x_ND, chosen_NK, weights_NK, experts, self.of_rows)
        return within_capacity(x_ND, chosen_NK, weights_NK, experts, slots, self.of_slots)

    def slots(self, tokens: int) -> int | None:
        """Slots of an expert for so many tokens; None where all are served."""
        return self.config.capacity(tokens) if self.config.capacity_factor else None

    def of_slots(self, x_ECD: Tensor, at: slice = slice(None)) -> Tensor:
        """`dispatch.OfSlots`; at: of which experts."""
        return torch.bmm(F.gelu(torch.bmm(x_ECD, self.up[at]), approximate="tanh"), self.down[at])

    def of_rows(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """`dispatch.OfRows`."""
        ends_E = counts_E.cumsum(dim=0)
        hidden_RM = F.gelu(grouped_mm(x_RD, self.up, ends_E), approximate="tanh")
        return grouped_mm(hidden_RM, self.down, ends_E)


class MoE(nn.Module):
    """Router, experts, and the experts that all tokens share: (B, S, D) to the same, the router's losses and
    the experts' loads."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = (
            MLP(config, config.shared_experts * config.expert_hidden) if config.shared_experts else None
        )

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_ND = x_BSD.flatten(0, 1)
        routed = self.router(x_ND)
        y_ND = self.experts(x_ND, routed.chosen, routed.weights)
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        return y_ND.view(x_BSD.shape), routed.losses, routed.load


class MoEBlock(Block):
    """Attention, then experts or an MLP, each after a norm and added to the residual stream: (B, S, D) and
    the routers' losses so far (2,) to the same, and the experts' loads where a bias balances them."""

    def __init__(self, config: MoEConfig, dense: bool) -> None:
        super().__init__(config, None if dense else MoE(config))
        self.tells_load = not dense and config.bias_rate > 0

    def forward(  # type: ignore[override]
        self, x_BSD: Tensor, losses: Tensor, *mask_B1SS: Tensor
    ) -> tuple[Tensor, ...]:
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), *mask_B1SS))
        made = self.mlp(self.mlp_norm(x_BSD))
        if isinstance(self.mlp, MoE):
            made, own, load_E = made
            losses = losses + own
        x_BSD = x_BSD + self.dropout(made)
        return (x_BSD, losses, load_E) if self.tells_load else (x_BSD, losses)


class Output(NamedTuple):
    """logits: (B, S, V). losses: of all routers together, balancing loss and z loss, unweighted. loads: by
    block, choices of each expert (E,), where a bias balances them."""

    logits: Tensor
    losses: Tensor
    loads: dict[int, Tensor]


class MoEGPT(GPT):
    """Token ids (B, S) to `Output`. As `GPT`: the same seed gives the same weights everywhere."""

    tp_plan: ClassVar[Mapping[str, str]] = {
        **TP_PLAN,
        "blocks.*.mlp.shared.up": "colwise",
        "blocks.*.mlp.shared.down": "rowwise",
        "blocks.*.mlp.experts": "experts",
        "blocks.*.mlp.experts.up": "dim:2",
        "blocks.*.mlp.experts.down": "dim:1",
    }
    ep_plan = EP_PLAN

    def __init__(self, config: MoEConfig, seed: int = 0) -> None:
        super().__init__(config, seed, [MoEBlock(config, config.dense(n)) for n in range(config.layers)])

    def forward(  # type: ignore[override]
        self, tokens_BS: Tensor, positions_BS: Tensor | None = None
    ) -> Output:
        x_BSD, mask = self.embedded(tokens_BS, positions_BS), document_mask(positions_BS)
        precise = torch.float64 if x_BSD.dtype == torch.float64 else torch.float32
        losses = x_BSD.new_zeros(2, dtype=precise)
        loads: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            x_BSD, losses, *load = block(x_BSD, losses, *mask)
            loads.update((number, load_E) for load_E in load)
        return Output(self.head(self.norm(x_BSD)), losses, loads)


def moe_token_sum(model: nn.Module, batch: Tensor | Mapping[str, Tensor]) -> tuple[Any, ...]:
    """(sum, count) of the next-token loss of a `MoEGPT`, in nats; for `batch` see `gpt.inputs_and_targets`.

    While it trains, its routers' weighted losses count for every token, and where a bias balances loads,
    these are returned as metrics, for `balance_loads`. An evaluation measures what the model predicts, and is
    compared with models that have none.
    """
    inputs_BS, targets_BS = inputs_and_targets(batch)
    output = model(inputs_BS, **positions_of(batch))
    config = model.config
    assert isinstance(config, MoEConfig)
    loss, count = cross_entropy(output.logits, targets_BS, "sum"), count_targets(batch)
    if not model.training:
        return loss, count
    balance, z = output.losses.unbind()
    loss = loss + (config.aux_weight * balance + config.z_weight * z) * count
    loads = {f"{LOAD}{block}": (load_E, "sum") for block, load_E in output.loads.items()}
    return (loss, count, loads) if loads else (loss, count)


def balance_loads(
    buffers: Iterable[tuple[str, Tensor]], metrics: MutableMapping[str, Tensor], rate: float
) -> None:
    """Move the routers' biases, after each step: up by `rate` for experts with less than the mean load of the
    step's batch, down for those with more (Wang et al., arXiv 2408.15664, algorithm 1).

    buffers: of a Runner, or a model (`named_buffers()`). metrics: what the step returned besides its loss; in
    the place of loads (`load.<block>`) it has then by how much the greatest is above the mean, over the mean
    (`violation.<block>`, that paper's MaxVio).
    """
    biases = dict(buffers)
    for name in [name for name in metrics if name.startswith(LOAD)]:
        block, load_E = name.removeprefix(LOAD), metrics.pop(name)
        mean = load_E.mean()
        metrics[f"violation.{block}"] = load_E.max() / mean - 1
        bias_E = biases.get(f"blocks.{block}.mlp.router.bias")
        if bias_E is not None:  # another rank's otherwise
            bias_E.add_(torch.sign(mean - load_E).to(bias_E), alpha=rate)
