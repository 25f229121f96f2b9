"""Lines of Python that random networks are made of, and modules whose forwards are such lines."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "math": math}
"""What the lines may use, besides `self` and what they are given."""


def _rows(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


POINTWISE = _rows("""
    {a}.relu()
    torch.tanh({a})
    F.gelu({a})
    -{a}
    {a} * 0.5
    {a}.clone()
    {a}.detach() * {a}
    torch.where({a} > 0, {a}, 0.1 * {a})
    {a}.clamp(-1.5, 1.5)
    {a} * torch.full_like({a}, 0.7)
    {a} + torch.zeros({a}.shape, dtype={a}.dtype)
    {a} * torch.ones({a}.shape[-1], dtype={a}.dtype)
    {a}.masked_fill({a} < -1, 0.5)
    F.relu({a} * 1, inplace=True)
""")
"""Right on any part."""

ALONG = _rows("""
    {a}.softmax({d})
    {a}.cumsum({d})
    {a} - {a}.mean({d}, keepdim=True)
    {a} * {a}.sum({d}, keepdim=True)
    {a}.flip({d})
    {a} / (1 + {a}.norm(dim={d}, keepdim=True))
    {a}.roll(1, {d})
    torch.stack(({a}, 2 * {a}), {d}).mean({d})
    torch.cat(({a}, -{a}), {d}).narrow({d}, 1, {a}.shape[{d}])
    {a} * {a}.shape[{d}] ** -0.5
    sum({a}.unbind({d})).unsqueeze({d}) + {a}
    torch.cat({a}.chunk(2, {d})[::-1], {d})
    {a} * {a}.argmax({d}, keepdim=True)
    torch.movedim({a}, {d}, -1).contiguous().movedim(-1, {d})
    {a} * {a}.numel() ** -0.5
""")
"""Right where dim `d` is full."""

LAST = _rows("""
    {a} * torch.arange({a}.shape[-1], dtype={a}.dtype).cos()
    F.layer_norm({a}, {a}.shape[-1:])
    {a}.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    {a}.view(*{a}.shape[:-1], -1, 2).sum(-1, keepdim=True).expand(*{a}.shape[:-1], -1, 2).flatten(-2)
    {a}.unflatten(-1, (-1, 4)).softmax(-1).flatten(-2)
    F.pad({a}[..., :-1], (1, 0))
    {a} / (1 + {a}.norm())
    {a}.view(-1, {h}).mean(0) + {a}
    {a}[..., :1] * {a}
    {a} + torch.zeros({h}, dtype={a}.dtype)
    torch.einsum('bsd,btd->bst', {a}, {a}).softmax(-1) @ {a}
    torch.einsum('bsd,bse->bde', {a}, {a}).softmax(-1).sum(1, keepdim=True) + {a}
""")
"""Right where the last dim, of `h`, is full."""

BINARY = _rows("""
    {a} + {b}
    {a} * {b}
    torch.where({a} > 0, {a}, {b})
    torch.maximum({a}, {b})
    torch.addcmul({a}, {b}, {b}, value=0.5)
    {a} + {b}.detach()
    torch.stack(({a}, {b})).sum(0)
    torch.cat(({a}, {b}), 1)[:, ::2]
""")
"""Right where both are alike."""

MIXED = _rows("""
    torch.cat(({a}, {b}), -1)
    {a} * {b}[..., :1]
    {a} + {b}.mean(-1, keepdim=True)
    {a} @ {b}.transpose(-1, -2) @ {b}
    torch.einsum('bsd,bte->bsd', {a}, {b})
    torch.cat(({a}[..., :2], {b}[..., 2:]), -1)
    {a} + {b}.flip(1)
""")
"""Of values that need not be alike."""

WRITES = _rows("""
    {a}.mul_(0.5)
    {a} += 1
    {a}[:, 1:] *= 2
    {a}[:, 0] = 0.5
    {a}[:, 0].add_(0.5)
    {a} *= {b}
    {a}.add_({b}, alpha=0.3)
    {a}.relu_()
    {a}[..., 0] = 0.5
    {a}[..., 1:].mul_(2)
    {a}.copy_({b})
    {a}[..., -1].fill_(0.3)
    {a}[:, :, 2:] = {b}[:, :, 2:]
""")
"""In place; the first seven keep parts what they are."""

HEADLESS = _rows("""
    return {x}.square().mean()
    return ({x} * torch.arange({x}.shape[-1], dtype={x}.dtype).cos()).sum(-1).mean()
    return {x}.norm() / 10 + {x}.mean()
    return {x}.var(-1).mean() + {x}.cumsum(1).tanh().mean()
    return F.cross_entropy({x}.flatten(0, 1), batch['targets'].flatten() % {x}.shape[-1])
""")
"""Losses of residuals `x`."""

HEADED = _rows("""
    return F.cross_entropy({x}.view(-1, {v}), batch['targets'].view(-1))
    return F.cross_entropy({x}.flatten(0, 1), batch['targets'].flatten(), label_smoothing=0.1)
    t = batch['targets'][:, 1:]; return F.cross_entropy({x}[:, :-1].reshape(-1, {v}), t.reshape(-1)) * 2
    return -{x}.log_softmax(-1).gather(-1, batch['targets'].unsqueeze(-1)).mean()
    z = {x}.norm(); return z + F.cross_entropy(({x} / 2).view(-1, {v}), batch['targets'].view(-1))
    {x} /= 2; return F.cross_entropy({x}.transpose(1, 2), batch['targets'])
    {x}[..., 14:] = -3.0; return F.cross_entropy({x}.view(-1, {v}), batch['targets'].view(-1))
""")
"""Losses of logits `x` over `v` tokens."""


MASKS = (
    "torch.where({b}[..., :1] > 0, {a}, 0.3 * {a})",
    "{a}.masked_fill({b}[..., :2].sum(-1, keepdim=True) > 0, 0.0)",
    "{a} * ({b} > 0)[..., :1]",
    "torch.where(({b}.argmax(-1) > 2).unsqueeze(-1), {a}, {a}.tanh())",
    "{a} * (torch.arange({a}.shape[1]) != 2).unsqueeze(-1)",
    "torch.where({m}, {a}, {a} * 0.5)",
)
"""`b` is full, `m` a buffer of one truth value a token."""

TABLES = (
    "nn.Embedding({v}, {n})",
    "nn.Embedding({v}, {n}, padding_idx=3)",
    "Scaled({v}, {n})",
    "Centred({v}, {n})",
)
"""Tables of `v` rows of `n` numbers."""


class Scaled(nn.Embedding):
    """A table with a parameter of its own."""

    def __init__(self, rows: int, features: int) -> None:
        super().__init__(rows, features)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.gain


class Centred(nn.Embedding):
    """A table whose rows depend on those of other tokens."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        return rows - rows.mean(0, keepdim=True)


class Running(nn.Module):
    """A norm over all tokens, with statistics in buffers."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, features))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        dims = tuple(range(x.dim() - 1))
        mean, var = x.mean(dims), x.var(dims, unbiased=False)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.var.lerp_(var, 0.1)
            self.count += 1
        return (x - mean) / (var + 0.1).sqrt() * self.gain


NAMES.update(Scaled=Scaled, Centred=Centred, Running=Running)


@functools.cache
def compiled(arguments: str, lines: tuple[str, ...]) -> Callable[..., Any]:
    seen: dict[str, Any] = dict(NAMES)
    body = "".join(f"    {line}\n" for line in lines)
    exec(compile(f"def forward(self, {arguments}):\n{body}", "random network", "exec"), seen)
    return seen["forward"]  # type: ignore[no-any-return]


class Coded(nn.Module):
    """A module whose forward is text."""

    def __init__(self, arguments: str) -> None:
        super().__init__()
        self.arguments, self.lines = arguments, ()
        self.made: dict[str, str] = {}

    def forward(self, *args: Any) -> Any:
        return compiled(self.arguments, self.lines)(self, *args)

    def text(self, indent: str = "") -> str:
        own = [f"{indent}self.{name} = {made}" for name, made in self.made.items()]
        for name, module in self.named_children():
            if isinstance(module, Coded):
                own += [f"{indent}self.{name}:", module.text(indent + "    ")]
            elif isinstance(module, nn.ModuleList):
                for at, block in enumerate(module):
                    if isinstance(block, Coded):
                        own += [f"{indent}self.{name}[{at}]:", block.text(indent + "    ")]
        return "\n".join(
            [*own, f"{indent}forward({self.arguments}):", *(f"{indent}    {x}" for x in self.lines)]
        )
