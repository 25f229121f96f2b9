"""PyTorch's own context parallelism: the other side of the race. Its ring, eager, and its data parallelism.

`context_parallel` shares the sequence as Stretto does: rank r has blocks r and 2 N - 1 - r of 2 N. On
processors it goes no further: the attention that PyTorch chooses there has no rule in DTensor ("Operator
aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered"). So
its ring is given that kernel here. No other file names what is private to it.

    1. `context_parallel` cuts ids, labels and the tables of rotary angles, which are buffers, as it wants.
    2. Attention is PyTorch's ring, forward and backward, around the kernel of processors. A message is
       started before the attention under which it travels: by all-to-all from rank to rank, or, as is its
       default, by one all-gather. Gradients of keys and values always go from rank to rank.
    3. Gradients of parameters are averaged by `DistributedDataParallel`, under the last backward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
    set_rotate_method,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.racing import Batch
from stretto.models.gpt import GPT, ROTARY_BASE, Attention, cross_entropy

ROTATIONS = {"torch ring": "alltoall", "torch all-gather": "allgather"}
"""System -> how keys and values come, as PyTorch calls it."""

ROWS = 2
"""The sequence, of (batch, heads, sequence, size of a head)."""

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TorchContext:
    """A GPT whose sequence PyTorch's ranks share; the world is one axis.

    model: copied, and left alone; its positions are rotary. rotation: a value of `ROTATIONS`.
    """

    def __init__(self, model: GPT, microbatches: int, rotation: str) -> None:
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._microbatches, self._rotation = microbatches, rotation
        self._angles = _Angles(model)
        self._model = copy.deepcopy(model)
        for block in self._model.blocks:
            block.attention = _RingAttention(block.attention, self._angles, self._mesh.get_group())
        self._averaged = DistributedDataParallel(self._model, gradient_as_bucket_view=True)

    def step(self, batch: Batch) -> Tensor:
        """Forward and backward of the full batch; gradients are added to `.grad`. Returns the mean loss."""
        set_rotate_method(self._rotation)
        ids_BS, labels_BS = batch["input_ids"].clone(), batch["labels"].clone()
        losses = []
        with context_parallel(
            self._mesh,
            buffers=[ids_BS, labels_BS, self._angles.cos_SK, self._angles.sin_SK],
            buffer_seq_dims=[1, 1, 0, 0],
            no_restore_buffers={ids_BS, labels_BS},
        ):
            rows = zip(ids_BS.chunk(self._microbatches), labels_BS.chunk(self._microbatches), strict=True)
            for number, (tokens_BS, targets_BS) in enumerate(rows, 1):
                self._averaged.require_backward_grad_sync = number == self._microbatches  # as `no_sync` does
                loss = cross_entropy(self._averaged(tokens_BS), targets_BS)
                (loss / self._microbatches).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return mean / self._mesh.size()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._model.parameters()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        """(the parameter's name, its gradient, equal on all ranks)."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad


class _Angles:
    """The tables of a rotary embedding; while `context_parallel` cuts them, at the positions of this rank."""

    def __init__(self, model: GPT) -> None:
        size = model.config.hidden // model.config.heads
        exponent = torch.arange(0, size, 2) / size
        angle_SK = torch.outer(torch.arange(model.config.context).float(), ROTARY_BASE**-exponent)
        self.cos_SK, self.sin_SK = angle_SK.cos(), angle_SK.sin()

    def rotated(self, x_BHSK: Tensor) -> Tensor:
        """As `models.gpt.rotate`."""
        first, second = x_BHSK.chunk(2, dim=-1)
        cos, sin = self.cos_SK, self.sin_SK
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class _RingAttention(nn.Module):
    """`models.gpt.Attention` of a rank's own queries, with its parameters."""

    def __init__(self, attention: Attention, angles: _Angles, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.qkv, self.out, self.head_dim = attention.qkv, attention.out, attention.head_dim
        self._angles, self._group = angles, group

    def forward(self, x_BSD: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        qkv_BSHK = self.qkv(x_BSD).view(B, S, -1, 3 * self.head_dim)
        q, k, v = (part.transpose(1, 2) for part in qkv_BSHK.split(self.head_dim, dim=-1))
        q, k = self._angles.rotated(q), self._angles.rotated(k)
        y_BHSK = _Ring.apply(self._group, q, k, v)  # type: ignore[no-untyped-call]
        y_BSD: Tensor = self.out(y_BHSK.transpose(1, 2).reshape(B, S, -1))
        return y_BSD


class _Ring(torch.autograd.Function):
    """PyTorch's ring, causal, around the kernel of processors."""

    @staticmethod
    def forward(context: Any, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made, lse = _templated_ring_attention(group, ROWS, KERNEL, q, k, v, is_causal=True)
        context.save_for_backward(q, k, v, made, lse)
        context.group = group
        return made

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, made, lse = context.saved_tensors
        grads = _templated_ring_attention_backward(
            context.group,
            ROWS,
            KERNEL_BACKWARD,
            grad,
            "grad_out",
            q,
            k,
            v,
            made,
            lse,
            is_causal=True,
            dropout_p=0.0,
        )
        return None, *grads
