"""PyTorch's own tensor parallelism: the other side of the race. Eager DTensor, its own pipelining for pp > 1.

Touches public names of `torch.distributed` only. What makes it as fast as it can be here:

    1. Matrices, embedding and output head are spread by `ColwiseParallel` and `RowwiseParallel`; the output
       stays spread over the vocabulary, and the loss is `loss_parallel`'s, so that no logits travel.
    2. Modules hand plain local tensors to each other; only what is spread goes through DTensor.
    3. With sequence parallelism norms are `SequenceParallel`, and residuals stay slices of the sequence from
       the embedding to the head.
    4. Gradients of microbatches are added where they are. Those that are parts of a sum (norms that see a
       slice) are summed once a step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from stretto.models.gpt import GPT, cross_entropy


class TorchTensor:
    """A GPT spread by PyTorch over (pp, tp), of which this rank has a part.

    model: the full model; it is copied, and left alone. cuts: the blocks with which stages after the first
    begin, ascending. The world has pp * tp ranks, tp innermost.
    """

    def __init__(
        self, model: GPT, cuts: tuple[int, ...], tp: int, microbatches: int, *, sequence_parallel: bool
    ) -> None:
        pp = len(cuts) + 1
        mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
        self._tp = mesh["tp"]
        self._pp = mesh["pp"]
        self._at = self._pp.get_local_rank()
        self._microbatches = microbatches
        ends = (0, *cuts, len(model.blocks))
        self._part = _Part(model, ends[self._at], ends[self._at + 1])
        _spread(self._part, self._tp, sequence_parallel)
        self._schedule: Schedule1F1B | None = None
        if pp > 1:
            stage = PipelineStage(self._part, self._at, pp, torch.device("cpu"), group=self._pp.get_group())
            self._schedule = Schedule1F1B(stage, microbatches, loss_fn=self._loss)

    def step(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Forward and backward of the full batch; gradients are added to `.grad`. Returns the mean loss on
        ranks of the last stage, None on others."""
        with loss_parallel():
            losses = self._alone(batch) if self._schedule is None else self._pipelined(batch)
        self._sum_parts()
        return torch.stack(losses).mean() if losses else None

    def _alone(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        losses = []
        rows = zip(
            batch["input_ids"].chunk(self._microbatches),
            batch["labels"].chunk(self._microbatches),
            strict=True,
        )
        for tokens_BS, targets_BS in rows:
            loss = self._loss(self._part(tokens_BS), targets_BS)
            (loss / self._microbatches).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def _pipelined(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        assert self._schedule is not None
        losses: list[Tensor] = []
        last = self._at == self._pp.size() - 1
        given = (batch["input_ids"],) if self._at == 0 else ()
        if last:
            self._schedule.step(*given, target=batch["labels"], losses=losses, return_outputs=False)
        else:
            self._schedule.step(*given)
        return [loss.detach() for loss in losses]

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """The loss of logits that are spread over the vocabulary."""
        spread = DTensor.from_local(logits_BSV, self._tp, [Shard(-1)], run_check=False)
        loss = cross_entropy(spread, targets_BS)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def _sum_parts(self) -> None:
        for parameter in self._part.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and any(place.is_partial() for place in grad.placements):
                parameter.grad = _as(parameter, grad)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's part."""
        return self._part.parameters()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        """(the parameter's name in the full model, this rank's part of its gradient)."""
        for name, parameter in self._part.named_parameters():
            grad = parameter.grad
            if grad is not None:
                yield name, _as(parameter, grad).to_local() if isinstance(grad, DTensor) else grad


def _as(parameter: nn.Parameter, grad: DTensor) -> DTensor:
    """A gradient spread as its parameter is (an embedding's is full on every rank)."""
    assert isinstance(parameter, DTensor)
    return grad.redistribute(placements=parameter.placements)


class _Part(nn.Module):
    """The blocks from `first` up to `last` of a GPT, with the embedding before the first block and the norm
    and the head after the last; parameters keep their names."""

    def __init__(self, model: GPT, first: int, last: int) -> None:
        super().__init__()
        if first == 0:
            self.embedding = copy.deepcopy(model.embedding)
        self.blocks = nn.ModuleDict({str(k): copy.deepcopy(model.blocks[k]) for k in range(first, last)})
        if last == len(model.blocks):
            self.norm = copy.deepcopy(model.norm)
            self.head = copy.deepcopy(model.head)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, S), or activations of the stage before, to activations or logits."""
        if hasattr(self, "embedding"):
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def _spread(part: _Part, tp: DeviceMesh, sequence_parallel: bool) -> None:
    """Spread a part in place."""
    # Between modules activations are full, or slices of the sequence.
    residual = Shard(1) if sequence_parallel else Replicate()
    block: dict[str, ParallelStyle] = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=residual),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=residual),
    }
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        "head": ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1)),
    }
    if sequence_parallel:
        gather = PrepareModuleInput(
            input_layouts=(residual,), desired_input_layouts=(Replicate(),), use_local_output=False
        )
        block |= {
            "attention_norm": SequenceParallel(use_local_output=True),
            "mlp_norm": SequenceParallel(use_local_output=True),
            "attention": gather,
            "mlp": gather,
        }
        ends["norm"] = SequenceParallel(use_local_output=True)
    for each in part.blocks.values():
        parallelize_module(each, tp, block)
    parallelize_module(part, tp, {name: style for name, style in ends.items() if hasattr(part, name)})
