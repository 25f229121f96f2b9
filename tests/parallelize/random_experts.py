"""Random mixtures with own modules of experts, as text: sums over a token's experts, and what is none.

A module is a way to reach its experts, a way to use the weights, and now and then something more, before or
after: row by row, so that ranks can share it, or not (`random_networks` says what is done with it).
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from tests.parallelize.random_code import HIDDEN, Drawing, Value
from tests.parallelize.random_lines import NAMES, Coded

INNER = 6
HOW = {"ep_plan": {"mixture.experts": "experts"}, "ep_buffer": 4.0}
"""Of `stretto.Parallel`."""

REACHED = {
    "masked": (
        "for e in range(self.up.shape[0]): hit = chosen == e; w = (weights * hit).sum(1, keepdim=True); "
        "u, d, on = self.up[e], self.down[e], hit.any(1, keepdim=True); out = out + {term}"
    ),
    "looked up": (
        "for k in range(chosen.shape[1]): w, on = weights[:, k : k + 1], 1; at = chosen[:, k]; "
        "u, d = self.up[at], self.down[at]; out = out + {term}"
    ),
    "sorted": (
        "order = chosen.flatten().argsort(stable=True); at = chosen.flatten()[order]; "
        "row = order // chosen.shape[1]; w, on = weights.flatten()[order][:, None], 1; whole, x = x, x[row]; "
        "u, d = self.up[at], self.down[at]; out = out.index_add(0, row, {term}); x = whole"
    ),
}
"""u, d: an expert's matrices, for all rows or one a row; w: its weight of a row; on: whether it is chosen."""

WEIGHTS = (
    "w * {f}(x)",
    "w * {f}(x)",
    "on * {f}(x * w)",
    "on * {f}(x)",
    "on * {f}(x, w)",
    "w * w * {f}(x)",
    "on * torch.tanh(w * {f}(x))",
    "on * {f}(x + w)",
    "w * (torch.ones_like(w).cumsum(0) <= 5) * {f}(x)",
    "w * (w.cumsum(0) < 1.5) * {f}(x)",
)
"""But for the last two, which serve so many rows, these are sums over a token's experts."""

BEFORE = (
    "x = F.silu(x)",
    "x = F.layer_norm(x, x.shape[-1:])",
    "x = x * x.sigmoid()",
    "x = x - x.mean(0, keepdim=True)",
    "x = x.cumsum(0)",
    "x = x.flip(0)",
    "x = x / x.norm(dim=-1, keepdim=True)",
    "x = F.normalize(x, dim=-1)",
    "x = x / x.abs().max()",
    "weights = weights.softmax(-1)",
    "weights = weights / weights.sum(-1, keepdim=True)",
    "weights = weights.square()",
    "weights = weights * (chosen + 1)",
    "x = x * x.shape[0]",
    "x = x + weights.mean()",
)

AFTER = (
    "out = out + x",
    "out = F.layer_norm(out, out.shape[-1:])",
    "out = out * 2",
    "out = out + 0.1",
    "out = out / chosen.shape[1]",
    "out = out * self.up.shape[0]",
    "out = torch.tanh(out)",
    "out = out - out.mean(0)",
    "out = out + (weights * chosen).sum(1, keepdim=True) * x",
    "out = out + (self.bias[chosen] * weights[..., None]).sum(1)",
    "out = out + self.bias[chosen].sum(1)",
    "out = out + self.table[chosen].sum(1)",
    "out = out + self.inner(x)",
    "out = out * weights.sum(1, keepdim=True)",
)


def draw_experts(draw: Random, experts: int, choices: int) -> Coded:
    """A module (N, D), (N, K), (N, K) to (N, D)."""
    module = Coded("x, chosen, weights")
    for name, made in (
        ("up", f"nn.Parameter(torch.randn({experts}, {HIDDEN}, {INNER}))"),
        ("down", f"nn.Parameter(torch.randn({experts}, {INNER}, {HIDDEN}))"),
    ):
        _put(module, name, made)
    lines = [draw.choice(BEFORE)] if draw.random() < 0.3 else []
    if draw.random() < 0.1:
        lines.append(draw.choice(BEFORE))
    lines.append("def f(x, w=torch.ones(1, 1)): return (F.gelu(x[:, None] @ u * w[:, None]) @ d)[:, 0]")
    lines.append("out = torch.zeros_like(x)")
    term = draw.choice(WEIGHTS).format(f="f")
    lines.append(REACHED[draw.choice(list(REACHED))].format(term=term))
    if draw.random() < 0.35:
        lines.append(draw.choice(AFTER))
    if draw.random() < 0.1:
        lines.append(draw.choice(AFTER))
    text = " ".join(lines)
    if "self.bias" in text:
        _put(module, "bias", f"nn.Parameter(torch.randn({experts}, {HIDDEN}))")
    if "self.table" in text:
        module.register_buffer("table", torch.randn(experts, HIDDEN))
        module.made["table"] = f"buffer, torch.randn({experts}, {HIDDEN})"
    if "self.inner" in text:
        _put(module, "inner", f"nn.Linear({HIDDEN}, {HIDDEN}, bias=False)")
    module.lines = (*lines, "return out")
    return module


def _put(module: Coded, name: str, made: str) -> None:
    module.made[name] = made
    setattr(module, name, eval(made, NAMES))


def draw_mixture(draw: Random) -> Coded:
    """Router and experts: (..., D) to the same."""
    experts, choices = draw.choice(((4, 2), (4, 1), (2, 2), (6, 2), (4, 3)))
    mixture = Coded("x")
    _put(mixture, "gate", f"nn.Linear({HIDDEN}, {experts}, bias=False)")
    mixture.experts = draw_experts(draw, experts, choices)
    tokens = draw.choice(("x.reshape(-1, x.shape[-1])", "x.flatten(0, -2)"))
    divided = "; top = top / top.sum(-1, keepdim=True)" if choices > 1 and draw.random() < 0.5 else ""
    mixture.lines = (
        f"t = {tokens}",
        f"top, chosen = self.gate(t).softmax(-1).topk({choices}, -1){divided}",
        "return self.experts(t, chosen, top).view_as(x)",
    )
    return mixture


def shares_experts(seed: int, parallel: dict[str, Any]) -> bool:
    """Give one network in eight, tame or wild, experts and ranks that share them."""
    if parallel.get("sequence_parallel") or Random(f"experts {seed}").random() > 0.125:
        return False
    parallel |= {"tp": 2, "dp": 2, "ep": 2, **HOW}
    return True


def with_mixture(net: Drawing, x: Value) -> Value | None:
    """The mixture of a network that shares experts."""
    net.module.mixture = draw_mixture(Random(net.draw.random()))
    return net.value(f"{x.name} + self.mixture({x.name})")
