"""A job with all-to-alls, by hand: that of `tests.price.comm_job`, of which every product's result goes to
other ranks, is doubled there, and comes back; so does its gradient. In float64, to be run.

What it computes is known: y = 2 x Up Down, stage by stage, with `tangent * y` as the last gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from stretto.ir.action import Phase
from stretto.ir.collectives import ALL_TO_ALL, KINDS, Kind
from stretto.ir.program import Job, Op, Ref, TensorSpec
from stretto.passes.rewrite import with_uses
from tests.price.comm_job import comm_job


def exchange_job(
    stages: int,
    *,
    tp: int = 2,
    rows: int = 12,
    hidden: int = 6,
    kind: Kind = ALL_TO_ALL,
) -> Job:
    """Two microbatches; rows and hidden must be multiples of tp. kind: what goes there; its gradient's kind
    goes back."""
    job = comm_job(stages, 2, tp=tp, rows=rows, hidden=hidden)

    def programs(stage: int, ops: dict[Phase, tuple[Op, ...]]) -> dict[Phase, tuple[Op, ...]]:
        moved = {f"h{stage}", f"gh{stage}"}
        return {phase: tuple(_exchanged(of, moved, tp, kind)) for phase, of in ops.items()}

    made = [replace(stage, ops=programs(stage.index, dict(stage.ops))) for stage in job.stages]
    return replace(
        job,
        stages=tuple(made),
        parameters=tuple(replace(p, spec=_wide(p.spec)) for p in job.parameters),
        edges=tuple(replace(edge, spec=_wide(edge.spec)) for edge in job.edges),
        batch=tuple((name, _wide(spec)) for name, spec in job.batch),
        message_parts=False,
    )


def _wide(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype="float64")


def _exchanged(ops: Sequence[Op], moved: set[str], tp: int, there: Kind) -> Iterator[Op]:
    for op in ops:
        outputs = tuple(None if spec is None else _wide(spec) for spec in op.outputs)
        wide = with_uses(replace(op, outputs=outputs), lambda name: f"{name}_back" if name in moved else name)
        yield replace(wide, alias=f"{op.alias}_back_start" if op.alias in moved else op.alias)
        if op.name not in moved:
            continue
        yield from _to_others(op.name, f"{op.name}_there", outputs, tp, there)
        yield Op(f"{op.name}_twice", "aten.mul.Tensor", (Ref(f"{op.name}_there"), 2.0), (), outputs)
        yield from _to_others(f"{op.name}_twice", f"{op.name}_back", outputs, tp, KINDS[there.gradient])


def _to_others(
    source: str, name: str, outputs: tuple[TensorSpec | None, ...], tp: int, kind: Kind
) -> Iterator[Op]:
    yield Op(f"{name}_start", kind.target, (Ref(source), "tp", tp), (), outputs)
    yield Op(name, "comm.wait", (Ref(f"{name}_start"),), (), outputs, alias=f"{name}_start")


class Products(nn.Module):
    """The model whose parameters the job reads, in ranged numbers."""

    def __init__(self, stages: int, hidden: int = 6) -> None:
        super().__init__()
        for stage in range(stages):
            for name, shape in ((f"up{stage}", (hidden, 4 * hidden)), (f"down{stage}", (4 * hidden, hidden))):
                ranged = torch.arange(4.0 * hidden**2, dtype=torch.float64) + 100 * stage
                self.register_parameter(name, nn.Parameter(torch.cos(ranged).reshape(shape)))

    def expected(self, microbatches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, gradients) of a step."""
        own = dict(self.named_parameters())
        stages, share = len(own) // 2, 1.0 / len(microbatches)
        loss = torch.zeros((), dtype=torch.float64)
        grads = {name: torch.zeros_like(p) for name, p in own.items()}
        for x in microbatches:
            inputs = [x]
            for stage in range(stages):
                inputs.append(2 * inputs[-1] @ own[f"up{stage}"] @ own[f"down{stage}"])
            loss += inputs[-1].mean() * share
            gradient = inputs[-1] * share
            for stage in reversed(range(stages)):
                up, down, given = own[f"up{stage}"], own[f"down{stage}"], inputs[stage]
                grads[f"down{stage}"] += (2 * given @ up).T @ gradient
                inner = 2 * gradient @ down.T
                grads[f"up{stage}"] += given.T @ inner
                gradient = inner @ up.T
        return loss.detach(), {name: grad.detach() for name, grad in grads.items()}


def batch_of(job: Job) -> torch.Tensor:
    """The full batch, ranged."""
    rows, hidden = job.batch[0][1].shape
    count = rows * hidden * job.microbatches
    return torch.sin(torch.arange(float(count), dtype=torch.float64)).reshape(-1, hidden)
