"""Gloo as lanes need it: one collective after the other, and no thread that spins against compute.

**Order.** A process group of Gloo has two worker threads, so that two collectives under way on one group
share the wire, and the first, which is needed first, ends late: two all-reduces of 99 ms each took 152 ms
each. A lane carries one collective at a time, so its groups have one worker (`lane_backend`).

**Loops**, on Linux only; elsewhere nothing is done.

Every Gloo process group has a loop thread that moves the bytes of its connections. A loop that finds a
connection locked goes back to the kernel, which reports the same event again at once: it spins until the
owner lets go (gloo/transport/tcp/pair.cc, `handleEvents`). Where computing threads fill all cores, the loop
is woken by what the owner itself just sent, takes the owner's core, and spins there until the scheduler's
next tick. A thread of Linux' batch class does not take the core when it wakes up; it gets it when the owner
stands or the tick comes, and data moves on in the kernel's buffers meanwhile.

**The computing thread** would then hold data up until it stands. So that lanes come first, like a stream of
high priority does on an accelerator, it is of the idle class for as long as a step lasts (`lanes_first`):
every other thread, a calm loop too, takes its core at once. Between two hosts of one core at 200 Mbit/s,
both computing meanwhile, an all-reduce of 128 KiB takes 4.7 ms as it does alone (8.5 with calm loops only),
one of 512 KiB 20.9 (27.1). Nothing is done where the thread could not go back to its own class (that takes
a limit of nice values, RLIMIT_NICE, or CAP_SYS_NICE), nor where PyTorch computes on several threads: the
others are of the ordinary class, and the one that all wait for must not stand behind them.

Measured between two hosts of one core, PyTorch 2.13, Linux 6.18, each collective after some compute: an
all-reduce of 4 KiB after 4 ms of compute takes 0.2 ms instead of 1.5; the loop's processor time falls to a
fifth; compute beside an all-reduce of 2 MiB at 300 Mbit/s loses 5 ms instead of 10.

The threads' name is Gloo's own matter (2.11 gives them none); a test says when it changes, and without it
nothing is done.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LANE_BACKEND = "stretto_gloo"
"""The name under which `torch.distributed` knows Gloo with one worker."""

LOOP_NAME = "gloo_tcp_loop"
"""What Gloo calls its loop threads."""

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
    found: set[int] = set()
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:
        return frozenset()
    for task in tasks:
        try:
            if (task / "comm").read_text().strip() == LOOP_NAME:
                found.add(int(task.name))
        except OSError:
            continue  # it ended meanwhile
    return frozenset(found)


def calm(threads: Iterable[int]) -> tuple[int, ...]:
    """Put threads into the batch class. Returns those that were in the ordinary one; the user's own choice
    of another class stays."""
    changed: list[int] = []
    for thread in threads:
        if _move(thread, os.SCHED_OTHER, os.SCHED_BATCH):
            changed.append(thread)
    return tuple(changed)


@contextmanager
def lanes_first() -> Iterator[None]:
    """Other threads take this thread's core whenever they have something to do: a step's compute lane.

    Threads that are made meanwhile are of the idle class too, and stay so.
    """
    idle = torch.get_num_threads() == 1 and _can_return() and _move(0, os.SCHED_OTHER, os.SCHED_IDLE)
    try:
        yield
    finally:
        if idle:
            _move(0, os.SCHED_IDLE, os.SCHED_OTHER)


@contextmanager
def as_in_a_step() -> Iterator[None]:
    """All loops of this process are calm meanwhile, and lanes come first: for measuring on groups of the
    user's own what a transport's groups will do."""
    changed = calm(loop_threads())
    try:
        with lanes_first():
            yield
    finally:
        for thread in changed:
            _move(thread, os.SCHED_BATCH, os.SCHED_OTHER)


@functools.cache
def _can_return() -> bool:
    """Whether a thread may leave the idle class again, tried by one that has nothing else to do."""
    if not hasattr(os, "SCHED_IDLE"):
        return False
    tried: list[bool] = []

    def there_and_back() -> None:
        tried.append(_move(0, os.SCHED_OTHER, os.SCHED_IDLE) and _move(0, os.SCHED_IDLE, os.SCHED_OTHER))

    thread = threading.Thread(target=there_and_back, name="stretto idle class")
    thread.start()
    thread.join()
    return tried == [True]


def _move(thread: int, old: int, new: int) -> bool:
    try:
        if os.sched_getscheduler(thread) != old:
            return False
        os.sched_setscheduler(thread, new, os.sched_param(0))
    except OSError:
        return False  # the thread has ended, or the system forbids it: it works as it did
    return True
