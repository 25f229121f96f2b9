"""Gloo as lanes need it: one collective after the other, and no thread that spins against compute.

**Order.** A process group of Gloo has two worker threads, so that two collectives under way on one group
share the wire, and the first, which is needed first, ends late: two all-reduces of 99 ms each took 152 ms
each. A lane carries one collective at a time, so its groups have one worker (`lane_backend`).

**Loops**, on Linux only. Every Gloo process group has a loop thread that moves the bytes of its connections.
A loop that finds a connection locked spins until the owner lets go (gloo/transport/tcp/pair.cc,
`handleEvents`): where computing threads fill all cores, it takes the owner's core until the scheduler's next
tick. A thread of Linux' batch class does not take the core when it wakes up. Measured between two hosts of
one core, PyTorch 2.13, Linux 6.18: an all-reduce of 4 KiB after 4 ms of compute takes 0.2 ms instead of 1.5;
compute beside an all-reduce of 2 MiB at 300 Mbit/s loses 5 ms instead of 10. The threads' name is Gloo's own
matter (2.11 gives them none); a test fails when it changes, and without it nothing is done.

**The computing thread** is of the idle class during a step: what moves the bytes of a lane takes its core at
once, and not at the scheduler's next tick (4 ms). Between two hosts of one core at 200 Mbit/s, both
computing: an all-reduce of 128 KiB takes 4.7 ms as it does alone (8.5 without this), one of 512 KiB 20.9
(27.1). Only under the three conditions of docs/run.md: a thread of the idle class would else wait for other
processes (`ALONE` says that there are none), never come back, or for threads of the ordinary class.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LANE_BACKEND = "stretto_gloo"
"""The name under which `torch.distributed` knows Gloo with one worker."""

LOOP_NAME = "gloo_tcp_loop"
"""What Gloo calls its loop threads."""

NAMING_S = 0.1
"""How long a new thread may take to name itself. Assumed. Where threads stay without names (PyTorch 2.11),
every opening waits so long."""

_TASKS = Path("/proc/self/task")


def lane_backend() -> str:
    """The backend of a lane's process groups on processors, for `torch.distributed.new_group`."""
    if not hasattr(dist.Backend, LANE_BACKEND.upper()):
        dist.Backend.register_backend(LANE_BACKEND, _one_worker, devices=["cpu"])
    return LANE_BACKEND


def _one_worker(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._threads = 1
    options._timeout = timeout
    # As Gloo's own groups do: the interfaces that the user names, else the one of the host's name.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    options._devices = devices
    return gloo(store, rank, size, options)


def loop_threads() -> frozenset[int]:
    """The loop threads that this process has now, by the kernel's number."""
    return frozenset(thread for thread in _threads() if _name(thread) == LOOP_NAME)


def _threads() -> frozenset[int]:
    try:
        return frozenset(int(task.name) for task in _TASKS.iterdir())
    except OSError:
        return frozenset()


def _name(thread: int) -> str:
    try:
        return (_TASKS / str(thread) / "comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def calm_new_loops() -> Iterator[None]:
    """Loops that begin meanwhile are calm when it ends. A thread names itself some time after it began: those
    that still bear the name of who made them are waited for, up to `NAMING_S`."""
    before = _threads()
    yield
    mine = _name(threading.get_native_id())
    until = time.monotonic() + NAMING_S
    while time.monotonic() < until and any(_name(thread) == mine for thread in _threads() - before):
        time.sleep(0.001)
    calm(loop_threads() - before)


def calm(threads: Iterable[int]) -> tuple[int, ...]:
    """Put threads into the batch class. Returns those that were in the ordinary one; the user's own choice
    of another class stays."""
    return tuple(thread for thread in threads if move(thread, os.SCHED_OTHER, os.SCHED_BATCH))


@contextmanager
def calm_loops() -> Iterator[None]:
    """All loops of this process are calm meanwhile, and as before afterwards: for measuring on groups of the
    user's own what a transport's groups will do."""
    changed = calm(loop_threads())
    try:
        yield
    finally:
        for thread in changed:
            move(thread, os.SCHED_BATCH, os.SCHED_OTHER)


def move(thread: int, old: int, new: int) -> bool:
    """Put a thread of the class `old` (0: this one) into the class `new`; whether that was done."""
    try:
        if os.sched_getscheduler(thread) != old:
            return False
        os.sched_setscheduler(thread, new, os.sched_param(0))
    except OSError:
        return False  # the thread has ended, or the system forbids it: it works as it did
    return True


ALONE = "STRETTO_ALONE"
"""The variable of the environment."""


@contextmanager
def _moved(old: str, new: str, wanted: bool = True) -> Iterator[None]:
    """This thread, if it is of the class `old`, is of the class `new` meanwhile."""
    classes = [getattr(os, name, -1) for name in (old, new)]
    done = wanted and -1 not in classes and move(0, *classes)
    try:
        yield
    finally:
        if done:
            move(0, *reversed(classes))


def lanes_first() -> AbstractContextManager[None]:
    """This thread gives way meanwhile. Threads that it makes meanwhile do so forever."""
    gives_way = torch.get_num_threads() == 1 and ALONE in os.environ and _can_return()
    return _moved("SCHED_OTHER", "SCHED_IDLE", gives_way)


def keeping_core() -> AbstractContextManager[None]:
    """This thread does not give way meanwhile: while it posts messages it owns locks for which Gloo's loop
    spins, and would hardly get the core back."""
    return _moved("SCHED_IDLE", "SCHED_OTHER")


@functools.cache
def _can_return() -> bool:
    """Whether a thread may leave the idle class again, tried by one that has nothing else to do."""
    if not hasattr(os, "SCHED_IDLE"):
        return False
    tried: list[bool] = []

    def there_and_back() -> None:
        there = move(0, os.SCHED_OTHER, os.SCHED_IDLE)
        tried.append(there and move(0, os.SCHED_IDLE, os.SCHED_OTHER))

    thread = threading.Thread(target=there_and_back, name="stretto idle class")
    thread.start()
    thread.join()
    return tried == [True]
