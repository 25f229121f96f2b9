"""The ranks that run, their machines, and costs that were measured on them before.

1. Costs belong to the machines of all ranks: devices, release of PyTorch, threads, cores and quotas, how
   products are computed, what the environment sets for libraries, and which ranks share a host; where
   there are several hosts, also which they are, as their network counts.
2. Rank 0 looks among what its host has kept; what it finds all ranks take. Else all measure, and rank 0
   keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stretto.backend.collectives import gather_all
from stretto.files.kept import Kept, code_digest, key_of
from stretto.files.typed_file import from_text, to_line
from stretto.ir.costs import Costs
from stretto.measure.time_ops import machine_of
from stretto.processor.control_groups import host, usable_cores
from stretto.processor.quota import quota_share

CPU = torch.device("cpu")
COSTS = "costs"
MOST_AGE_S = 7 * 86400.0
"""Costs that are older are measured again. Assumed: what else runs on a machine changes by the week."""

LIBRARY_VARIABLES = (
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "CUBLAS_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
)
"""How the names of variables begin by which libraries that compute and communicate read how."""


@dataclass(frozen=True, slots=True)
class Running:
    """Ranks that call the same things at the same time; `size` 1 is a process that has no one to ask."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's item, by rank. Any thread may call it, one at a time."""
        if self.size == 1:
            return [item]
        if self.device.type == "cuda":  # a new thread has the first one
            torch.cuda.set_device(self.device)
        return gather_all(item)

    def broadcast(self, item: Any) -> Any:
        """Rank 0's item."""
        if self.size == 1:
            return item
        gathered = [item if self.rank == 0 else None]
        dist.broadcast_object_list(gathered, src=0)
        return gathered[0]


def running(world: int, device: torch.device) -> Running:
    """The ranks of a plan of so many, if they are running; else this process alone."""
    if world > 1 and dist.is_initialized() and dist.get_world_size() == world:
        return Running(dist.get_rank(), world, device)
    return Running()


def machines(ranks: Running, device: torch.device) -> str | None:
    """Step 1, as a text; every rank must call it. None where costs are not to be kept: hosts that are
    emulated on one machine have whatever network they were given this time."""
    cores = len(usable_cores())
    mine = (f"{machine_of(device)} {_reported()}", cores, f"{quota_share():.3f}", host(), os.uname().nodename)
    gathered = ranks.all_gather(mine)
    hosts = [one[3] for one in gathered]
    boots = dict(hosts)
    if any(boots[boot] != space for boot, space in hosts):
        return None
    order = {one: at for at, one in enumerate(dict.fromkeys(hosts))}
    several = len(order) > 1
    return repr([(*one[:3], order[one[3]], one[4] if several else "") for one in gathered])


def _reported() -> list[object]:
    """What makes the same ops and messages faster or slower on the same machine."""
    of: Any = torch.backends
    parts = (of, of.cuda.matmul, of.cudnn.conv, of.cudnn.rnn, of.mkldnn.matmul, of.mkldnn.conv)
    numbers = [getattr(part, "fp32_precision", "") for part in parts]
    ways = [of.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()]
    return [
        *numbers,
        *ways,
        *sorted(item for item in os.environ.items() if item[0].startswith(LIBRARY_VARIABLES)),
    ]


def costs_again(
    ranks: Running,
    device: torch.device,
    parts: Callable[[], Sequence[str]],
    measure: Callable[[], Costs],
    kept: Kept | None,
) -> Costs:
    """Step 2; every rank must call it. parts: what besides the machines the costs belong to. measure: called
    on all ranks or on none."""
    if not ranks.broadcast(kept is not None):
        return measure()
    here = machines(ranks, device)
    if here is None:
        return measure()
    key = key_of(COSTS, code_digest(), here, *parts())
    said = "measured here {ago}, kept in {folder}; --fresh measures again"
    mine = kept.find(COSTS, key, said, MOST_AGE_S) if ranks.rank == 0 and kept is not None else None
    text = ranks.broadcast(mine)
    if text is not None:
        return from_text(Costs, text, COSTS)
    costs = measure()
    if ranks.rank == 0 and kept is not None:
        kept.keep(COSTS, key, to_line(costs))
    return costs
