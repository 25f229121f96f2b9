"""What a rank does when its program ends: it leaves, drains its lines, and takes a last look, in this order.

It leaves first, for who waits for a later reshard of this rank need not wait until the lines are drained.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize

LEAVE, DRAIN, LAST_LOOK = 2, 1, 0
"""Priorities: the highest first."""

_asked: dict[str, int] = {}
"""Names of functions, and the process that has asked for each."""


def at_end(function: Callable[[], None], priority: int) -> None:
    """Call a function when this process ends, once. priority: of those above.

    Also where a process is a child of `multiprocessing`, which does not run `atexit`, and forgets what its
    parent has asked for.
    """
    if _asked.get(function.__qualname__) != os.getpid():
        _asked[function.__qualname__] = os.getpid()
        Finalize(None, function, exitpriority=priority)


def fails_already() -> bool:
    """Whether this program ends with an error of its own, which must not be covered by another."""
    return sys.exc_info()[0] is not None or getattr(sys, "last_type", None) is not None
