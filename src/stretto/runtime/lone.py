"""What the ends of a lone rank have in common, whatever makes their transfers take time.

The contract: the k-th start on a lane is the k-th that the plan's order has there; other members of a
collective hold what this rank holds, of which what is summed is taken once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from stretto.backend.collectives import arrived, put_together
from stretto.errors import RunError
from stretto.ir.collectives import KINDS, How
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Communicator, Plan
from stretto.runtime.transport import not_open
from stretto.simulating.live import calls_of, messages_of, ready_windows
from stretto.verifying.trace import EventKind

Under = TypeVar("Under")
"""The handle of a transfer under way."""


class LoneEnd(ABC, Generic[Under]):
    """The transport of rank `rank` of a plan, of which no other runs. `begin` comes before each step.

    Raises PlanError for a plan that cannot be simulated.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.rank = rank
        self.size = plan.world
        self._plan = plan
        self._place = plan.mesh.place(rank)
        self._windows = ready_windows(plan)
        self._works = calls_of(plan, self._place, self._windows)
        self._sends = messages_of(plan, self._place, EventKind.SEND)
        self._posts = messages_of(plan, self._place, EventKind.RECV)
        self._members: dict[str, tuple[int, ...]] = {}

    def open(self, communicators: Sequence[Communicator], device: torch.device, mesh: Mesh) -> None:
        for communicator in communicators:
            group = mesh.group(self.rank, communicator.axes, communicator.ranks)
            if group is not None:
                self._members[communicator.name] = group

    def close(self) -> None:
        self._members.clear()

    def begin(self) -> None:
        """A step begins: nothing that the plan's order has on a lane has started."""
        self._next_send = {lane: deque(messages) for lane, messages in self._sends.items()}
        self._next_post = {lane: deque(messages) for lane, messages in self._posts.items()}
        self._next_work = {lane: deque(works) for lane, works in self._works.items()}

    @abstractmethod
    def _collective(self, lane: str, fill: Callable[[], object] | None = None) -> Under:
        """Start the lane's next collective; `fill` writes what it gives."""

    def broadcast(self, lane: str, value: torch.Tensor, source: int) -> Under:
        return self._collective(lane)

    def all_reduce(self, lane: str, value: torch.Tensor, op: str = "sum") -> Under:
        return self._collective(lane)

    def collective(
        self, lane: str, kind: str, result: torch.Tensor, value: torch.Tensor, how: How = ""
    ) -> Under:
        row, members = KINDS[kind], self._members[lane]
        if row.in_place:
            return self._collective(lane)
        me = members.index(self.rank)
        parts = arrived(row, [value] * len(members), me, how)
        return self._collective(
            lane, lambda: put_together(row, result, parts[me : me + 1] if row.sums else parts, how)
        )

    def all_gather(self, item: Any) -> list[Any]:
        return [item] * self.size

    def clock_offset_us(self) -> float:
        return 0.0

    def during_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _take(self, queues: dict[str, deque[Any]], lane: str) -> Any:
        """What the plan's order starts next on a lane. Raises RunError when that is nothing."""
        if lane not in self._members:
            raise not_open(self.rank, lane, self._members)
        if not queues.get(lane):
            raise RunError(f"rank {self.rank}: the plan's order has nothing more to start on lane {lane!r}")
        return queues[lane].popleft()
