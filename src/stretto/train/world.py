"""This process's place among the ranks, as `torchrun` tells it by environment variables.

May touch `torch.distributed`'s process group and the number of threads. It decides nothing about training.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from stretto.config import ParallelSettings
from stretto.errors import StrettoError, UsageError

Said = TypeVar("Said")

LAUNCHER_PID = "STRETTO_LAUNCHER_PID"
"""Environment variable: our own launcher's process, for the ranks that it started."""
JOIN_TIMEOUT_S = 300.0
"""How long ranks wait for each other at the start. Assumed: machines of one job start within minutes."""


def is_worker() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """Whether that launcher was our own (`stretto.train.launch`)."""
    return is_worker() and LAUNCHER_PID in os.environ


@dataclass(frozen=True, slots=True)
class World:
    """rank of size ranks, of which local_size are on this machine. store: None for a single rank."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    store: Store | None = None

    def all_gather(self, item: Said) -> list[Said]:
        """Every rank's item, by rank; all must call it."""
        told = [item] * self.size
        if self.size > 1:
            dist.all_gather_object(told, item)
        return told


def environment() -> World:
    """The place that the environment names, before anything is joined; a single rank without one.

    Raises UsageError for variables that are no numbers.
    """
    if not is_worker():
        return World()
    found: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        text = os.environ.get(name, os.environ["WORLD_SIZE"])
        if not text.isdigit():
            raise UsageError(f"{name} = {text!r} in the environment is no number; start ranks with torchrun")
        found[name] = int(text)
    return World(found["RANK"], found["WORLD_SIZE"], max(1, found["LOCAL_WORLD_SIZE"]))


def check_size(world: World, parallel: ParallelSettings) -> None:
    """Raise UsageError unless there are as many ranks as the layout needs."""
    needed = parallel.world
    if world.size != needed:
        used = [(axis, size) for axis, size in (("pp", parallel.pp), *parallel.axes) if size > 1]
        layout = " times ".join(f"parallel.{axis} = {size}" for axis, size in used or [("pp", 1)])
        raise UsageError(
            f"{layout} needs {needed} rank{'s' if needed > 1 else ''}, but WORLD_SIZE is {world.size}: start "
            f"{needed} (torchrun --nproc-per-node {needed}), choose a layout of {world.size}, or leave "
            "starting them to `stretto train`"
        )


def crowding(ranks: int, threads_per_rank: int) -> str | None:
    """What to tell of ranks on this machine that want more cores than it has; None when they fit."""
    cores = available_cores()
    if ranks * threads_per_rank <= cores:
        return None
    each = f" of {threads_per_rank} threads" if threads_per_rank > 1 else ""
    return (
        f"{ranks} ranks{each} share {cores} core{'s' if cores > 1 else ''} of this machine and take turns: a "
        "step is no faster than on fewer ranks"
    )


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def join(place: World) -> World:
    """Meet the other ranks and make the process group (Gloo). Raises StrettoError when they do not come."""
    if place.size == 1:
        return place
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise StrettoError(
            f"rank {place.rank} could not meet the others at {where}: {str(error).splitlines()[0]}; check "
            f"that all {place.size} ranks were started with the same MASTER_ADDR and MASTER_PORT"
        ) from None
    return World(rank, size, place.local_size, store)


def leave(world: World) -> None:
    """Take the process group down once all ranks have come to this point."""
    if world.size > 1 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def threads(wanted: int | None, local_size: int) -> int:
    """Threads for each rank: `training.threads_per_rank`, else OMP_NUM_THREADS, else cores over ranks."""
    if wanted is not None:
        return wanted
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    return max(1, available_cores() // local_size)


def use_threads(count: int) -> None:
    """Compute with `count` threads from now on."""
    torch.set_num_threads(count)
