"""One rank of a world, alone: a fake process group, whose collectives do nothing.

What a rank sees of tensors does not depend on values, so each rank of a world can be looked at by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def single_rank(rank: int, ranks: int) -> Iterator[None]:
    """This process is one rank of so many."""
    # What ops give is remembered with their mesh, which knows where its process is on it.
    _clear_fast_path_sharding_prop_cache()
    _clear_python_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Kernels(TorchDispatchMode):
    """Counts what runs on tensors with values: not the ops on distributed tensors, which this rank may skip,
    nor those that only find out shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.seen += 1
            return NotImplemented  # go on to the tensor; what it runs comes here again
        result = op(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        if any(not isinstance(x, FakeTensor) and x.device.type != "meta" for x in tensors):
            self.ran.append(str(op))
        return result
