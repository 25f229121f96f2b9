"""Ranks that are threads, over the narrowest channels that a plan may meet: messages of a pair of ranks go in
one order on one communicator, and a send ends only when its receive is posted (rendezvous)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from stretto.ir.plan import Plan
from stretto.runtime.transport import Handle, ThreadTransport, _Board
from tests.runtime.equality import Result, run

TIMEOUT_S = 20.0
"""A plan of a test takes far less; a rank that waits for longer waits forever."""


class _Sent:
    """The n-th message of a lane has left when the n-th receive is posted."""

    def __init__(self, end: Strict, lane: str, number: int) -> None:
        self._end, self._lane, self._number = end, lane, number

    def wait(self) -> None:
        end, lane = self._end, self._lane
        end.wait_for(lambda: end.posts[lane] > self._number, f"the receive of a message on lane {lane!r}")


class Strict(ThreadTransport):
    def __init__(self, board: _Board, rank: int, posts: Counter[str]) -> None:
        super().__init__(board, rank, TIMEOUT_S)
        self.posts = posts
        self._sends: Counter[str] = Counter()

    @staticmethod
    def group(size: int, timeout_s: float = TIMEOUT_S) -> list[ThreadTransport]:
        board, posts = _Board(size), Counter[str]()
        return [Strict(board, rank, posts) for rank in range(size)]

    def send(self, lane: str, value: torch.Tensor, to: int) -> Handle:
        super().send(lane, value, to)
        self._sends[lane] += 1
        return _Sent(self, lane, self._sends[lane] - 1)

    def recv(self, lane: str, buffer: torch.Tensor, source: int) -> Handle:
        with self._board.changed:
            self.posts[lane] += 1
            self._board.changed.notify_all()
        return super().recv(lane, buffer, source)


def run_strictly(plan: Plan, model: torch.nn.Module, batch: object) -> Result:
    """As `run`, over such channels. A plan of one copy only: lanes are those of the full run."""
    assert plan.world == plan.ranks
    pairs = [found.ranks for found in plan.communicators if found.name.startswith("pp ")]
    assert len(set(pairs)) == len(pairs), "one communicator for a pair and a direction"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.runtime.local.ThreadTransport", Strict)
        return run(plan, model, batch)
