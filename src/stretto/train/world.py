"""This process's rank among the others, as `torchrun` gives it by environment variables.

It decides nothing about training.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from stretto.backend.collectives import Said, gather_all
from stretto.config import ParallelSettings
from stretto.errors import StrettoError, UsageError
from stretto.processor.control_groups import usable_cores
from stretto.train.failure import is_worker
from stretto.train.preload import drivers

JOIN_TIMEOUT_S = 300.0
"""How long ranks wait for each other at the start. Assumed: machines of one job start within minutes."""


@dataclass(frozen=True, slots=True)
class World:
    """rank of size ranks, of which local_size are on this machine, this one the local_rank-th. store: None
    for a single rank. device: what this rank computes on."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    store: Store | None = None
    local_rank: int = 0
    device: torch.device = field(default=torch.device("cpu"))

    def device_words(self) -> str:
        """What the ranks compute on, in words."""
        name = "processors" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        return f"{self.size} rank{'s' if self.size > 1 else ''} of {name}"

    def all_gather(self, item: Said) -> list[Said]:
        """Every rank's item, by rank; all must call it."""
        return gather_all(item) if self.size > 1 else [item]

    def most(self, *numbers: int) -> list[int]:
        """By place, the largest of what ranks give; all must call it."""
        values = torch.tensor(numbers)
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return [int(one) for one in values.tolist()]


def environment() -> World:
    """The rank that the environment names, before anything is joined; a single rank without one.

    Raises UsageError for variables that are no numbers.
    """
    if not is_worker():
        return World()
    numbers: list[int] = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        text = os.environ.get(name) or os.environ[name.removeprefix("LOCAL_")]
        if not text.isdigit():
            raise UsageError(f"{name} = {text!r} in the environment is no number; start ranks with torchrun")
        numbers.append(int(text))
    rank, size, local_rank, local_size = numbers
    local_size = max(1, local_size)
    return World(rank, size, local_size, local_rank=local_rank % local_size)


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


def unused_kind() -> str:
    """What kind of accelerators this machine has that ranks cannot compute on, and why; "" for none."""
    if torch.cuda.is_available():
        return ""
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if other is not None:
        return f"accelerators of the kind {other.type!r}, and ranks compute on 'cuda' or processors"
    for kind in drivers():
        return f"accelerators of {kind}, which this PyTorch ({torch.__version__}) does not see"
    return ""


def device_for(wanted: str, world: World) -> torch.device:
    """What this rank computes on, for a `training.device`. Raises UsageError where there are too few."""
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted != "cpu" and here >= world.local_size:
        return torch.device("cuda", world.local_rank)
    if wanted != "cuda":
        return torch.device("cpu")
    if kind := unused_kind():
        raise UsageError(
            f"training.device = 'cuda': this machine has {kind}: install a PyTorch that does, or set "
            "training.device = 'cpu'"
        )
    raise UsageError(
        f"training.device = 'cuda' needs an accelerator for each of the {world.local_size} ranks on this "
        f"machine, and it has {here}: choose a layout of fewer ranks, start more machines "
        "(torchrun --nnodes), or set training.device = 'cpu'"
    )


def check_graph(cuda_graph: bool, device: torch.device) -> None:
    """Raise UsageError for a step that is to be replayed where there is no accelerator."""
    if cuda_graph and device.type != "cuda":
        raise UsageError(
            "cuda_graph = true replays what an accelerator was given, and this run computes on processors: "
            "leave it out, or give training.device = 'cuda' where there is one for each rank"
        )


def device_note(wanted: str, world: World) -> str | None:
    """The note about accelerators that are not used; None where there are none, or all is as asked."""
    if wanted != "auto" or device_for(wanted, world).type == "cuda":
        return None
    if kind := unused_kind():
        return f"this machine has {kind}: ranks compute on processors (training.device = 'cpu' asks for that)"
    if not torch.cuda.is_available():
        return None
    here = torch.cuda.device_count()
    return (
        f"this machine has {here} accelerator{'s' if here > 1 else ''}, too few for its {world.local_size} "
        "ranks, which compute on processors"
    )


def crowding(ranks: int, threads_per_rank: int) -> str | None:
    """The note about ranks on this machine that want more cores than it has; None when they fit."""
    cores = len(usable_cores())
    if ranks * threads_per_rank <= cores:
        return None
    each = f" of {threads_per_rank} threads" if threads_per_rank > 1 else ""
    return (
        f"{ranks} ranks{each} share {cores} core{'s' if cores > 1 else ''} of this machine and take turns: a "
        "step is no faster than on fewer ranks"
    )


def join(world: World) -> World:
    """Meet the other ranks and make the process group: Gloo, and NCCL beside it for accelerators. Raises
    StrettoError when they do not come, UsageError when they compute on other kinds of devices."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.size == 1:
        return world
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        check_kinds(store, rank, size, world.device)
        backends = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise StrettoError(
            f"rank {world.rank} could not meet the others at {where}: {str(error).splitlines()[0]}; "
            f"{what_to_check(error, world.size)}"
        ) from None
    return replace(world, rank=rank, size=size, store=store)


def what_to_check(error: Exception, size: int) -> str:
    """What to look at where ranks could not meet: the port, if another program has it, the interface, if Gloo
    cannot use it, else the address."""
    if "EADDRINUSE" in str(error):
        return "another program has the port: give all ranks another one (torchrun --master-port)"
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if "address for" not in str(error) or not named:
        return f"check that all {size} ranks were started with the same MASTER_ADDR and MASTER_PORT"
    return f"GLOO_SOCKET_IFNAME = {named!r}: give a network interface of this machine (`ip -brief address`)"


def check_kinds(store: Store, rank: int, size: int, device: torch.device) -> None:
    """Raise UsageError on every rank unless all compute on one kind of device. By the store, before there are
    process groups: those of different backends would wait for each other."""
    store.set(f"device/{rank}", device.type)
    kinds = [store.get(f"device/{other}").decode() for other in range(size)]
    if len(set(kinds)) > 1:
        raise UsageError(
            f"rank {kinds.index('cpu')} would compute on a processor and rank {kinds.index('cuda')} on an "
            "accelerator: give training.device = 'cpu', or start ranks where there are accelerators"
        )


def leave(world: World) -> None:
    """Take the process group down once all ranks have come to this point."""
    if world.size > 1 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
