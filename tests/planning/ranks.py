"""Ranks that are threads, for what ranks say to each other outside steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stretto.measure.running import Running


class Threads(Running):
    """One of `size` ranks of a process."""

    def __init__(self, rank: int, size: int, items: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        object.__setattr__(self, "items", items)
        object.__setattr__(self, "barrier", barrier)

    def all_gather(self, item: Any) -> list[Any]:
        self.items[self.rank] = item
        self.barrier.wait(240)
        told = [*self.items]
        self.barrier.wait(240)
        return told

    def broadcast(self, item: Any) -> Any:
        return self.all_gather(item)[0]


def on_threads(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """What `work` gives on each rank, or what it raises."""
    items: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    found: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            found[rank] = work(Threads(rank, size, items, barrier))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank waits forever"
    return found
