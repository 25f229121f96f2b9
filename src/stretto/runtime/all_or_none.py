"""Work that each rank does by itself and all answer for: one rank's failure is every rank's.

Used outside steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from stretto.errors import LostRankError, StrettoError, UsageError

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


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do the work, and return what it gives here once all ranks have done theirs; every rank must call it.

    Raises the first rank's StrettoError on all ranks; a LostRankError at once.
    """
    built: list[T] = []
    failed: tuple[int, str] | None = None
    try:
        built.append(work())
    except LostRankError:
        raise
    except StrettoError as error:
        failed = (error.exit_status, str(error))
    for one in ranks.all_gather(failed):
        if one is not None:
            status, message = one
            raise (UsageError if status == UsageError.exit_status else StrettoError)(message)
    return built[0]


def together_slowly(ranks: Ranks, work: Callable[[], T], what: str = "works") -> T:
    """The same for work that may take longer than ranks wait for a message, such as writing to a disk. It
    must not communicate: another thread does, until all ranks have ended or one has failed.

    The work is done by the thread that calls, so that signals reach it. The first rank's StrettoError is
    raised on all. What else ends a rank's work (an interrupt, a defect) is LostRankError on the others; what:
    what the rank does, for that message.
    """
    if ranks.size == 1:
        return work()
    beating = _Beating(ranks)
    try:
        result = work()
    except StrettoError as error:
        first = beating.end(error)
        if first is None or str(first) == str(error):
            raise
        raise first from None
    except BaseException as error:
        name = type(error).__name__
        with suppress(Exception):
            beating.end(LostRankError(f"rank {ranks.rank}, which {what}, was ended by {name}", ranks.rank))
        raise
    failed = beating.end(True)
    if failed is not None:
        raise failed
    return result


def on_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do it on rank 0 alone, and return on every rank what it gave; every rank must call it. Its StrettoError
    is raised on all."""
    built = together(ranks, work if ranks.rank == 0 else lambda: None)
    result: T = ranks.all_gather(built)[0]
    return result


def on_first_slowly(ranks: Ranks, work: Callable[[], T], what: str) -> T | None:
    """Do it on rank 0 alone, while the others wait for however long it takes; every rank must call it.
    Returns on rank 0 what it gave, None elsewhere. what, and errors: as for `together_slowly`."""
    return together_slowly(ranks, work if ranks.rank == 0 else lambda: None, what)


class _Beating:
    """A thread that signals the others that this rank works, until all have ended, or one has failed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._mine: Exception | bool = False
        self._done = threading.Event()
        self._all: list[Exception | bool] = [False]
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._beat, name="rank works", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        try:
            while not all(self._all) and self._error() is None:
                self._done.wait(BEAT_S)
                self._all = self._ranks.all_gather(self._mine)
        except BaseException as error:
            self._failed = error

    def _error(self) -> BaseException | None:
        return next((one for one in self._all if isinstance(one, Exception)), None)

    def end(self, mine: Exception | bool) -> BaseException | None:
        """This rank has ended: with an error, or True. Waits for the others, and returns the first rank's
        error, or else what kept this thread from communicating."""
        self._mine = mine
        self._done.set()
        self._thread.join()
        return self._error() or self._failed
