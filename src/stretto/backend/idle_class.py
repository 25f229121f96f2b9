"""The thread that computes gives way to those that move its lanes, on Linux; elsewhere nothing is done.

On an accelerator a lane is a stream of high priority. On a processor it is a few threads, which sleep until
data comes and then need a core that computes. A scheduler that shares fairly lets them wait for its next tick
(4 ms) now and then, and so a collective takes longer under compute than alone. During a step the computing
thread is therefore of the idle class: whatever else of the process has something to do takes its core at
once. Between two hosts of one core at 200 Mbit/s, both computing (PyTorch 2.13, Linux 6.18): an all-reduce of
128 KiB takes 4.7 ms as it does alone (8.5 without this), one of 512 KiB 20.9 (27.1).

It is done only where

1. the process is alone in its control group, so that its threads are weighed against each other only. Who
   starts it sets `ALONE`: `stretto.lab` does for hosts of one rank. Elsewhere a thread of the idle class
   would wait for every process of the machine;
2. the thread can go back (CAP_SYS_NICE, or a limit RLIMIT_NICE of 20): what is idle here computes elsewhere;
3. PyTorch computes on one thread: others would be of the ordinary class, and the one for which they all wait
   must not wait for them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stretto.backend import gloo_adapter

ALONE = "STRETTO_ALONE"
"""The variable of the environment."""


@contextmanager
def lanes_first() -> Iterator[None]:
    """This thread gives way meanwhile. Threads that it makes meanwhile do so for ever."""
    idle = (
        torch.get_num_threads() == 1
        and ALONE in os.environ
        and _can_return()
        and gloo_adapter.move(0, os.SCHED_OTHER, os.SCHED_IDLE)
    )
    try:
        yield
    finally:
        if idle:
            gloo_adapter.move(0, os.SCHED_IDLE, os.SCHED_OTHER)


@contextmanager
def keeping_core() -> Iterator[None]:
    """This thread does not give way meanwhile, if it does at all: while it posts messages itself.

    It then owns locks for which Gloo's loop spins (`stretto.backend.gloo_adapter`), and a thread that had
    given way to that loop would hardly get the core back.
    """
    idle = gloo_adapter.move(0, os.SCHED_IDLE, os.SCHED_OTHER) if hasattr(os, "SCHED_IDLE") else False
    try:
        yield
    finally:
        if idle:
            gloo_adapter.move(0, os.SCHED_OTHER, os.SCHED_IDLE)


@functools.cache
def _can_return() -> bool:
    """Whether a thread may leave the idle class again, tried by one that has nothing else to do."""
    if not hasattr(os, "SCHED_IDLE"):
        return False
    tried: list[bool] = []

    def there_and_back() -> None:
        there = gloo_adapter.move(0, os.SCHED_OTHER, os.SCHED_IDLE)
        tried.append(there and gloo_adapter.move(0, os.SCHED_IDLE, os.SCHED_OTHER))

    thread = threading.Thread(target=there_and_back, name="stretto idle class")
    thread.start()
    thread.join()
    return tried == [True]
