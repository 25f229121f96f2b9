"""How the code of a random module is drawn, line by line (`random_networks` says what for)."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.parallelize import random_state
from tests.parallelize.random_lines import ALONG, BINARY, LAST, MIXED, NAMES, POINTWISE, WRITES, Coded

ROWS, LENGTH, HIDDEN, VOCAB = 2, 4, 8, 16
"""Of a microbatch: rows, tokens; features of residuals; tokens that there are."""

LINEAR = (
    *("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "packed_colwise:2"),
    *("packed_colwise:3", "vocabulary", "replicated", None),
)
"""Styles that a linear layer may have."""


@dataclass
class Value:
    """A name in a module's code; spread: whether its last dim is meant to be."""

    name: str
    spread: bool = False


@dataclass
class Drawing:
    """One module's code while it is drawn."""

    draw: Random
    wild: float
    module: Coded
    plan: dict[str, str]
    prefix: str
    heads: tuple[int, ...]
    env: dict[str, Any]
    values: list[Value] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    count: int = 0
    slips: int = 0
    """How many ops of an otherwise tame module are any."""
    inside: bool = False
    """Whether this is a part of a block with sequence parallelism, where every module has a style."""

    def crazy(self) -> bool:
        return self.draw.random() < self.wild

    def line(self, text: str) -> bool:
        """Add a line that runs."""
        before = dict(self.env)
        try:
            exec(text, self.env)
        except Exception:
            self.env.clear()
            self.env.update(before)
            return False
        self.lines.append(text)
        return True

    def value(self, expression: str, spread: bool = False) -> Value | None:
        name = f"v{self.count}"
        if not self.line(f"{name} = {expression}"):
            return None
        found = self.env[name]
        if not isinstance(found, Tensor) or found.numel() > 4096 or not found.is_floating_point():
            self.lines.pop()
            return None
        self.count += 1
        made = Value(name, spread)
        self.values.append(made)
        return made

    def shape(self, value: Value) -> torch.Size:
        return self.env[value.name].shape  # type: ignore[no-any-return]

    def add(self, made: str, style: str | None) -> str:
        """A submodule or parameter, by its constructor, with a style for the plan."""
        name = f"m{len(self.module.made)}"
        self.module.made[name] = made
        setattr(self.module, name, eval(made, {**NAMES, "self": self.module}))
        if style is not None:
            self.plan[self.prefix + name] = style
        return f"self.{name}"

    def linear(self, features: int, out: int, style: str | None) -> str:
        bias = self.draw.random() < 0.6
        if self.crazy() and not self.inside:
            style = self.draw.choice(LINEAR)
        if self.draw.random() < 0.15:  # one that is there already is called twice, or its weight is shared
            for name, made in self.module.made.items():
                alike = made.startswith(f"nn.Linear({features}, {out}, ")
                if alike and (self.plan.get(self.prefix + name) == style or self.crazy()):
                    if self.draw.random() < 0.5:
                        return f"self.{name}"
                    mine = self.add(f"nn.Linear({features}, {out}, bias={bias})", style)
                    self.env["self"].get_submodule(mine[5:]).weight = getattr(self.module, name).weight
                    self.module.made[mine[5:]] += f"; {mine}.weight = self.{name}.weight"
                    return mine
        return self.add(f"nn.Linear({features}, {out}, bias={bias})", style)

    def called(self, module: str, x: Value, spread: bool = False) -> Value | None:
        """The module's result; with its weight used by hand now and then."""
        if self.draw.random() < 0.08 + 0.2 * self.wild:
            styled = self.plan.get(self.prefix + module[5:])
            if styled in (None, "replicated") or self.crazy():
                return self.value(f"F.linear({x.name}, {module}.weight)", spread)
        return self.value(f"{module}({x.name})", spread)

    def season(self, x: Value) -> Value:
        """Ops on a value, that keep what it is unless this network is wild."""
        for _ in range(self.draw.choice((0, 0, 1, 1, 2))):
            x = self.op(x) or x
        if self.draw.random() < 0.15:
            x = random_state.masked(self, x) or x
        if self.slips and self.draw.random() < 0.5:
            wild, self.wild = self.wild, 1.0
            made = self.op(x)
            self.wild = wild
            if made is not None and self.shape(made) == self.shape(x):
                self.slips -= 1
                return made
        return x

    def op(self, x: Value) -> Value | None:
        d = self.draw.choice((1, -2) if x.spread and not self.crazy() else (0, 1, 2, -1, -2))
        pick = self.draw.random()
        alike = [v for v in self.values if self.shape(v) == self.shape(x) and v.spread == x.spread]
        if self.crazy():
            alike = self.values
        if self.crazy():
            known = self.draw.choice((ALONG, LAST, BINARY, MIXED, POINTWISE))
        elif pick < 0.5:
            known = POINTWISE
        elif pick < 0.7:
            known = BINARY
        elif pick < 0.85 or x.spread:
            known = ALONG
        else:
            known = LAST
        text = self.draw.choice(known)
        if "numel" in text and x.spread and not self.crazy():
            return None
        if self.draw.random() < 0.12 + 0.2 * self.wild:
            write = self.draw.choice(WRITES[:8] if x.spread and not self.crazy() else WRITES)
            self.line(write.format(a=x.name, b=self.draw.choice(alike).name))
            return None
        return self.value(
            text.format(a=x.name, b=self.draw.choice(alike).name, d=d, h=self.shape(x)[-1]), x.spread
        )

    def wander(self) -> None:
        """Any op on any value."""
        if self.values:
            self.op(self.draw.choice(self.values))

    # Idioms: a value of HIDDEN features that is whole becomes another.

    def mlp(self, x: Value) -> Value | None:
        inner = self.draw.choice((8, 16))
        up = self.called(self.linear(self.shape(x)[-1], inner, "colwise"), x, True)
        if up is None:
            return None
        gate: Value | None = None
        if self.draw.random() < 0.4:
            gate = self.called(self.linear(self.shape(x)[-1], inner, "colwise"), x, True)
        elif self.draw.random() < 0.3:
            both = self.called(self.linear(self.shape(x)[-1], 2 * inner, "packed_colwise:2"), x, True)
            if both is not None:
                k = self.draw.choice((0, 1))
                gate = self.value(f"{both.name}.chunk(2, -1)[{k}]", True)
        up = self.season(up)
        if self.draw.random() < 0.25:
            up = self.per_token(x, up) or up
        if gate is not None:
            up = self.value(f"{self.season(gate).name} * {up.name}", True) or up
        if self.draw.random() < 0.15:
            # A parameter of one number a feature, which a part of them does not fit.
            self.value(f"{up.name} * {self.add('nn.Parameter(torch.ones(1).double())', None)}", True)
        if self.crazy():
            scale = self.add(f"nn.Parameter(torch.linspace(0.5, 1, {inner}).double())", None)
            up = self.value(f"{up.name} * {scale}", True) or up
        return self.called(self.linear(self.shape(up)[-1], HIDDEN, "rowwise"), up)

    def per_token(self, x: Value, beside: Value) -> Value | None:
        """One number a token (of a gate, a router), made from whole values, beside spread ones."""
        n = self.draw.choice((4, 8))
        style = self.draw.choice(
            ("colwise_gather_output", "rowwise_split_input", "vocabulary", None, "replicated")
        )
        if self.draw.random() < 0.4:
            y = random_state.rows(self, x, n)
        else:
            y = self.called(self.linear(self.shape(x)[-1], n, style), x)
        if y is None:
            return None
        one = self.draw.choice(
            (
                "{y}[..., :1]",
                "{y}.mean(-1, keepdim=True)",
                "{y}.softmax(-1)[..., 1:2]",
                "{y}.norm(dim=-1, keepdim=True)",
            )
        )
        return self.value(f"{beside.name} {self.draw.choice('*+')} {one.format(y=y.name)}", True)

    def attention(self, x: Value) -> Value | None:
        heads = self.draw.choice(self.heads)
        width = self.draw.choice((2, 4))
        inner, features = heads * width, self.shape(x)[-1]
        if self.draw.random() < 0.5:
            kinds = [(inner, "colwise")] * 3
            if self.draw.random() < 0.25 and not self.inside:
                # One head of keys and values, which all heads of queries read.
                style = self.draw.choice((None, "replicated", "colwise_gather_output"))
                kinds[1] = kinds[2] = (width, style)
            parts = [self.called(self.linear(features, n, kind), x, n == inner) for n, kind in kinds]
        else:
            packed = self.called(self.linear(features, 3 * inner, "packed_colwise:3"), x, True)
            if packed is None:
                return None
            k = self.draw.random()
            split = (
                f"{packed.name}.chunk(3, -1)"
                if k < 0.6
                else f"{packed.name}.unflatten(-1, (3, -1)).unbind(-2)"
            )
            parts = [self.value(f"({split})[{k}]", True) for k in range(3)]
        by_hand = self.crazy()
        count = str(heads) if by_hand else "-1"
        split = self.draw.choice(
            (
                f"{{x}}.unflatten(-1, ({count}, {width})).transpose(1, 2)",
                f"{{x}}.view({{x}}.shape[0], {{x}}.shape[1], {count}, {width}).transpose(1, 2)",
                f"{{x}}.reshape({ROWS}, {LENGTH}, {count}, {width}).permute(0, 2, 1, 3)",
            )
        )
        made = []
        for part in parts:
            if part is None:
                return None
            if self.draw.random() < 0.3:
                part = self.season(part)
            made.append(self.value(split.format(x=part.name), True))
        q, k, v = made
        if q is None or k is None or v is None:
            return None
        if self.draw.random() < 0.25:
            q = self.value(f"F.layer_norm({q.name}, ({width},))", True) or q
        if self.draw.random() < 0.3:
            y = self.value(
                f"F.scaled_dot_product_attention({q.name}, {k.name}, {v.name}, is_causal=True)", True
            )
        else:
            scale = self.draw.choice(
                (
                    f"/ {width} ** 0.5",
                    f"* {q.name}.shape[-1] ** -0.5",
                    f"/ math.sqrt({q.name}.size(-1))",
                    "* 0.7",
                )
            )
            product = self.draw.choice(
                (
                    f"{q.name} @ {k.name}.transpose(-1, -2)",
                    f"torch.einsum('bhsd,bhtd->bhst', {q.name}, {k.name})",
                )
            )
            s = self.value(f"({product}) {scale}", True)
            if s is None:
                return None
            if self.draw.random() < 0.2 + 0.4 * self.wild:
                n = heads if self.crazy() or self.crazy() else 1
                gain = self.add(
                    f"nn.Parameter(torch.linspace(0.5, 1, {n}).double().view(-1, 1, 1))",
                    None,
                )
                s = self.value(f"{s.name} {self.draw.choice('+*')} {gain}", True) or s
            if self.draw.random() < 0.15:
                s = self.value(f"{s.name} + {random_state.relative(self, f'{s.name}.shape[-1]')}", True) or s
            if self.draw.random() < 0.15:
                mask = f"({x.name}.argmax(-1) == 0)[:, None, None]"
                s = self.value(f"{s.name}.masked_fill({mask}, -9.0)", True) or s
            if self.draw.random() < 0.6:
                mask = f"torch.ones({s.name}.shape[-2:], dtype=torch.bool).tril()"
                s = self.value(f"{s.name}.masked_fill(~{mask}, -math.inf)", True) or s
            if self.crazy():
                s = (
                    self.value(
                        self.draw.choice(ALONG).format(a=s.name, d=self.draw.choice((0, 1, 2, 3))), True
                    )
                    or s
                )
            p = self.value(f"{s.name}.softmax(-1)", True)
            if p is None:
                return None
            join = self.draw.choice(
                (f"{p.name} @ {v.name}", f"torch.einsum('bhst,bhtd->bhsd', {p.name}, {v.name})")
            )
            y = self.value(join, True)
        if y is None:
            return None
        back = self.draw.choice(
            (
                f"{y.name}.transpose(1, 2).flatten(2)",
                f"{y.name}.transpose(1, 2).reshape({y.name}.shape[0], {y.name}.shape[2], -1)",
                f"{y.name}.permute(0, 2, 1, 3).contiguous().view({ROWS}, {LENGTH}, -1)",
                f"torch.cat({y.name}.unbind(1), -1)",
            )
        )
        z = self.value(back, True)
        return None if z is None else self.called(self.linear(inner, HIDDEN, "rowwise"), self.season(z))

    def gathered(self, x: Value) -> Value | None:
        """Whole between: the output is gathered, and cut again."""
        inner = self.draw.choice((8, 16))
        style = self.draw.choice(("colwise_gather_output", "colwise_gather_output", None, "replicated"))
        y = self.called(self.linear(self.shape(x)[-1], inner, style), x)
        if y is None:
            return None
        style = self.draw.choice(
            ("rowwise_split_input", "rowwise_split_input", "colwise_gather_output", None)
        )
        return self.called(self.linear(inner, HIDDEN, style), self.season(y))

    def norm(self, x: Value) -> Value | None:
        n = self.shape(x)[-1]
        if self.draw.random() < (0.05 if self.inside else 0.25):
            return random_state.kept(self, x)
        made = self.draw.choice((f"nn.LayerNorm({n})", f"nn.RMSNorm({n})"))
        return self.value(f"{self.add(made, None)}({x.name})", x.spread)

    def rows(self, x: Value) -> Value | None:
        found = random_state.rows(self, x, HIDDEN) if self.shape(x)[-1] == HIDDEN else None
        return None if found is None else self.value(f"{x.name} + {found.name}")

    def scaled(self, x: Value) -> Value | None:
        n = self.shape(x)[-1]
        made = self.draw.choice(
            (
                f"nn.Parameter(torch.linspace(0.5, 1.5, {n}).double())",
                "nn.Parameter(torch.tensor(0.8).double())",
                "nn.Parameter(torch.ones(1).double())",
            )
        )
        return self.value(f"{x.name} {self.draw.choice('+*')} {self.add(made, None)}", x.spread)

    def idiom(self, x: Value) -> Value | None:
        kinds = (self.mlp, self.mlp, self.attention, self.attention, self.gathered, self.norm, self.scaled)
        return self.draw.choice((*kinds, self.rows))(x)

    def whole(self) -> list[Value]:
        shape = (ROWS, LENGTH, HIDDEN)
        return [v for v in self.values if self.shape(v) == shape and (not v.spread or self.crazy())]

    def body(self, steps: int) -> Value:
        """Idioms one after the other, with residuals and branches between."""
        x = self.values[0]
        for _ in range(steps):
            made = self.idiom(x)
            if made is None or self.shape(made) != self.shape(x):
                continue
            made = self.season(made)
            how = self.draw.random()
            if how < 0.5:
                made = self.value(f"{x.name} + {made.name}") or made
            elif how < 0.65:
                made = self.value(f"{self.draw.choice(self.whole() or [x]).name} * {made.name}") or made
            if self.crazy():
                self.wander()
            if self.shape(made) == self.shape(x):
                x = made
        if self.crazy():
            other = self.draw.choice(self.values)
            x = self.value(self.draw.choice(BINARY).format(a=x.name, b=other.name)) or x
        return x
