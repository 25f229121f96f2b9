"""Random small networks of spread modules, as text: what the soundness test captures.

A network is a tree of modules whose forwards are lines of Python, drawn one after the other: a line that does not
run on the plain tensors is drawn again, so that no shapes are kept here. `Network.text` is a description from
which a failing one can be written down as a script.

    1. Idioms (an MLP with gates, attention with heads, projections that are gathered and cut again, norms,
       positions, weights used by hand) come with styles that fit, seasoned with ops that keep placements.
    2. With a network's own wildness, each of these choices is another: any style, any op on any values over any
       dims, writes in place, shapes in numbers and factories, ties, modules that are called twice.
    3. One op, or one style, of a tame network is another as well: what is nearly right is where proofs fail.
    4. Networks for sequence parallelism have a list of blocks of these; the same is done to their code.

Everything follows from the seed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, LENGTH, HIDDEN, VOCAB = 2, 4, 8, 16
"""Of a microbatch: rows, tokens; features of residuals; tokens that there are."""

LINEAR = (
    *("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "packed_colwise:2"),
    *("packed_colwise:3", "vocabulary", "replicated", None),
)

NAMES = {"torch": torch, "F": F, "nn": nn, "math": math}


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


@dataclass
class Network:
    """What is captured, and how. parallel: arguments of `stretto.Parallel`."""

    seed: int
    model: Coded
    batch: dict[str, Tensor]
    parallel: dict[str, Any]
    plan: dict[str, str]
    loss: tuple[str, ...]
    wild: float

    def loss_of(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return compiled("batch", self.loss)(model, batch)  # type: ignore[no-any-return]

    @property
    def text(self) -> str:
        loss = "\n".join(f"    {line}" for line in self.loss)
        return (
            f"# seed {self.seed}, wildness {self.wild}; Parallel({self.parallel})\n# tp_plan = {self.plan}\n"
            f"{self.model.text()}\nloss(self, batch):\n{loss}"
        )


POINTWISE = (
    *("{a}.relu()", "{a}.sigmoid()", "torch.tanh({a})", "F.gelu({a})", "F.silu({a})", "-{a}", "{a} * 0.5"),
    *("{a}.clone()", "{a}.contiguous()", "{a}.double()", "F.dropout({a}, 0.0)", "{a}.detach() * {a}"),
    *(
        "torch.where({a} > 0, {a}, 0.1 * {a})",
        "{a}.clamp(-1.5, 1.5)",
        "({a}.abs() + 1).log()",
        "{a}.square()",
    ),
    *("{a} * torch.full_like({a}, 0.7)", "{a} + torch.zeros({a}.shape, dtype={a}.dtype)", "{a} + 0.25"),
    *("{a} * torch.ones({a}.shape[-1], dtype={a}.dtype)", "{a}.masked_fill({a} < -1, 0.5)", "{a} ** 3"),
    *(
        "{a}.float().double()",
        "torch.zeros_like({a}) + {a}",
        "{a} * {a}.sigmoid()",
        "F.relu({a} * 1, inplace=True)",
    ),
)
"""Right on any part."""

ALONG = (
    *("{a}.softmax({d})", "{a}.log_softmax({d})", "{a}.cumsum({d})", "{a} - {a}.mean({d}, keepdim=True)"),
    *("{a} * {a}.sum({d}, keepdim=True)", "{a} / (1 + {a}.var({d}, keepdim=True))", "{a}.flip({d})"),
    *("{a} / (1 + {a}.norm(dim={d}, keepdim=True))", "{a} - {a}.amax({d}, keepdim=True)", "{a}.roll(1, {d})"),
    *("F.normalize({a}, dim={d})", "torch.stack(({a}, 2 * {a}), {d}).mean({d})", "{a}.sort({d}).values"),
    *("torch.cat(({a}, -{a}), {d}).narrow({d}, 1, {a}.shape[{d}])", "{a} / {a}.shape[{d}]"),
    *("{a} * {a}.shape[{d}] ** -0.5", "sum({a}.unbind({d})).unsqueeze({d}) + {a}", "{a}.logcumsumexp({d})"),
    *("torch.cat({a}.chunk(2, {d})[::-1], {d})", "torch.cat({a}.split({a}.shape[{d}] // 2, {d}), {d}) * 2"),
    *(
        "{a}.index_select({d}, torch.arange({a}.shape[{d}] - 1, -1, -1))",
        "{a} * {a}.argmax({d}, keepdim=True)",
    ),
    *("{a} + {a}.narrow({d}, 0, 1)", "{a}.gather({d}, torch.zeros_like({a}, dtype=torch.long))"),
    *("torch.movedim({a}, {d}, -1).contiguous().movedim(-1, {d})", "{a} * {a}.numel() ** -0.5"),
)
"""Right where dim `d` is whole."""

LAST = (
    *("{a} * torch.arange({a}.shape[-1], dtype={a}.dtype).cos()", "F.layer_norm({a}, {a}.shape[-1:])"),
    *("{a} + torch.linspace(0, 1, {a}.shape[-1], dtype={a}.dtype)", "F.rms_norm({a}, {a}.shape[-1:])"),
    *(
        "{a} * torch.eye({a}.shape[-1], dtype={a}.dtype)[0]",
        "{a}.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)",
    ),
    *(
        "{a}.unflatten(-1, (2, -1)).flip(-2).flatten(-2)",
        "{a}.view(*{a}.shape[:-1], -1, 2).sum(-1, keepdim=True).expand(*{a}.shape[:-1], -1, 2).flatten(-2)",
    ),
    *(
        "{a}.unflatten(-1, (-1, 4)).softmax(-1).flatten(-2)",
        "{a}.view(*{a}.shape[:-1], 2, -1).mean(-2).repeat_interleave(2, -1)",
    ),
    *(
        "F.pad({a}[..., 1:], (0, 1))",
        "{a}.unflatten(-1, (-1, 2)).cumsum(-1).flatten(-2)",
        "F.pad({a}[..., :-1], (1, 0))",
    ),
    *(
        "{a} * F.one_hot({a}.argmax(-1), {a}.shape[-1])",
        "{a}.reshape({a}.shape[0], -1).cumsum(-1).view({a}.shape)",
    ),
    *(
        "{a} * {a}.mean()",
        "{a} - {a}.max()",
        "{a} / (1 + {a}.norm())",
        "{a}.flatten().softmax(0).view({a}.shape)",
    ),
    *("{a}.view(-1, {h}).mean(0) + {a}", "{a}[..., :1] * {a}", "{a}[..., ::2].repeat_interleave(2, -1)"),
    *("torch.nn.functional.glu({a}, -1).repeat(1, 1, 2)", "{a} + torch.zeros({h}, dtype={a}.dtype)"),
    *("torch.einsum('bsd,btd->bst', {a}, {a}).softmax(-1) @ {a}", "{a} @ ({a}.transpose(-1, -2) @ {a})"),
    *("torch.einsum('bsd,bse->bde', {a}, {a}).softmax(-1).sum(1, keepdim=True) + {a}",),
)
"""Right where the last dim is whole."""

BINARY = (
    *("{a} + {b}", "{a} * {b}", "{a} - {b}", "torch.where({a} > 0, {a}, {b})", "torch.lerp({a}, {b}, 0.3)"),
    *("torch.maximum({a}, {b})", "torch.addcmul({a}, {b}, {b}, value=0.5)", "{a} + {b}.detach()"),
    *("torch.stack(({a}, {b})).sum(0)", "torch.stack(({a}, {b}), -1).amax(-1)", "{a}.copysign({b})"),
    *("torch.cat(({a}, {b}), 1)[:, ::2]",),
)
"""Right where both are alike."""

MIXED = (
    *(
        "torch.cat(({a}, {b}), -1)",
        "{a} * {b}[..., :1]",
        "{a} + {b}.mean(-1, keepdim=True)",
        "{a} * {b}.mean()",
    ),
    *(
        "{a} @ {b}.transpose(-1, -2) @ {b}",
        "torch.einsum('bsd,bte->bsd', {a}, {b})",
        "torch.outer({a}.flatten(), {b}.flatten())[:4, :4].sum() * {a}",
    ),
    *(
        "torch.cat(({a}[..., :2], {b}[..., 2:]), -1)",
        "{a} + {b}.flip(1)",
        "{a} + {b}[:, :1]",
        "{a}.mul({b}.sum(-1, keepdim=True))",
    ),
)

WRITES = (
    *("{a}.mul_(0.5)", "{a} += 1", "{a}[:, 1:] *= 2", "{a}[:, 0] = 0.5", "{a}[:, 0].add_(0.5)", "{a} *= {b}"),
    *(
        "{a}.add_({b}, alpha=0.3)",
        "{a}.masked_fill_({a} > 1, 0.1)",
        "{a}.relu_()",
        "{a}.transpose(1, 2).neg_()",
    ),
    *(
        "{a}[..., 0] = 0.5",
        "{a}[..., 1:].mul_(2)",
        "{a}.copy_({b})",
        "{a}.index_fill_(1, torch.tensor([0]) if False else torch.zeros(1, dtype=torch.long), 0.5)",
    ),
    *(
        "{a}[..., -1].fill_(0.3)",
        "{a}.view(-1).add_(0.1)",
        "{a}[:, :, 2:] = {b}[:, :, 2:]",
        "{a}.clamp_(-1, 1)",
    ),
)


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
                    setattr(
                        self.env["self"].get_submodule(mine[5:]), "weight", getattr(self.module, name).weight
                    )
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
                per_head = self.crazy() or self.crazy()
                gain = self.add(
                    f"nn.Parameter(torch.linspace(0.5, 1, {heads if per_head else 1}).double().view(-1, 1, 1))",
                    None,
                )
                s = self.value(f"{s.name} {self.draw.choice('+*')} {gain}", True) or s
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
        made = self.draw.choice((f"nn.LayerNorm({n})", f"nn.RMSNorm({n})"))
        return self.value(f"{self.add(made, None)}({x.name})", x.spread)

    def positions(self, x: Value) -> Value | None:
        n = self.shape(x)[-1]
        if n != HIDDEN:
            return None
        style = self.draw.choice(("vocabulary", None))
        table = self.add(f"nn.Embedding({VOCAB}, {HIDDEN})", style)
        return self.value(f"{x.name} + {table}(torch.arange({x.name}.shape[1]))")

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
        return self.draw.choice((*kinds, self.positions))(x)

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


HEADLESS = (
    "return {x}.square().mean()",
    "return ({x} * torch.arange({x}.shape[-1], dtype={x}.dtype).cos()).sum(-1).mean()",
    "return {x}.norm() / 10 + {x}.mean()",
    "return F.mse_loss({x}, torch.ones_like({x}))",
    "return {x}.log_softmax(-1)[..., 0].neg().mean()",
    "return {x}.var(-1).mean() + {x}.cumsum(1).tanh().mean()",
    "return F.cross_entropy({x}.flatten(0, 1), batch['targets'].flatten() % {x}.shape[-1])",
)

HEADED = (
    "return F.cross_entropy({x}.view(-1, {v}), batch['targets'].view(-1))",
    "return F.cross_entropy({x}.flatten(0, 1), batch['targets'].flatten(), label_smoothing=0.1)",
    "return F.cross_entropy({x}[:, :-1].reshape(-1, {v}), batch['targets'][:, 1:].reshape(-1), reduction='sum') / 6",
    "return -{x}.log_softmax(-1).gather(-1, batch['targets'].unsqueeze(-1)).mean()",
    "return F.cross_entropy(({x} / 2).flatten(0, 1), batch['targets'].flatten()) + 0.1 * {x}.logsumexp(-1).square().mean()",
    "{x} /= 2; return F.cross_entropy({x}.transpose(1, 2), batch['targets'])",
    "{x}[..., 14:] = -3.0; return F.cross_entropy({x}.view(-1, {v}), batch['targets'].view(-1))",
    "return torch.cat([{x}, 2 * {x}], 1).square().mean() + {x}.softmax(-1)[..., 1].mean()",
)


def draw_network(seed: int) -> Network:
    """The network of a seed: the first of its drawings whose plain step runs and has gradients of a fair size."""
    for attempt in range(50):
        found = _attempt(Random(f"network {seed} {attempt}"), seed)
        if found is not None and _fair(found):
            return found
    raise AssertionError(f"seed {seed}: no drawing runs")


def _fair(network: Network) -> bool:
    network.model.zero_grad()
    try:
        loss = network.loss_of(network.model, {k: v[:ROWS] for k, v in network.batch.items()})
        if loss.numel() != 1 or not math.isfinite(loss.item()):
            return False
        loss.backward()
    except Exception:
        return False
    norms = [float(p.grad.norm()) for p in network.model.parameters() if p.grad is not None]
    network.model.zero_grad()
    return bool(norms) and all(n < 1e4 for n in norms) and max(norms) > 1e-4


def _attempt(draw: Random, seed: int) -> Network | None:
    wild = draw.choice((0.0, 0.0, 0.0, 0.03, 0.1, 0.25))
    sequence = draw.random() < 0.25
    tp = draw.choice((2, 2, 4))
    parallel: dict[str, Any] = {"tp": tp, "dp": draw.choice((1, 1, 1, 2)), "pp": draw.choice((1, 1, 1, 2))}
    if parallel["pp"] == 2 and tp == 4:
        parallel["dp"] = 1
    parallel["microbatches"] = draw.choice((1, 2)) if parallel["pp"] == 1 else 2
    if sequence:
        parallel["sequence_parallel"] = True
    torch.manual_seed(seed)
    rows = ROWS * parallel["microbatches"] * parallel["dp"]
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, VOCAB, (rows, LENGTH), generator=generator) for _ in range(2))
    batch = {"targets": targets}
    plan: dict[str, str] = {}
    embeds = sequence or draw.random() < 0.5
    if embeds:
        batch["x"] = tokens
    else:
        batch["x"] = torch.randn(rows, LENGTH, HIDDEN, generator=generator, dtype=torch.float64)
    model = Coded("x")
    heads = (4,) if tp == 4 else (2, 4)
    torch.set_default_dtype(torch.float64)
    try:
        network = _drawn(draw, seed, wild, sequence, model, plan, heads, batch, embeds, parallel)
    finally:
        torch.set_default_dtype(torch.float32)
    if network is None:
        return None
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1 and parameter.numel() > 4:
                parameter.copy_(torch.randn(parameter.shape, generator=generator.manual_seed(seed + k)) * 0.4)
    model.double().train()
    if draw.random() < 0.4:
        _bent(draw, model, plan)
    return network if plan else None


def _bent(draw: Random, model: nn.Module, plan: dict[str, str]) -> None:
    """Give one module another style than fits."""
    names = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    if not names:
        return
    name = draw.choice(names)
    if isinstance(model.get_submodule(name), nn.Embedding):
        style = None if name in plan else "vocabulary"
    else:
        style = draw.choice(LINEAR)
    plan.pop(name, None)
    if style is not None:
        plan[name] = style


def _drawing(
    draw: Random, wild: float, module: Coded, plan: dict[str, str], prefix: str, heads: Any, x: Tensor
) -> Drawing:
    made = Drawing(draw, wild, module, plan, prefix, heads, {**NAMES, "self": module, "x": x})
    made.values.append(Value("x"))
    made.slips = draw.choice((0, 0, 0, 1))
    return made


def _drawn(
    draw: Random, seed: int, wild: float, sequence: bool, model: Coded, plan: dict[str, str], heads: Any,
    batch: dict[str, Tensor], embeds: bool, parallel: dict[str, Any],
) -> Network | None:  # fmt: skip
    x = batch["x"][:ROWS]
    net = _drawing(draw, wild, model, plan, "", heads, x)
    first: Value | None = net.values[0]
    if embeds:
        style = draw.choice(("vocabulary", "vocabulary", None))
        table = net.add(f"nn.Embedding({VOCAB}, {HIDDEN})", style)
        first = net.value(f"{table}(x)")
    assert first is not None
    net.values = [first]
    if sequence:
        end = _blocks(net, first)
        if end is None:
            return None
    else:
        end = net.body(draw.choice((1, 2, 2, 3)))
    loss: list[str] = []
    if draw.random() < 0.55 or sequence:
        if draw.random() < 0.3 and not sequence:
            end = net.norm(end) or end
        style = draw.choice(("vocabulary", "vocabulary", "vocabulary", "colwise_gather_output", None))
        if net.crazy():
            style = draw.choice(LINEAR)
        if draw.random() < 0.2 and embeds and net.shape(end)[-1] == HIDDEN:
            plan.pop("m0", None)
            if style in ("vocabulary", None) and style is not None:
                plan["m0"] = style
            elif style is not None and net.crazy():
                plan["m0"] = "vocabulary"
            else:
                style = None
            head = net.add(f"nn.Linear({HIDDEN}, {VOCAB}, bias=False)", style)
            model.get_submodule(head[5:]).weight = model.m0.weight  # type: ignore[union-attr]
            model.made[head[5:]] += f"; {head}.weight = self.m0.weight"
        else:
            head = net.add(f"nn.Linear({net.shape(end)[-1]}, {VOCAB}, bias={draw.random() < 0.5})", style)
        logits = net.value(f"{head}({end.name})")
        if logits is None:
            return None
        net.lines.append(f"return {logits.name}")
        loss = ["y = self(batch['x'])", *draw.choice(HEADED).format(x="y", v=VOCAB).split("; ")]
    else:
        last = draw.choice(net.values) if net.crazy() else end
        net.lines.append(f"return {last.name}")
        loss = ["y = self(batch['x'])", *draw.choice(HEADLESS).format(x="y").split("; ")]
    model.lines = tuple(net.lines)
    return Network(seed, model, batch, parallel, plan, tuple(loss), wild)


def _blocks(net: Drawing, x: Value) -> Value | None:
    """A list of blocks, each a norm with a part (attention, MLP) and a residual, twice; then the norm after."""
    draw, model, plan = net.draw, net.module, net.plan
    model.blocks = nn.ModuleList()
    for at in range(draw.choice((1, 2, 2))):
        block = Coded("x")
        model.blocks.append(block)
        prefix = f"blocks.{at}."
        inner = _drawing(draw, net.wild, block, plan, prefix, net.heads, net.env[x.name])
        inner.inside = True
        y = inner.values[0]
        for k in range(draw.choice((1, 2, 2))):
            part = Coded("x")
            setattr(block, f"part{k}", part)
            normed = inner.norm(y) if draw.random() < 0.8 else y
            if normed is None:
                return None
            within = _drawing(
                draw, net.wild, part, plan, f"{prefix}part{k}.", net.heads, inner.env[normed.name]
            )
            within.inside = True
            end = draw.choice((within.mlp, within.attention))(within.values[0])
            if end is None:
                return None
            part.lines = (*within.lines, f"return {end.name}")
            out = inner.value(f"self.part{k}({normed.name})")
            if out is None:
                return None
            if draw.random() < 0.3:
                pointwise = draw.choice(POINTWISE if not inner.crazy() else (*ALONG, *LAST))
                out = inner.value(pointwise.format(a=out.name, d=draw.choice((1, 2)), h=HIDDEN)) or out
            if draw.random() < 0.15 + inner.wild:
                out = inner.scaled(out) or out
            if draw.random() < 0.15:
                residual = inner.value(f"{y.name} * 1")
                if residual is not None and inner.line(f"{residual.name} += {out.name}"):
                    y = residual
                    continue
            y = inner.value(f"{y.name} + {out.name}") or out
            if inner.crazy():
                y = inner.value(draw.choice((*ALONG, *LAST)).format(a=y.name, d=1, h=HIDDEN)) or y
        if inner.shape(y) != (ROWS, LENGTH, HIDDEN):
            return None
        block.lines = (*inner.lines, f"return {y.name}")
    order = list(range(len(model.blocks)))
    if net.crazy():
        order = draw.choice((order[::-1], order + order, order[:1]))
    for k, at in enumerate(order):
        made = net.value(f"self.blocks[{at}]({x.name})")
        if made is None:
            return None
        x = made
        if net.crazy():
            x = net.value(draw.choice((*POINTWISE, *ALONG)).format(a=x.name, d=draw.choice((1, 2)))) or x
    model.norm = nn.LayerNorm(HIDDEN)
    return net.value(f"self.norm({x.name})")
