"""Work that each rank does by itself and all answer for: one rank's failure is every rank's.

May touch a transport's `all_gather`, and a thread for the work. Used outside steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from stretto.errors import LostRankError, StrettoError, UsageError
from stretto.runtime.transport import Transport

T = TypeVar("T")

BEAT_S = 20.0
"""How often a rank that works tells the others so; far below the time that they wait for a message."""


def together(transport: Transport, work: Callable[[], T]) -> T:
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
    _raise_first(transport.all_gather(failed))
    return made[0]


def together_slowly(transport: Transport, work: Callable[[], T]) -> T:
    """The same for work that may take longer than ranks wait for a message, such as writing to a disk."""
    if transport.size == 1:
        return together(transport, work)
    made: list[T] = []
    broke: list[BaseException] = []

    def body() -> None:
        try:
            made.append(work())
        except BaseException as error:
            broke.append(error)

    thread = threading.Thread(target=body, name="slow work", daemon=True)
    thread.start()
    while True:
        thread.join(BEAT_S)
        failed: tuple[int, str] | None = None
        working = thread.is_alive()
        if not working and broke:
            if not isinstance(broke[0], StrettoError):
                raise broke[0]
            failed = (broke[0].exit_status, str(broke[0]))
        told = transport.all_gather((working, failed))
        if not any(still for still, _ in told):
            break
    _raise_first([one for _, one in told])
    return made[0]


def on_first(transport: Transport, work: Callable[[], T]) -> None:
    """Do it on rank 0 alone; its StrettoError is raised on every rank, and every rank must call it."""
    together(transport, work if transport.rank == 0 else lambda: None)


def _raise_first(told: list[tuple[int, str] | None]) -> None:
    for one in told:
        if one is not None:
            status, message = one
            raise (UsageError if status == UsageError.exit_status else StrettoError)(message)
