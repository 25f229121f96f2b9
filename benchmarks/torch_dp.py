"""PyTorch's own data parallelism: the other side of the race. `fully_shard` (FSDP2) and DDP, eager.

What makes `fully_shard` as fast as it can be here:

    1. Embedding, every block, and the norm with the head are gathered each by itself, as torchtitan does.
    2. Prefetch is set as PyTorch's tutorial of `fully_shard` advises: two modules ahead, in the forward and
       in the backward, and the first gather starts before the forward.
    3. On processors there are no streams, and `fully_shard` waits for each collective at once. So its gathers
       are asynchronous (`_set_unshard_async_op`), and a scatter is given that starts and is waited for at the
       end of the step. No other file names what is private to it.
    4. With several microbatches gradients are scattered once a step, after the last; parameters that are kept
       after the forward are kept until then.

Gloo has no mean, so losses are divided by the number of ranks, and gradients are summed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.racing import Batch
from stretto.models.gpt import GPT, next_token_loss

_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""As PyTorch calls it from 2.13 on."""

AHEAD = 2
"""Modules whose parameters are gathered before they are needed, as in PyTorch's tutorial."""


class TorchShards:
    """A GPT whose parameters PyTorch's ranks share; the world is one axis.

    model: copied, and left alone. reshard: whether gathered parameters are freed after the forward, and
    gathered again for the backward.
    """

    def __init__(self, model: GPT, microbatches: int, reshard: bool) -> None:
        self._microbatches, self._reshard = microbatches, reshard
        self._model = copy.deepcopy(model)
        self._works: list[dist.Work] = []
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
        parts: list[Any] = [self._model.embedding, *self._model.blocks]
        for part in parts:
            fully_shard(part, **how)
        # Needed at once by the backward: never freed between, as torchtitan has it.
        fully_shard([self._model.norm, self._model.head], mesh=mesh, reshard_after_forward=False)
        self._root: Any = fully_shard(self._model, **how)
        self._first = parts[0]
        # The group of norm and head is prefetched by the norm, which runs first.
        order = [*parts, self._model.norm]
        for at, part in enumerate(order):
            part.set_modules_to_forward_prefetch(order[at + 1 : at + 1 + AHEAD])
            part.set_modules_to_backward_prefetch(order[max(at - AHEAD, 0) : at][::-1])
        self._root._set_unshard_async_op(True)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
                module.set_custom_reduce_scatter(_Started(self._works))

    def step(self, batch: Batch) -> Tensor:
        """Forward and backward of the full batch; gradients are in `.grad`. Returns the mean loss."""

        def prepare(last: bool) -> None:
            self._root.set_requires_gradient_sync(last)
            self._root.set_is_last_backward(last)
            if not self._reshard:
                self._root.set_reshard_after_backward(last)
            self._first.unshard(async_op=True)

        loss = _step(self._model, batch, self._microbatches, prepare)
        for work in self._works:
            work.wait()
        self._works.clear()
        return loss

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._model.parameters()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        """(the parameter's name, its full gradient). All ranks call it."""
        for name, parameter in self._model.named_parameters():
            if isinstance(parameter.grad, DTensor):
                yield name, parameter.grad.full_tensor()


class TorchCopies:
    """A GPT of which every rank has a copy, by `DistributedDataParallel`. model: copied, and left alone."""

    def __init__(self, model: GPT, microbatches: int) -> None:
        self._microbatches = microbatches
        self._model = copy.deepcopy(model)
        self._averaged = DistributedDataParallel(self._model, gradient_as_bucket_view=True)

    def step(self, batch: Batch) -> Tensor:
        """As `TorchShards.step`."""

        def prepare(last: bool) -> None:
            self._averaged.require_backward_grad_sync = last  # as `no_sync` does

        # It divides by the number of ranks itself.
        return _step(self._averaged, batch, self._microbatches, prepare, dist.get_world_size())

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._model.parameters()

    def grads(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad


TORCH: Mapping[str, Callable[[GPT, int], TorchShards | TorchCopies]] = {
    "fsdp2": lambda model, microbatches: TorchShards(model, microbatches, reshard=True),
    "fsdp2 kept": lambda model, microbatches: TorchShards(model, microbatches, reshard=False),
    "ddp": TorchCopies,
}
"""All systems of PyTorch."""


def _step(
    model: nn.Module, batch: Batch, microbatches: int, prepare: Callable[[bool], None], times: int = 1
) -> Tensor:
    """Losses and gradients of this rank's rows. prepare: called before each microbatch with whether it is the
    last; times: by how much gradients are divided afterwards."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = {name: leaf.chunk(ranks)[rank].chunk(microbatches) for name, leaf in batch.items()}
    total = torch.zeros(())
    for number in range(microbatches):
        prepare(number == microbatches - 1)
        loss = next_token_loss(model, {name: leaf[number] for name, leaf in own.items()})
        part = loss / (microbatches * ranks)
        (part * times).backward()  # type: ignore[no-untyped-call]
        total += part.detach()
    dist.all_reduce(total)
    return total


class _Started:
    """A scatter that is started, in the place of `fully_shard`'s own; who reads its result waits for it."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._works.append(_scatter(output_tensor, input_tensor, op=op, group=group, async_op=True))
