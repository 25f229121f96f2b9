"""What a window's function calls beside ops: messages, collectives, and the state of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from stretto.ir.collectives import How
from stretto.runtime.transport import Handle


class Hooks(Protocol):
    """What a window calls beside ops. Microbatches are numbers, edges indexes of the job's edges."""

    def wait(self, edge: int, microbatch: int) -> torch.Tensor: ...
    def send(self, edge: int, microbatch: int, value: torch.Tensor) -> None: ...
    def add_grad(self, parameter: int, value: torch.Tensor, owned: bool) -> None: ...
    def add_product(self, parameter: int, left: torch.Tensor, right: torch.Tensor) -> None: ...
    def add_loss(self, microbatch: int, value: torch.Tensor) -> None: ...
    def update_buffer(self, buffer: int, value: torch.Tensor) -> None: ...
    def gather_grads(self, groups: Sequence[str], lane: str) -> torch.Tensor: ...
    def set_grads(self, groups: Sequence[str], lane: str, total: torch.Tensor) -> None: ...
    def share_of_loss(self) -> torch.Tensor: ...
    def set_loss(self, total: torch.Tensor) -> None: ...
    def draw(self, microbatch: int, op: int) -> None: ...
    def drawn(self) -> None: ...
    def tick(self, stage: int, op: str) -> None: ...
    def start(
        self,
        name: str,
        kind: str,
        how: How,
        lane: str,
        value: torch.Tensor,
        size: int,
        *,
        owned: bool = False,
    ) -> Started: ...
    def finish(self, started: Started) -> torch.Tensor: ...


@dataclass(slots=True)
class Started:
    """A communication under way. name, lane: for the record; result: complete once `handle` is done; source:
    kept alive until then."""

    name: str
    lane: str
    handle: Handle
    result: torch.Tensor
    source: torch.Tensor
