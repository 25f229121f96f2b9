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


STEPS: dict[str, Callable[[Any, Batch, Tensor, Tensor], Tensor]] = {
    "linear": lambda s, batch, x, y: F.linear(x, s.weight, s.bias).tanh(),
    "two": lambda s, batch, x, y: F.linear(x, s.weight).sigmoid() * (y @ s.weight) + s.bias,
    "stopped": lambda s, batch, x, y: x + F.linear(y, s.weight.detach()).sin() * s.bias,
    "added": lambda s, batch, x, y: x + y.mean(1, keepdim=True) + s.weight[0] + s.bias,
    "embedded": lambda s, batch, x, y: (
        x + F.embedding(batch["tokens"], s.weight.repeat(2, 1)[:TOKENS]).mean(1) * s.bias
    ),
    "sum": lambda s, batch, x, y: x + y,
    "difference": lambda s, batch, x, y: (x - y).sin(),
    "joined": lambda s, batch, x, y: torch.cat([x[:, :2], y[:, 2:]], 1),
    "timed": lambda s, batch, x, y: x * batch["time"].unsqueeze(1) + y,
    "masked": lambda s, batch, x, y: torch.where(batch["mask"], x, y),
    "labelled": lambda s, batch, x, y: x + y.gather(1, batch["labels"].unsqueeze(1)),
    "stop": lambda s, batch, x, y: x + y.detach().cos(),
    "late": lambda s, batch, x, y: Late.apply(x, y),  # type: ignore[no-untyped-call]
    "side": lambda s, batch, x, y: y + (x * x).mean(),
}
"""Kind -> what a step makes of the batch and two values. The first five have a matrix and a bias; the last
makes a loss besides the loss: one number, added to what it is given."""

WEIGHTED = ("linear", "linear", "two", "stopped", "added", "embedded")
PLAIN = tuple(kind for kind in STEPS if kind not in (*WEIGHTED, "side"))

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


for _kind, (_makes, _reads) in SPECIAL.items():
    STEPS[f"make {_kind}"] = lambda s, batch, x, y, makes=_makes: makes(x)
    STEPS[f"read {_kind}"] = lambda s, batch, x, y, reads=_reads: reads(x, y)


class Step(nn.Module):
    """weight: of a step that has one, its own or another step's."""

    def __init__(self, kind: str, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.kind = kind
        if weight is not None:
            self.weight = weight
            self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH, dtype=torch.float64))

    def forward(self, batch: Batch, x: Tensor, y: Tensor) -> Tensor:
        return STEPS[self.kind](self, batch, x, y)


class Anywhere(nn.Module):
    """Steps and, of each, the values that it reads (-1: the batch's x; -2: zero, one number). The loss is of
    `left` and of `side`."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList()
        self.reads: list[tuple[int, int]] = []
        self.left: list[int] = []
        self.side = -2
        numbers = torch.linspace(-1.0, 1.0, WIDTH * WIDTH, dtype=torch.float64)
        self.head = nn.Parameter(numbers.view(WIDTH, -1))

    def add(self, kind: str, *of: int, weight: nn.Parameter | None = None) -> int:
        self.steps.append(Step(kind, weight))
        self.reads.append((of[0], of[-1]))
        return len(self.steps) - 1

    def forward(self, batch: Batch) -> Tensor:
        values: dict[int, Tensor] = {-1: batch["x"], -2: batch["x"].new_zeros(())}
        for at, (step, reads) in enumerate(zip(self.steps, self.reads, strict=True)):
            values[at] = step(batch, *(values[read] for read in reads))
        last = sum(values[at] for at in self.left)
        of_labels = F.cross_entropy(F.linear(last, self.head), batch["labels"])
        return of_labels + 0.1 * values[self.side]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = model(batch)
    return found


def draw_model(draw: Random) -> Anywhere:
    """A model of 6 to 14 steps; all values are read."""
    model = Anywhere()
    weights: list[nn.Parameter] = []
    plain = [-1]
    special: list[tuple[int, str]] = []
    unread: list[int] = []

    def pick() -> int:
        """A value, more often a late one, or one that nothing reads yet."""
        at = draw.choice((plain[-1], draw.choice(plain), draw.choice(unread or plain)))
        if at in unread:
            unread.remove(at)
        return at

    def add(kind: str, *of: int, weight: nn.Parameter | None = None) -> None:
        plain.append(model.add(kind, *of, weight=weight))
        unread.append(plain[-1])

    for _ in range(draw.randint(6, 14)):
        kind = draw.choice(("weighted", "weighted", "plain", "makes", "reads", "side"))
        if kind == "weighted":
            if not weights or draw.random() < 0.6:
                weights.append(_weight(draw))
            add(draw.choice(WEIGHTED), pick(), pick(), weight=draw.choice((weights[-1], *weights)))
        elif kind == "plain":
            add(draw.choice(PLAIN), pick(), pick())
        elif kind == "makes":
            what = draw.choice(tuple(SPECIAL))
            special.append((model.add(f"make {what}", pick()), what))
        elif kind == "reads" and special:
            at, what = draw.choice(special)
            add(f"read {what}", pick(), at)
        elif kind == "side":
            model.side = model.add("side", pick(), model.side)
    for at, what in special:
        if not any(at in of for of in model.reads):
            add(f"read {what}", pick(), at)
    model.left = unread or plain[-1:]
    return model


def _weight(draw: Random) -> nn.Parameter:
    numbers = torch.Generator().manual_seed(draw.randrange(2**31))
    values = torch.randn(WIDTH, WIDTH, generator=numbers, dtype=torch.float64) * 0.6
    return nn.Parameter(values, requires_grad=draw.random() < 0.9)


def all_kinds() -> tuple[Anywhere, str]:
    """A model in which values of every kind are made, then read, and the name of the first step that reads
    one: cut there, all kinds cross."""
    model = Anywhere()
    model.add("linear", -1, weight=_weight(Random(1)))
    made = {kind: model.add(f"make {kind}", 0) for kind in SPECIAL}
    side = model.add("side", 0, -2)
    first = last = model.add("two", 0, weight=_weight(Random(2)))
    for kind, at in made.items():
        last = model.add(f"read {kind}", last, at)
    model.left, model.side = [last], model.add("side", last, side)
    return model, f"steps.{first}"


def one_read_late() -> Anywhere:
    """Three layers and, before the last, a step whose backward alone reads what the first has made."""
    model = Anywhere()
    for kind, of in (("linear", (-1,)), ("linear", (0,)), ("late", (1, 0)), ("linear", (2,))):
        model.add(kind, *of, weight=_weight(Random(len(model.steps))) if kind == "linear" else None)
    model.left = [3]
    return model
