"""How a random network is put together of drawings (`random_drawing`), with a loss, a batch and a layout."""

from __future__ import annotations

import copy
import math
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tests.parallelize.random_drawing import HIDDEN, LENGTH, LINEAR, ROWS, VOCAB, Drawing, Network, Value
from tests.parallelize.random_lines import ALONG, HEADED, HEADLESS, LAST, POINTWISE, Coded


def draw_network(seed: int) -> Network:
    """The network of a seed: the first of its drawings whose plain step runs with fair gradients."""
    for attempt in range(50):
        torch.set_default_dtype(torch.float64)
        try:
            network = _attempt(Random(f"network {seed} {attempt}"), seed)
        finally:
            torch.set_default_dtype(torch.float32)
        if network is not None and _fair(network):
            return network
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
    torch.manual_seed(seed)
    rows = ROWS * parallel["microbatches"] * parallel["dp"]
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, VOCAB, (rows, LENGTH), generator=generator) for _ in range(2))
    embeds = sequence or draw.random() < 0.5
    x = tokens if embeds else torch.randn(rows, LENGTH, HIDDEN, generator=generator)
    model = Coded("x")
    net = Drawing(draw, wild, model, {}, "", (4,) if tp == 4 else (2, 4), x[:ROWS])
    loss = _drawn(net, sequence, embeds)
    if loss is None or not net.plan:
        return None
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1 and parameter.numel() > 4:
                parameter.copy_(torch.randn(parameter.shape, generator=generator.manual_seed(seed + k)) * 0.4)
    if draw.random() < 0.4:
        _bent(draw, model, net.plan)
    return Network(seed, model.double().train(), {"x": x, "targets": targets}, parallel, net.plan, loss)


def _bent(draw: Random, model: nn.Module, plan: dict[str, str]) -> None:
    """Give one module another style than fits."""
    name, module = draw.choice(
        [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))]
        or [("", model)]
    )
    tabled = isinstance(module, nn.Embedding)
    style = (None if name in plan else "vocabulary") if tabled else draw.choice(LINEAR)
    plan.pop(name, None)
    if style is not None and name:
        plan[name] = style


def _drawn(net: Drawing, sequence: bool, embeds: bool) -> tuple[str, ...] | None:
    """Draw the model's code. Returns the lines of its loss."""
    draw, model, plan = net.draw, net.module, net.plan
    first: Value | None = net.values[0]
    if embeds:
        table = net.add(f"nn.Embedding({VOCAB}, {HIDDEN})", draw.choice(("vocabulary", "vocabulary", None)))
        first = net.value(f"{table}(x)")
    assert first is not None
    net.values = [first]
    end = _blocks(net, first) if sequence else net.body(draw.choice((1, 2, 2, 3)))
    if end is None:
        return None
    if draw.random() < 0.45 and not sequence:
        last = draw.choice(net.values) if net.crazy() else end
        net.lines.append(f"return {last.name}")
        lines = draw.choice(HEADLESS).format(x="y")
    else:
        if draw.random() < 0.3 and not sequence:
            end = net.norm(end) or end
        style = draw.choice(("vocabulary", "vocabulary", "vocabulary", "colwise_gather_output", None))
        if net.crazy():
            style = draw.choice(LINEAR)
        tied = embeds and draw.random() < 0.2 and net.shape(end)[-1] == HIDDEN
        if tied and not net.crazy():
            style = plan.get("m0")
        bias = draw.random() < 0.5 and not tied
        head = net.add(f"nn.Linear({net.shape(end)[-1]}, {VOCAB}, bias={bias})", style)
        if tied:
            net.tie(head, "m0")
        logits = net.value(f"{head}({end.name})")
        if logits is None:
            return None
        net.lines.append(f"return {logits.name}")
        lines = draw.choice(HEADED).format(x="y", v=VOCAB)
    model.lines = tuple(net.lines)
    return ("y = self(batch['x'])", *lines.split("; "))


def _blocks(net: Drawing, x: Value) -> Value | None:
    """A list of blocks: norms, parts (attention, MLP) and residuals, once or twice; then the norm after."""
    draw, model = net.draw, net.module
    model.blocks = nn.ModuleList()

    def inside(module: Coded, prefix: str, given: Tensor) -> Drawing:
        return Drawing(draw, net.wild, module, net.plan, prefix, net.heads, given, inside=True)

    for at in range(draw.choice((1, 2, 2))):
        block = Coded("x")
        model.blocks.append(block)
        inner = inside(block, f"blocks.{at}.", net.env[x.name])
        y = inner.values[0]
        for k in range(draw.choice((1, 2, 2))):
            part = Coded("x")
            setattr(block, f"part{k}", part)
            normed = inner.norm(y) if draw.random() < 0.8 else y
            if normed is None:
                return None
            within = inside(part, f"blocks.{at}.part{k}.", inner.env[normed.name])
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
            if draw.random() < 0.03 + inner.wild:
                out = inner.scaled(out) or out
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
