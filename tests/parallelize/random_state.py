"""What random networks have beside matrices (`random_code`): tables of rows, masks, norms and numbers kept in
buffers, hooks on parameters."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.parallelize.random_lines import NAMES

if TYPE_CHECKING:
    from tests.parallelize.random_code import Drawing, Value

VOCAB = 16


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
    """A norm over all tokens, with statistics in buffers. reads: it uses them."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, features: int, reads: bool) -> None:
        super().__init__()
        self.reads, self.gain = reads, nn.Parameter(torch.linspace(0.5, 1.5, features))
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
        if self.reads:
            mean, var = self.mean.clone(), self.var.clone()
        return (x - mean) / (var + 0.1).sqrt() * self.gain


NAMES.update(Scaled=Scaled, Centred=Centred, Running=Running)

MASKS = (
    "torch.where({b}[..., :1] > 0, {a}, 0.3 * {a})",
    "{a}.masked_fill({b}[..., :2].sum(-1, keepdim=True) > 0, 0.0)",
    "{a} * ({b} > 0)[..., :1]",
    "torch.where(({b}.argmax(-1) > 2).unsqueeze(-1), {a}, {a}.tanh())",
    "{a} * (torch.arange({a}.shape[1]) != 2).unsqueeze(-1)",
    "torch.where({m}, {a}, {a} * 0.5)",
)
"""`b` is whole, `m` a buffer of one truth value a token."""

TABLES = (
    "nn.Embedding({v}, {n})",
    "nn.Embedding({v}, {n}, padding_idx=3)",
    "Scaled({v}, {n})",
    "Centred({v}, {n})",
)


def table(made: Drawing, features: int) -> str:
    """A table, which may share its weight with another one or be used by its weight: what looks rows up."""
    draw = made.draw
    style: Any = draw.choice(("vocabulary", "vocabulary", "vocabulary", None, "replicated"))
    if made.inside:
        style = draw.choice(("vocabulary", "replicated"))
    elif made.crazy():
        style = draw.choice(("colwise", "rowwise", "colwise_gather_output"))
    name = made.add(draw.choice(TABLES).format(v=VOCAB, n=features), style)
    if draw.random() < 0.2:
        for other, text in made.module.made.items():
            alike = f"({VOCAB}, {features}" in text and other != name[5:]
            if alike and (made.plan.get(made.prefix + other) == style or made.crazy()):
                made.module.get_submodule(name[5:]).weight = getattr(made.module, other).weight
                made.module.made[name[5:]] += f"; {name}.weight = self.{other}.weight"
                break
    by_weight = draw.random() < 0.1 and (style != "vocabulary" or made.crazy())
    return f"F.embedding({{}}, {name}.weight)" if by_weight else f"{name}({{}})"


def rows(made: Drawing, x: Value, features: int) -> Value | None:
    """Rows of a table, one for each token: by the token, its place, or its largest feature."""
    names = [f"torch.arange({x.name}.shape[1])", f"{x.name}.detach().argmax(-1) % {VOCAB}"]
    tokens = made.env.get("x")
    if isinstance(tokens, Tensor) and tokens.dtype == torch.long:
        names = [*names, "x", "x"]
    return made.value(table(made, features).format(made.draw.choice(names)))


def relative(made: Drawing, length: str) -> str:
    """Biases of attention by distance, the same for all heads."""
    distance = f"(torch.arange({length})[:, None] - torch.arange({length})).abs()"
    return f"{table(made, 1).format(distance)}[..., 0]"


def masked(made: Drawing, a: Value) -> Value | None:
    """A value of which some tokens are masked, by what all ranks hold whole."""
    shape = made.shape(a)
    beside = [v for v in made.whole() if made.shape(v)[:-1] == shape[:-1]]
    if not beside or len(shape) != 3:
        return None
    text = made.draw.choice(MASKS)
    buffer = ""
    if "{m}" in text:
        buffer = made.add(f"nn.Buffer((torch.arange({shape[1]}) % 2 == 0).unsqueeze(-1))", None)
    return made.value(text.format(a=a.name, b=made.draw.choice(beside).name, m=buffer), a.spread)


def kept(made: Drawing, x: Value) -> Value | None:
    """A norm with buffers, or a number that is kept of one microbatch for the next."""
    draw, n = made.draw, made.shape(x)[-1]
    pick = draw.random()
    if pick < 0.6:
        module = made.add(f"Running({n}, {draw.random() < 0.4})", None)
        return made.value(f"{module}({x.name})", x.spread)
    if pick < 0.75:
        module = made.add(f"nn.BatchNorm1d({n})", None)
        return made.value(f"{module}({x.name}.transpose(1, 2)).transpose(1, 2)", x.spread)
    buffer = made.add("nn.Buffer(torch.ones(()).double())", None)
    of = draw.choice(made.values) if made.crazy() else x
    if not made.line(f"{buffer}.lerp_({of.name}.detach().{draw.choice(('mean', 'amax', 'norm'))}(), 0.1)"):
        return None
    return made.value(f"{x.name} * {buffer}.clone().tanh()", x.spread)


def reads_buffers(model: nn.Module) -> bool:
    """Whether a microbatch computes with what earlier ones left: ranks along dp each have others."""
    numbers = any(buffer.dim() == 0 and buffer.is_floating_point() for buffer in model.buffers())
    return numbers or any(isinstance(m, Running) and m.reads for m in model.modules())


def _halved(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


HOOKS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "a half": ("register_hook", lambda grad: grad * 0.5),
    "clamped": ("register_hook", lambda grad: grad.clamp(-0.01, 0.01)),
    "by the norm": ("register_hook", lambda grad: grad / (1 + grad.norm())),
    "a half, afterwards": ("register_post_accumulate_grad_hook", _halved),
}
"""Name -> how it is registered on a parameter, and what it is."""


def draw_hooks(draw: Random, model: nn.Module, plan: dict[str, str], wild: float) -> dict[str, str]:
    """Parameter -> its hook, now and then; seldom of one that is sharded, which is refused."""
    if draw.random() < 0.75:
        return {}
    shares = {
        id(p) for n, p in model.named_parameters(remove_duplicate=False) if n.rpartition(".")[0] in plan
    }
    names = [n for n, p in model.named_parameters() if id(p) not in shares or draw.random() < wild]
    return {name: draw.choice(list(HOOKS)) for name in names if draw.random() < 0.7}


def hooked(model: nn.Module, hooks: dict[str, str]) -> nn.Module:
    """The model with hooks, which deep copies leave out."""
    for name, hook in hooks.items():
        how, function = HOOKS[hook]
        getattr(model.get_parameter(name), how)(function)
    return model
