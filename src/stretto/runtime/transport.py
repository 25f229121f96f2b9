"""What carries messages: the words, and a carrier for ranks that are threads of one process.

Messages on one lane arrive in the order in which they were sent, and are matched with receives in the
order in which those were posted. `stretto.runtime.torch_transport` carries them between processes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from stretto.backend.collectives import arrived, put_together
from stretto.errors import RunError
from stretto.ir.collectives import KINDS
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Communicator
from stretto.tensor.dtensor_adapter import outside_modes as uncounted


@dataclass(frozen=True, slots=True)
class Handle:
    """A communication under way. wait: returns when it is done (received data is there, a sent buffer may be
    reused). Raises RunError."""

    wait: Callable[[], None]


class Transport(ABC):
    """One rank's end of all lanes. Lanes are communicators' names; members: of those that this rank is in."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.members: dict[str, tuple[int, ...]] = {}

    def open(self, communicators: Sequence[Communicator], device: torch.device, mesh: Mesh) -> None:
        """Create all communicators, in this order, on every rank; mesh: who is a member (`Mesh.group`).
        device: where their tensors will be."""
        for communicator in communicators:
            group = mesh.group(self.rank, communicator.axes, communicator.ranks)
            if group is not None:
                self.members[communicator.name] = group

    def close(self) -> None:
        """Give all communicators back; every rank calls it."""
        self.members.clear()

    def members_of(self, lane: str) -> tuple[int, ...]:
        """The ranks of the lane. Raises RunError for a lane that this rank does not have: none can be made
        while others work."""
        if lane not in self.members:
            known = ", ".join(map(repr, self.members)) or "none"
            raise RunError(
                f"rank {self.rank}: lane {lane!r} was not opened on this rank, and none can be made while "
                "others work: a communicator that ranks make in different orders never comes to be. "
                f"Open are {known}"
            )
        return self.members[lane]

    @abstractmethod
    def send(self, lane: str, value: torch.Tensor, to: int) -> Handle: ...

    @abstractmethod
    def recv(self, lane: str, buffer: torch.Tensor, source: int) -> Handle: ...

    @abstractmethod
    def broadcast(self, lane: str, value: torch.Tensor, source: int) -> Handle: ...

    @abstractmethod
    def collective(
        self, lane: str, kind: str, result: torch.Tensor, value: torch.Tensor, how: str = ""
    ) -> Handle:
        """One of a kind of `stretto.ir.collectives`: `value` is given, `result` written (one that works in
        place is given its result)."""

    @abstractmethod
    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's item, by rank, on all ranks. For small data outside the step."""

    def beside(self) -> Transport:
        """An end of the same ranks whose gathers another thread may wait for while this one's go on; every
        rank calls it, at the same place. Raises RunError where there is none."""
        raise RunError(f"{type(self).__name__} has no end for a second thread")

    def clock_offset_us(self) -> float:
        """Rank 0's clock minus this rank's, in microseconds."""
        return 0.0

    def during_step(self) -> AbstractContextManager[None]:
        """Around the walk of a step by the thread that computes: what lets lanes go on beside it."""
        return nullcontext()


@dataclass
class _Board:
    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    mail: dict[str, dict[int, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    """Messages of a lane, by number, that no one has taken yet."""
    rounds: dict[str, dict[int, dict[int, Any]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    failed: str | None = None
    beside: list[_Board] = field(default_factory=list)


class ThreadTransport(Transport):
    """Ranks as threads: for tests, notebooks and a first look at a plan without processes."""

    def __init__(self, board: _Board, rank: int, timeout_s: float = 60.0) -> None:
        super().__init__(rank, board.size)
        self._board = board
        self._timeout_s = timeout_s
        self._counts: Counter[tuple[str, str]] = Counter()
        """Lane, and what of it -> how many this rank has sent, posted and joined."""

    @staticmethod
    def group(size: int, timeout_s: float = 60.0) -> list[ThreadTransport]:
        """Connected ends for `size` ranks."""
        board = _Board(size)
        return [ThreadTransport(board, rank, timeout_s) for rank in range(size)]

    def _of(self, lane: str) -> str:
        """The board of the lane's group that this rank is in: groups of one lane have boards of their own."""
        return f"{lane} of {self.members_of(lane)}"

    def _number(self, lane: str, what: str) -> int:
        """Of the rank's next message, receive or collective on a lane."""
        self._counts[lane, what] += 1
        return self._counts[lane, what]

    def fail(self, reason: str) -> None:
        """Wake all ranks that wait, with an error."""
        for board in (self._board, *self._board.beside):
            with board.changed:
                board.failed = board.failed or reason
                board.changed.notify_all()

    def beside(self) -> ThreadTransport:
        number, boards = self._number("", "beside"), self._board.beside
        with self._board.changed:
            if len(boards) < number:
                boards.append(_Board(self.size))
        return ThreadTransport(boards[number - 1], self.rank, self._timeout_s)

    def send(self, lane: str, value: torch.Tensor, to: int) -> Handle:
        with self._board.changed, uncounted():
            # A copy, so that a plan that frees or reuses the buffer too early is not excused here.
            self._board.mail[self._of(lane)][self._number(lane, "sent")] = value.clone()
            self._board.changed.notify_all()
        return Handle(lambda: None)

    def recv(self, lane: str, buffer: torch.Tensor, source: int) -> Handle:
        mail, number = self._board.mail[self._of(lane)], self._number(lane, "posted")

        def wait() -> None:
            self.wait_for(lambda: number in mail, f"a message on lane {lane!r}")
            buffer.copy_(mail.pop(number))

        return Handle(wait)

    def broadcast(self, lane: str, value: torch.Tensor, source: int) -> Handle:
        return self._join(lane, value, lambda parts: value.copy_(parts[source]), {source})

    def collective(
        self, lane: str, kind: str, result: torch.Tensor, value: torch.Tensor, how: str = ""
    ) -> Handle:
        members, row = self.members_of(lane), KINDS[kind]

        def finish(parts: dict[int, torch.Tensor]) -> None:
            given = [parts[member] for member in members]
            put_together(row, result, arrived(row, given, members.index(self.rank)), how)

        return self._join(lane, value, finish, set(members))

    def all_gather(self, item: Any) -> list[Any]:
        result: dict[int, Any] = {}
        self._join("", item, result.update, set(range(self.size))).wait()
        return [result[rank] for rank in range(self.size)]

    def _join(self, lane: str, value: Any, finish: Callable[[Any], object], needed: set[int]) -> Handle:
        """Give a value to the next collective on a lane; "" is one of all ranks."""
        number, board = self._number(lane, "joined"), self._board
        place, members = (self._of(lane), len(self.members[lane])) if lane else ("", self.size)
        with board.changed, uncounted():
            parts = board.rounds[place][number]
            parts[self.rank] = value.clone() if isinstance(value, torch.Tensor) else value
            if len(parts) == members:
                # All have given; each keeps its own reference, so the board can forget the round.
                del board.rounds[place][number]
            board.changed.notify_all()

        def wait() -> None:
            self.wait_for(
                lambda: needed <= parts.keys(), f"collective {number} on lane {lane or 'control'!r}"
            )
            with torch.no_grad(), uncounted():
                finish(parts)

        return Handle(wait)

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        board = self._board
        with board.changed:
            board.changed.wait_for(lambda: board.failed is not None or ready(), self._timeout_s)
            if not ready():
                raise RunError(
                    f"rank {self.rank}: {what} did not come within {self._timeout_s:.0f} s"
                    if board.failed is None
                    else f"rank {self.rank}: {what} cannot come: {board.failed}"
                )
