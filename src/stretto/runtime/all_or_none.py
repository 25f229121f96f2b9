"""Work that each rank does by itself and all answer for: one rank's failure is every rank's.

May touch the ranks' `all_gather`, and a thread for the work. Used outside steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from stretto.errors import LostRankError, StrettoError, UsageError

T = TypeVar("T")

BEAT_S = 20.0
"""How often a rank that works tells the others so; far below the time that they wait for a message."""


class Ranks(Protocol):
    """A rank among others: a transport, or the trainer's world before there is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, item: Any) -> list[Any]: ...


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do the work, and return what it gives here once all ranks have done theirs; every rank must call it.

    Raises the first rank's StrettoError on all ranks; a LostRankError at once.
    """
    made: list[T] = []
    failed: tuple[int, str] | None = None
    try:
        made.append(work())
    except LostRankError:
        raise
    except StrettoError as error:
        failed = (error.exit_status, str(error))
    for one in ranks.all_gather(failed):
        if one is not None:
            status, message = one
            raise (UsageError if status == UsageError.exit_status else StrettoError)(message)
    return made[0]


def together_slowly(ranks: Ranks, work: Callable[[], T]) -> T:
    """The same for work that may take longer than ranks wait for a message, such as writing to a disk."""
    if ranks.size == 1:
        return together(ranks, work)
    done: Future[T] = Future()

    def body() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=body, name="slow work", daemon=True).start()
    while True:
        wait([done], BEAT_S)
        if done.done() and not isinstance(done.exception(), StrettoError | None):
            return done.result()  # raises what nobody foresaw, at once
        if all(ranks.all_gather(done.done())):
            return together(ranks, done.result)


def on_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do it on rank 0 alone, and return on every rank what it gave; every rank must call it. Its StrettoError
    is raised on all."""
    made = together(ranks, work if ranks.rank == 0 else lambda: None)
    found: T = ranks.all_gather(made)[0]
    return found
