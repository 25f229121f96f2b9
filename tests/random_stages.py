"""Random models whose values go anywhere: what the property test of pipelines captures.

A model is a list of steps, each a module, drawn from a seed. A step reads values of any steps before it: of
the one before, of ones far back (a skip over any number of stages), several at once. Values are of float64,
of other dtypes, integers and booleans, of one number (losses beside the loss), views of what another step has
made, slices with gaps and transposes. Leaves of the batch are read by any step. Parameters are of a step's
own, shared with others (used in several stages), frozen, or used without a gradient. The loss reads what is
left over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 6
TOKENS = 11

Batch = dict[str, Tensor]


def batch_of(rows: int, seed: int = 5) -> Batch:
    """Leaves of every kind; no two rows are alike."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=draw, dtype=torch.float64)

    return {
        "x": numbers(WIDTH),
        "time": numbers(),
        "mask": numbers(WIDTH) > 0.0,
        "tokens": torch.randint(0, TOKENS, (rows, 3), generator=draw),
        "labels": torch.randint(0, WIDTH, (rows,), generator=draw),
    }


class Weighted(nn.Module):
    """A step with a matrix, of its own or another step's."""

    def __init__(self, weight: nn.Parameter, kind: str) -> None:
        super().__init__()
        self.weight = weight
        self.kind = kind
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH, dtype=torch.float64))

    def forward(self, batch: Batch, x: Tensor, y: Tensor) -> Tensor:
        if self.kind == "linear":
            return F.linear(x, self.weight, self.bias).tanh()
        if self.kind == "two":
            return F.linear(x, self.weight).sigmoid() * (y @ self.weight) + self.bias
        if self.kind == "stopped":
            return x + F.linear(y, self.weight.detach()).sin() * self.bias
        if self.kind == "added":
            return x + y.mean(1, keepdim=True) + self.weight[0] + self.bias
        return x + F.embedding(batch["tokens"], self.weight.repeat(2, 1)[:TOKENS]).mean(1) * self.bias


WEIGHTED = ("linear", "linear", "two", "stopped", "added", "embedded")


class Late(torch.autograd.Function):
    """Half of x, with a gradient that is weighed by y: only its backward reads that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y.cos(), None


class Plain(nn.Module):
    """A step without parameters of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, batch: Batch, x: Tensor, y: Tensor) -> Tensor:
        return PLAIN[self.kind](batch, x, y)


PLAIN: dict[str, Callable[[Batch, Tensor, Tensor], Tensor]] = {
    "sum": lambda batch, x, y: x + y,
    "difference": lambda batch, x, y: (x - y).sin(),
    "joined": lambda batch, x, y: torch.cat([x[:, :2], y[:, 2:]], 1),
    "timed": lambda batch, x, y: x * batch["time"].unsqueeze(1) + y,
    "masked": lambda batch, x, y: torch.where(batch["mask"], x, y),
    "labelled": lambda batch, x, y: x + y.gather(1, batch["labels"].unsqueeze(1)),
    "stop": lambda batch, x, y: x + y.detach().cos(),
    "late": lambda batch, x, y: Late.apply(x, y),  # type: ignore[no-untyped-call]
}

SPECIAL: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "order": (lambda x: x.argsort(1), lambda x, i: x.gather(1, i)),
    "most": (lambda x: x.argmax(1), lambda x, i: x * (i + 1).unsqueeze(1)),
    "signs": (lambda x: x > 0.1, lambda x, b: torch.where(b, x, x * 0.5)),
    "bytes": (lambda x: (x > 0).sum(1).to(torch.int8), lambda x, n: x + n.to(torch.float64).unsqueeze(1)),
    "half": (lambda x: x.detach().to(torch.bfloat16), lambda x, h: x * h.to(torch.float64)),
    "single": (lambda x: x.detach().float(), lambda x, h: x - h.double().sin()),
    "turned": (lambda x: x.view(-1, 2, 3).transpose(1, 2), lambda x, t: x + t.reshape(-1, WIDTH)),
    "turned whole": (lambda x: x.t(), lambda x, t: x * t.t().cos()),
    "left": (lambda x: x[:, :3], lambda x, s: x + s.repeat(1, 2)),
    "every other": (lambda x: x[:, 1::2], lambda x, s: x * F.pad(s.sin(), (0, 3))),
    "turned slice": (lambda x: x[:, :4].t(), lambda x, s: x + F.pad(s.t(), (1, 1))),
    "spread": (lambda x: x.mean(1, keepdim=True).expand(-1, WIDTH), lambda x, s: x * s),
    "same": (lambda x: x.view(-1, 3, 2), lambda x, s: x + s.flatten(1).sin()),
    "cells": (lambda x: x.unfold(1, 3, 1), lambda x, s: x + F.pad(s.prod(2), (0, 2))),
    "corner": (lambda x: torch.diagonal(x.view(-1, 2, 3), 0, 1, 2), lambda x, s: x + s.sum(1, keepdim=True)),
}
"""Kind -> what makes a value of another kind than [rows, width] in float64, and what reads one."""


class Special(nn.Module):
    """Makes, or reads, a value of another kind."""

    def __init__(self, kind: str, reads: bool) -> None:
        super().__init__()
        self.kind, self.reads = kind, reads

    def forward(self, batch: Batch, x: Tensor, y: Tensor) -> Tensor:
        makes, reads = SPECIAL[self.kind]
        return reads(x, y) if self.reads else makes(x)


class Side(nn.Module):
    """A loss beside the loss: one number, added to what it is given."""

    def forward(self, batch: Batch, x: Tensor, y: Tensor) -> Tensor:
        return y + (x * x).mean()


@dataclass(frozen=True)
class Drawn:
    """reads: of each step the values that it reads (-1: the batch's x; -2: zero, one number)."""

    modules: tuple[nn.Module, ...]
    reads: tuple[tuple[int, int], ...]
    left: tuple[int, ...]
    side: int

    def text(self) -> str:
        lines = [
            f"v{k} = {type(m).__name__} {getattr(m, 'kind', '')}({', '.join(f'v{r}' for r in reads)})"
            for k, (m, reads) in enumerate(zip(self.modules, self.reads, strict=True))
        ]
        return "\n".join([*lines, f"loss of {self.left} and {self.side}"])


class Anywhere(nn.Module):
    """The model of a drawing."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.steps = nn.ModuleList(drawn.modules)
        self.head = nn.Parameter(
            torch.linspace(-1.0, 1.0, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, -1)
        )

    def forward(self, batch: Batch) -> Tensor:
        values: dict[int, Tensor] = {-1: batch["x"], -2: batch["x"].new_zeros(())}
        for at, (step, reads) in enumerate(zip(self.steps, self.drawn.reads, strict=True)):
            values[at] = step(batch, *(values[read] for read in reads))
        last = sum(values[at] for at in self.drawn.left)
        of_labels = F.cross_entropy(F.linear(last, self.head), batch["labels"])
        return of_labels + 0.1 * values[self.drawn.side]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = model(batch)
    return found


def draw_model(draw: Random) -> Anywhere:
    """A model of 6 to 14 steps; all values are read."""
    modules: list[nn.Module] = []
    reads: list[tuple[int, int]] = []
    weights: list[nn.Parameter] = []
    plain = [-1]
    special: list[tuple[int, str]] = []
    unread: list[int] = []
    side = -2

    def pick() -> int:
        """A value, more often a late one, or one that nothing reads yet."""
        at = draw.choice((plain[-1], draw.choice(plain), draw.choice(unread or plain)))
        if at in unread:
            unread.remove(at)
        return at

    def add(module: nn.Module, *of: int) -> int:
        modules.append(module)
        reads.append((of[0], of[-1]))
        return len(modules) - 1

    def made(at: int) -> None:
        plain.append(at)
        unread.append(at)

    for _ in range(draw.randint(6, 14)):
        kind = draw.choice(("weighted", "weighted", "plain", "makes", "reads", "side"))
        if kind == "weighted":
            shared = weights and draw.random() < 0.4
            weight = draw.choice(weights) if shared else _weight(draw)
            if not shared:
                weights.append(weight)
            made(add(Weighted(weight, draw.choice(WEIGHTED)), pick(), pick()))
        elif kind == "plain":
            made(add(Plain(draw.choice(tuple(PLAIN))), pick(), pick()))
        elif kind == "makes":
            what = draw.choice(tuple(SPECIAL))
            special.append((add(Special(what, False), pick()), what))
        elif kind == "reads" and special:
            at, what = draw.choice(special)
            made(add(Special(what, True), pick(), at))
        elif kind == "side":
            side = add(Side(), pick(), side)
    for at, what in special:
        if not any(read == at for of in reads for read in of):
            made(add(Special(what, True), pick(), at))
    return Anywhere(Drawn(tuple(modules), tuple(reads), tuple(unread or plain[-1:]), side))


def _weight(draw: Random) -> nn.Parameter:
    numbers = torch.Generator().manual_seed(draw.randrange(2**31))
    held = torch.randn(WIDTH, WIDTH, generator=numbers, dtype=torch.float64) * 0.6
    return nn.Parameter(held, requires_grad=draw.random() < 0.9)


def all_kinds() -> tuple[Anywhere, str]:
    """A model in which values of every kind are made, then read, and the name of the first step that reads
    one: cut there, all kinds cross."""
    modules: list[nn.Module] = [Weighted(_weight(Random(1)), "linear")]
    reads: list[tuple[int, int]] = [(-1, -1)]
    for kind in SPECIAL:
        modules.append(Special(kind, False))
        reads.append((0, 0))
    side = len(modules)
    modules.append(Side())
    reads.append((0, -2))
    first = last = len(modules)
    modules.append(Weighted(_weight(Random(2)), "two"))
    reads.append((0, 0))
    for at, kind in enumerate(SPECIAL):
        modules.append(Special(kind, True))
        reads.append((last, at + 1))
        last += 1
    modules.append(Side())
    reads.append((last, side))
    return Anywhere(Drawn(tuple(modules), tuple(reads), (last,), last + 1)), f"steps.{first}"


def one_read_late() -> Anywhere:
    """Three layers and, before the last, a step whose backward alone reads what the first has made."""
    layers = [Weighted(_weight(Random(seed)), "linear") for seed in range(3)]
    modules = (layers[0], layers[1], Plain("late"), layers[2])
    return Anywhere(Drawn(modules, ((-1, -1), (0, 0), (1, 0), (2, 2)), (3,), -2))
