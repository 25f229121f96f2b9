"""The memory of a process that computes or plans: what malloc keeps, and when Python collects garbage.

**Freed memory stays with the process**, on glibc, so that the next step does not ask the kernel for it again.
What it costs and gains is in docs/run.md. The process keeps the most memory that it had until it ends; blocks
above `LARGEST` are still given back. Where the user has set how malloc works (`MALLOC_..._`,
`GLIBC_TUNABLES`) nothing is changed; other C libraries have their own settings.

**Garbage is collected rarely** while capture or planning goes on. The collector looks at everything that
lives whenever that has grown by a quarter, and what these make (graphs, windows, spans) lives for long and is
no garbage: of planning for 1,024 devices it took a quarter of the time, of capturing 48 layers a sixth.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

LARGEST = 1 << 30
"""Blocks up to so many bytes are kept: a matrix of a layer is, a table of embeddings need not be. Assumed."""

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h."""

_NEVER = -1
"""As a trim threshold: the end of the heap is not given back (mallopt(3))."""

_USERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """From now on, in this process. Returns whether the C library does so."""
    if any(name in os.environ for name in _USERS):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if set_option is None:
        return False
    return bool(set_option(_MMAP_THRESHOLD, LARGEST)) and bool(set_option(_TRIM_THRESHOLD, _NEVER))


RARELY = (100_000, 50, 1_000)
"""Objects made before the young are looked at; how often these are before the older ones are, and these
before all are. Measured: planning a step of 96 layers takes 0.8 GB, with no collection at all as well."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """While the context lasts, garbage is collected as rarely as `RARELY`, or as before where that is less
    often."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(*map(max, before, RARELY))
    try:
        yield
    finally:
        gc.set_threshold(*before)
