"""Work that each rank does by itself and all answer for: one rank's failure is every rank's.

Used outside steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
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
    built = together(ranks, work if ranks.rank == 0 else lambda: None)
    result: T = ranks.all_gather(built)[0]
    return result


def on_first_slowly(ranks: Ranks, work: Callable[[], T], what: str) -> T | None:
    """Do it on rank 0 alone, while the others wait for however long it takes; every rank must call it.
    Returns on rank 0 what it gave, None elsewhere.

    The work is done by the thread that calls, so that signals reach it; another one signals the ranks that
    wait. It must not communicate. Its StrettoError is raised on all ranks. What else ends it (an interrupt, a
    defect) is LostRankError on the others; what: what rank 0 does, for that message.
    """
    if ranks.size == 1:
        return work()
    if ranks.rank != 0:
        gathered: Exception | bool = False
        while gathered is False:
            gathered = ranks.all_gather(None)[0]
        if isinstance(gathered, Exception):
            raise gathered
        return None
    with _Beating(ranks) as beating:
        try:
            built = work()
        except StrettoError as error:
            beating.end(error)
            raise
        except BaseException as error:
            name = type(error).__name__
            beating.end(LostRankError(f"rank 0, which {what}, was ended by {name}", 0))
            raise
        beating.end(True)
        return built


class _Beating:
    """While it is entered, a thread of rank 0 signals those that wait."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._done = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._beat, name="rank 0 works", daemon=True)

    def __enter__(self) -> _Beating:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _beat(self) -> None:
        try:
            while not self._done.wait(BEAT_S):
                self._ranks.all_gather(False)
        except BaseException as error:
            self._failed.append(error)

    def end(self, gathered: Exception | bool) -> None:
        """Tell the others how it ended. Raises what kept the thread from telling them anything, unless the
        work itself has failed, which explains more."""
        self._done.set()
        self._thread.join()
        if gathered is not True:
            with suppress(Exception):
                if not self._failed:
                    self._ranks.all_gather(gathered)
            return
        if self._failed:
            raise self._failed[0]
        self._ranks.all_gather(gathered)
