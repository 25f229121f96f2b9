"""Work that each rank does by itself and all answer for: one rank's failure is every rank's.

Used outside steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from stretto.errors import LostRankError, StrettoError

T = TypeVar("T")

BEAT_S = 5.0
"""How often a rank that works signals the others; far below the time that they wait for a message. In
between they are inside a library, and act on no signal."""


class Ranks(Protocol):
    """A rank among others: a transport, or the trainer's world before there is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, item: Any) -> list[Any]: ...


def together(ranks: Ranks, work: Callable[[], T], what: str = "works for all ranks") -> T:
    """Do the work, and return what it gives here once all ranks have done theirs; every rank must call it.

    The work may take longer than ranks wait for a message, such as writing to a disk. It is done by the
    thread that calls, so that signals reach it, and must not communicate: another thread gathers how far the
    ranks are. The first rank's StrettoError is raised on all. What else ends it (an interrupt, a defect) is a
    LostRankError on the other ranks; what: what the rank does, for that message.
    """
    if ranks.size == 1:
        return work()
    mine: Future[T] = Future()
    all_of_them: Future[list[Exception | bool]] = Future()

    def gather() -> None:
        states: list[Exception | bool] = [False]
        try:
            while not all(states) and not any(isinstance(state, LostRankError) for state in states):
                wait([mine], BEAT_S)
                states = ranks.all_gather(_state(mine, ranks.rank, what))
            all_of_them.set_result(states)
        except BaseException as error:
            all_of_them.set_exception(error)

    threading.Thread(target=gather, name="slow work", daemon=True).start()
    try:
        mine.set_result(work())
    except BaseException as error:
        mine.set_exception(error)
    if all_of_them.exception() is not None or not isinstance(mine.exception(), StrettoError | None):
        mine.result()  # this rank's own error explains more
    for state in all_of_them.result():
        if isinstance(state, Exception):
            raise state
    return mine.result()


def _state(work: Future[Any], rank: int, what: str) -> Exception | bool:
    """False while the work goes on, then True, or its error."""
    if not work.done():
        return False
    error = work.exception()
    if error is None or isinstance(error, StrettoError):
        return error or True
    return LostRankError(f"rank {rank}, which {what}, was ended by {type(error).__name__}", rank)


def on_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do it on rank 0 alone, and return on every rank what it gave; every rank must call it. Its StrettoError
    is raised on all."""
    built = together(ranks, work if ranks.rank == 0 else lambda: None)
    result: T = ranks.all_gather(built)[0]
    return result
