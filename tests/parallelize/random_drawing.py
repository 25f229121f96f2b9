"""Random small networks of sharded modules, as text: what the soundness test captures.

A network is a tree of modules whose forwards are lines of Python, drawn one after the other: a line that does
not run on the plain tensors is drawn again, so that no shapes are kept. `Network.text` is a description from
which a failing one can be written down as a script.

    1. Idioms (an MLP with gates, attention with heads, projections that are gathered and cut again, norms,
       tables, masks, buffers, weights used by hand) come with styles that fit, seasoned with ops that keep
       placements.
    2. With a network's own wildness, each of these choices is another: any style, any op on any values over
       any dims, writes in place, ties, modules that are called twice.
    3. One op, or one style, of a tame network is another as well: what is nearly right is where proofs fail.
    4. Networks for sequence parallelism have a list of blocks of these; the same is done to their code.

Everything follows from the seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.parallelize.random_lines import (
    ALONG,
    BINARY,
    LAST,
    MASKS,
    MIXED,
    NAMES,
    POINTWISE,
    TABLES,
    WRITES,
    Coded,
    compiled,
)

ROWS, LENGTH, HIDDEN, VOCAB = 2, 4, 8, 16
"""Of a microbatch: rows, tokens; features of residuals; tokens that there are."""

LINEAR = (
    *("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "packed_colwise:2"),
    *("packed_colwise:3", "vocabulary", "replicated", None),
)
"""Styles that a linear layer may have."""


@dataclass
class Network:
    """What is captured, and how. parallel: arguments of `stretto.Parallel`."""

    seed: int
    model: Coded
    batch: dict[str, Tensor]
    parallel: dict[str, Any]
    plan: dict[str, str]
    loss: tuple[str, ...]

    def loss_of(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return compiled("batch", self.loss)(model, batch)  # type: ignore[no-any-return]

    @property
    def text(self) -> str:
        loss = "\n".join(f"    {line}" for line in self.loss)
        head = f"# seed {self.seed}; Parallel({self.parallel})\n# tp_plan = {self.plan}"
        return f"{head}\n{self.model.text()}\nloss(self, batch):\n{loss}"


@dataclass
class Value:
    """A name in a module's code; sharded: whether its last dim is meant to be."""

    name: str
    sharded: bool = False


@dataclass
class Drawing:
    """One module's code while it is drawn. inside: whether it is a part of a block with sequence parallelism,
    where every module has a style; slips: how many ops of an otherwise tame module are any."""

    draw: Random
    wild: float
    module: Coded
    plan: dict[str, str]
    prefix: str
    heads: tuple[int, ...]
    given: Tensor
    inside: bool = False
    values: list[Value] = field(default_factory=lambda: [Value("x")])
    lines: list[str] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.env: dict[str, Any] = {**NAMES, "self": self.module, "x": self.given}
        self.slips = self.draw.choice((0, 0, 0, 1))

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

    def value(self, expression: str, sharded: bool = False) -> Value | None:
        name = f"v{self.count}"
        if not self.line(f"{name} = {expression}"):
            return None
        result = self.env[name]
        if not isinstance(result, Tensor) or result.numel() > 4096 or not result.is_floating_point():
            self.lines.pop()
            return None
        self.count += 1
        made = Value(name, sharded)
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

    def tie(self, name: str, other: str) -> None:
        """The weight of one is that of the other."""
        self.module.get_submodule(name[5:]).weight = getattr(self.module, other).weight
        self.module.made[name[5:]] += f"; {name}.weight = self.{other}.weight"

    def linear(self, features: int, out: int, style: str | None) -> str:
        if self.crazy() and not self.inside:
            style = self.draw.choice(LINEAR)
        first = f"nn.Linear({features}, {out}, "
        if self.draw.random() < 0.15:  # one that is there already is called twice, or its weight is shared
            for name, made in self.module.made.items():
                if made.startswith(first) and (self.plan.get(self.prefix + name) == style or self.crazy()):
                    if self.draw.random() < 0.5:
                        return f"self.{name}"
                    mine = self.add(f"{first}bias=False)", style)
                    self.tie(mine, name)
                    return mine
        return self.add(f"{first}bias={self.draw.random() < 0.6})", style)

    def called(self, module: str, x: Value, sharded: bool = False) -> Value | None:
        """The module's result; with its weight used by hand now and then."""
        by_hand = self.plan.get(self.prefix + module[5:]) in (None, "replicated") or self.crazy()
        if by_hand and self.draw.random() < 0.08 + 0.2 * self.wild:
            return self.value(f"F.linear({x.name}, {module}.weight)", sharded)
        return self.value(f"{module}({x.name})", sharded)

    def season(self, x: Value) -> Value:
        """Ops on a value, that keep what it is unless this network is wild."""
        for _ in range(self.draw.choice((0, 0, 1, 1, 2))):
            x = self.op(x) or x
        if self.draw.random() < 0.15:
            x = self.masked(x) or x
        if self.slips and self.draw.random() < 0.5:
            wild, self.wild = self.wild, 1.0
            made = self.op(x)
            self.wild = wild
            if made is not None and self.shape(made) == self.shape(x):
                self.slips -= 1
                return made
        return x

    def op(self, x: Value) -> Value | None:
        d = self.draw.choice((1, -2) if x.sharded and not self.crazy() else (0, 1, 2, -1, -2))
        kin = [v for v in self.values if self.shape(v) == self.shape(x) and v.sharded == x.sharded]
        if self.crazy():
            kin = self.values
        if self.crazy():
            known = self.draw.choice((ALONG, LAST, BINARY, MIXED, POINTWISE))
        else:
            known = self.draw.choice((*[POINTWISE] * 4, BINARY, ALONG, ALONG if x.sharded else LAST))
        text = self.draw.choice(known)
        if "numel" in text and x.sharded and not self.crazy():
            return None
        other = self.draw.choice(kin).name
        if self.draw.random() < 0.12 + 0.2 * self.wild:
            write = self.draw.choice(WRITES[:7] if x.sharded and not self.crazy() else WRITES)
            self.line(write.format(a=x.name, b=other))
            return None
        return self.value(text.format(a=x.name, b=other, d=d, h=self.shape(x)[-1]), x.sharded)

    # Tables, masks, norms.

    def table(self, features: int) -> str:
        """A call that looks rows up; the table may share its weight, or be used by it."""
        style: Any = self.draw.choice(("vocabulary", "vocabulary", "vocabulary", None, "replicated"))
        if self.inside:
            style = self.draw.choice(("vocabulary", "replicated"))
        elif self.crazy():
            style = self.draw.choice(("colwise", "rowwise", "colwise_gather_output"))
        name = self.add(self.draw.choice(TABLES).format(v=VOCAB, n=features), style)
        if self.draw.random() < 0.2:
            for other, text in self.module.made.items():
                fits = f"({VOCAB}, {features}" in text and other != name[5:]
                if fits and (self.plan.get(self.prefix + other) == style or self.crazy()):
                    self.tie(name, other)
                    break
        by_weight = self.draw.random() < 0.1 and (style != "vocabulary" or self.crazy())
        return f"F.embedding({{}}, {name}.weight)" if by_weight else f"{name}({{}})"

    def rows(self, x: Value, features: int) -> Value | None:
        """Rows of a table, one for each token: by the token, its position, or its largest feature."""
        names = [f"torch.arange({x.name}.shape[1])", f"{x.name}.detach().argmax(-1) % {VOCAB}"]
        if self.env["x"].dtype == torch.long:
            names += ["x", "x"]
        return self.value(self.table(features).format(self.draw.choice(names)))

    def masked(self, a: Value) -> Value | None:
        """A value of which some tokens are masked, by what all ranks have in full."""
        shape = self.shape(a)
        beside = [v for v in self.full() if self.shape(v)[:-1] == shape[:-1]]
        if not beside or len(shape) != 3:
            return None
        text, buffer = self.draw.choice(MASKS), ""
        if "{m}" in text:
            buffer = self.add(f"nn.Buffer((torch.arange({shape[1]}) % 2 == 0).unsqueeze(-1))", None)
        return self.value(text.format(a=a.name, b=self.draw.choice(beside).name, m=buffer), a.sharded)

    def norm(self, x: Value) -> Value | None:
        n = self.shape(x)[-1]
        kinds = (f"nn.LayerNorm({n})", f"nn.RMSNorm({n})")
        made = self.draw.choice([*kinds * (10 if self.inside else 3), f"Running({n})"])
        return self.value(f"{self.add(made, None)}({x.name})", x.sharded)

    def scaled(self, x: Value) -> Value | None:
        number = self.draw.choice((f"torch.linspace(0.5, 1.5, {self.shape(x)[-1]})", "torch.tensor(0.8)"))
        parameter = self.add(f"nn.Parameter({number}.double())", None)
        return self.value(f"{x.name} {self.draw.choice('+*')} {parameter}", x.sharded)

    # Idioms: a value of HIDDEN features that is full becomes another.

    def looked_up(self, x: Value) -> Value | None:
        row = self.rows(x, HIDDEN) if self.shape(x)[-1] == HIDDEN else None
        return None if row is None else self.value(f"{x.name} + {row.name}")

    def mlp(self, x: Value) -> Value | None:
        inner, features = self.draw.choice((8, 16)), self.shape(x)[-1]
        up = self.called(self.linear(features, inner, "colwise"), x, True)
        if up is None:
            return None
        gate: Value | None = None
        if self.draw.random() < 0.4:
            gate = self.called(self.linear(features, inner, "colwise"), x, True)
        elif self.draw.random() < 0.3:
            both = self.called(self.linear(features, 2 * inner, "packed_colwise:2"), x, True)
            if both is not None:
                gate = self.value(f"{both.name}.chunk(2, -1)[{self.draw.choice((0, 1))}]", True)
        up = self.season(up)
        if self.draw.random() < 0.25:
            up = self.per_token(x, up) or up
        if gate is not None:
            up = self.value(f"{self.season(gate).name} * {up.name}", True) or up
        if self.crazy():
            up = self.scaled(up) or up
        return self.called(self.linear(self.shape(up)[-1], HIDDEN, "rowwise"), up)

    def per_token(self, x: Value, beside: Value) -> Value | None:
        """One number a token (of a gate, a router), made from full values, beside sharded ones."""
        n = self.draw.choice((4, 8))
        if self.draw.random() < 0.4:
            y = self.rows(x, n)
        else:
            styles = ("colwise_gather_output", "rowwise_split_input", "vocabulary", None, "replicated")
            y = self.called(self.linear(self.shape(x)[-1], n, self.draw.choice(styles)), x)
        if y is None:
            return None
        ends = (
            "[..., :1]",
            ".mean(-1, keepdim=True)",
            ".softmax(-1)[..., 1:2]",
            ".norm(dim=-1, keepdim=True)",
        )
        return self.value(f"{beside.name} {self.draw.choice('*+')} {y.name}{self.draw.choice(ends)}", True)

    def attention(self, x: Value) -> Value | None:
        heads, width = self.draw.choice(self.heads), self.draw.choice((2, 4))
        inner, features = heads * width, self.shape(x)[-1]
        parts: list[Value | None]
        if self.draw.random() < 0.5:
            kinds: list[tuple[int, str | None]] = [(inner, "colwise")] * 3
            if self.draw.random() < 0.25 and not self.inside:
                # One head of keys and values, which all heads of queries read.
                style = self.draw.choice((None, "replicated", "colwise_gather_output"))
                kinds[1] = kinds[2] = (width, style)
            parts = [self.called(self.linear(features, n, kind), x, n == inner) for n, kind in kinds]
        else:
            packed = self.called(self.linear(features, 3 * inner, "packed_colwise:3"), x, True)
            if packed is None:
                return None
            cut = self.draw.choice((".chunk(3, -1)", ".unflatten(-1, (3, -1)).unbind(-2)"))
            parts = [self.value(f"{packed.name}{cut}[{k}]", True) for k in range(3)]
        count = heads if self.crazy() else -1
        split = self.draw.choice(
            (
                f".unflatten(-1, ({count}, {width})).transpose(1, 2)",
                f".reshape({ROWS}, {LENGTH}, {count}, {width}).permute(0, 2, 1, 3)",
            )
        )
        made = [self.value(f"{part.name}{split}", True) for part in parts if part is not None]
        qkv = [one.name for one in made if one is not None]
        if len(qkv) < 3:
            return None
        q, k, v = qkv
        if self.draw.random() < 0.3:
            y = self.value(f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True)", True)
        else:
            scale = self.draw.choice((f"/ {width} ** 0.5", f"* {q}.shape[-1] ** -0.5", "* 0.7"))
            einsum = f"torch.einsum('bhsd,bhtd->bhst', {q}, {k})"
            s = self.value(f"{self.draw.choice((f'({q} @ {k}.mT)', einsum))} {scale}", True)
            if s is not None and self.draw.random() < (0.0 if self.inside else 0.2) + 0.4 * self.wild:
                n = heads if self.crazy() else 1
                gain = f"nn.Parameter(torch.linspace(0.5, 1, {n}).double().view(-1, 1, 1))"
                s = self.value(f"{s.name} * {self.add(gain, None)}", True)
            if s is not None and self.draw.random() < 0.15:
                distance = f"(torch.arange({LENGTH})[:, None] - torch.arange({LENGTH})).abs()"
                s = self.value(f"{s.name} + {self.table(1).format(distance)}[..., 0]", True)
            if s is not None and self.draw.random() < 0.6:
                mask = f"torch.ones({s.name}.shape[-2:], dtype=torch.bool).tril()"
                s = self.value(f"{s.name}.masked_fill(~{mask}, -math.inf)", True)
            if s is None:
                return None
            y = self.value(f"{s.name}.softmax(-1) @ {v}", True)
        if y is None:
            return None
        back = self.draw.choice(
            (".transpose(1, 2).flatten(2)", f".permute(0, 2, 1, 3).reshape({ROWS}, {LENGTH}, -1)")
        )
        z = self.value(f"{y.name}{back}", True)
        return None if z is None else self.called(self.linear(inner, HIDDEN, "rowwise"), self.season(z))

    def gathered(self, x: Value) -> Value | None:
        """Full between: the output is gathered, and cut again."""
        inner = self.draw.choice((8, 16))
        style = self.draw.choice(("colwise_gather_output", "colwise_gather_output", None, "replicated"))
        y = self.called(self.linear(self.shape(x)[-1], inner, style), x)
        style = self.draw.choice(
            ("rowwise_split_input", "rowwise_split_input", "colwise_gather_output", None)
        )
        return None if y is None else self.called(self.linear(inner, HIDDEN, style), self.season(y))

    def full(self) -> list[Value]:
        shape = (ROWS, LENGTH, HIDDEN)
        return [v for v in self.values if self.shape(v) == shape and (not v.sharded or self.crazy())]

    def body(self, steps: int) -> Value:
        """Idioms one after the other, with residuals and branches between."""
        x = self.values[0]
        kinds = (self.mlp, self.mlp, self.attention, self.attention, self.gathered, self.norm, self.scaled)
        for _ in range(steps):
            made = self.draw.choice((*kinds, self.looked_up))(x)
            if made is None or self.shape(made) != self.shape(x):
                continue
            made = self.season(made)
            how = self.draw.random()
            if how < 0.5:
                made = self.value(f"{x.name} + {made.name}") or made
            elif how < 0.65:
                made = self.value(f"{self.draw.choice(self.full() or [x]).name} * {made.name}") or made
            if self.crazy():
                self.op(self.draw.choice(self.values))
            x = made if self.shape(made) == self.shape(x) else x
        return x
