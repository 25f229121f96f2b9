"""Random small networks of spread modules, as text: what the soundness test captures.

A network is a tree of modules whose forwards are lines of Python, drawn one after the other (`random_code`):
a line that does not run on the plain tensors is drawn again, so that no shapes are kept. `Network.text` is a
description from which a failing one can be written down as a script.

    1. Idioms (an MLP with gates, attention with heads, projections that are gathered and cut again, norms,
       tables, masks, buffers, weights used by hand) come with styles that fit, seasoned with ops that keep
       placements.
    2. With a network's own wildness, each of these choices is another: any style, any op on any values over
       any dims, writes in place, shapes in numbers and factories, ties, modules that are called twice.
    3. One op, or one style, of a tame network is another as well: what is nearly right is where proofs fail.
    4. Networks for sequence parallelism have a list of blocks of these; the same is done to their code.
    5. Some of the others have own modules of experts, which ranks share (`random_experts`).
    6. Parameters have hooks now and then (`random_state`).

Everything follows from the seed.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.parallelize.random_code import HIDDEN, LENGTH, LINEAR, ROWS, VOCAB, Drawing, Value
from tests.parallelize.random_experts import shares_experts, with_mixture
from tests.parallelize.random_lines import ALONG, HEADED, HEADLESS, LAST, NAMES, POINTWISE, Coded, compiled
from tests.parallelize.random_state import draw_hooks, hooked, reads_buffers


@dataclass
class Network:
    """What is captured, and how. parallel: arguments of `stretto.Parallel`; hooks: parameter -> its hook."""

    seed: int
    model: Coded
    batch: dict[str, Tensor]
    parallel: dict[str, Any]
    plan: dict[str, str]
    loss: tuple[str, ...]
    wild: float
    hooks: dict[str, str] = field(default_factory=dict)

    def fresh(self) -> nn.Module:
        """A copy of the model as it is at first, with its hooks."""
        return hooked(copy.deepcopy(self.model), self.hooks)

    def loss_of(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return compiled("batch", self.loss)(model, batch)  # type: ignore[no-any-return]

    @property
    def text(self) -> str:
        loss = "\n".join(f"    {line}" for line in self.loss)
        return (
            f"# seed {self.seed}, wildness {self.wild}; Parallel({self.parallel})\n# tp_plan = {self.plan}\n"
            f"# hooks: {self.hooks}\n{self.model.text()}\nloss(self, batch):\n{loss}"
        )


def draw_network(seed: int) -> Network:
    """The network of a seed: the first of its drawings whose plain step runs with fair gradients."""
    for attempt in range(50):
        found = _attempt(Random(f"network {seed} {attempt}"), seed)
        if found is not None and _fair(found):
            return found
    raise AssertionError(f"seed {seed}: no drawing runs")


def _fair(network: Network) -> bool:
    model = copy.deepcopy(network.model)  # whose buffers stay as they are
    try:
        loss = network.loss_of(model, {k: v[:ROWS] for k, v in network.batch.items()})
        if loss.numel() != 1 or not math.isfinite(loss.item()):
            return False
        loss.backward()
    except Exception:
        return False
    norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
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
    shares_experts(seed, parallel)
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
    if reads_buffers(model):
        if "ep" in parallel:
            return None
        parallel["dp"] = 1
        rows = ROWS * parallel["microbatches"]
        network.batch = {name: value[:rows] for name, value in batch.items()}
    network.hooks = draw_hooks(draw, model, plan, wild)
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
        if "ep" in parallel:
            end = with_mixture(net, end)
            if end is None:
                return None
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
    """A list of blocks: norms, parts (attention, MLP) and residuals, once or twice; then the norm after."""
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
    for at in order:
        made = net.value(f"self.blocks[{at}]({x.name})")
        if made is None:
            return None
        x = made
        if net.crazy():
            x = net.value(draw.choice((*POINTWISE, *ALONG)).format(a=x.name, d=draw.choice((1, 2)))) or x
    model.norm = nn.LayerNorm(HIDDEN)
    return net.value(f"self.norm({x.name})")
