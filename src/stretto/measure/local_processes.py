"""Processes of this machine started to measure between: Gloo over loopback, one thread each.

A single process that plans for several ranks has no one to talk to. `measure_between` starts as many as are
needed, has each run `python -m stretto.measure.local_processes`, and hands back what rank 0 found. Touches a
folder for that time.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.errors import StrettoError
from stretto.ir.mesh import Mesh
from stretto.measure.measure_collectives import Measured, measure_collectives
from stretto.measure.messages import ProbedLink, measure_links
from stretto.price.shared import WantedCollective, scaled

MOST_PROCESSES = 8
"""More are not started: each needs memory for the framework. Larger axes are scaled from what these show."""

TIMEOUT_S = 300.0


def measure_between(
    mesh: Mesh, wanted: Sequence[WantedCollective], link: bool
) -> tuple[ProbedLink | None, dict[tuple[str, str], Measured]]:
    """Messages between two processes (if `link`), and the collectives that are wanted, between processes.
    mesh: axes other than pp; when it has more than `MOST_PROCESSES` ranks, its largest axes are halved until
    it fits, and times are scaled by their kinds; their source says so. The link is None when it was not asked
    for; collectives are by (axis, kind). Raises StrettoError when the processes
    cannot be started or fail."""
    small = fitting(mesh)
    world = max(small.world, 2 if link else 1)
    with tempfile.TemporaryDirectory() as folder:
        asked, gathered = Path(folder, "asked"), Path(folder, "gathered")
        asked.write_bytes(pickle.dumps((small, wanted, link)))
        _run(world, [str(asked), str(gathered)])
        probed, collectives = pickle.loads(gathered.read_bytes())
    for (axis, kind), one in collectives.items():
        cost = replace(one.cost, source=f"{one.cost.source}, loopback")
        cost = scaled(cost, kind, small.size(axis), mesh.size(axis))
        collectives[axis, kind] = replace(one, cost=cost)
    if probed is not None:
        probed = replace(probed, link=replace(probed.link, source="measured, loopback"))
    return probed, collectives


def fitting(mesh: Mesh) -> Mesh:
    """The mesh with its largest axes halved, never below 2, until it has `MOST_PROCESSES` ranks or fewer."""
    sizes = dict(mesh.sizes)
    while math.prod(sizes.values()) > MOST_PROCESSES and max(sizes.values()) > 2:
        largest = max(sizes, key=sizes.__getitem__)
        sizes[largest] = max(2, sizes[largest] // 2)
    return Mesh(tuple(sizes.items()))


def _run(world: int, arguments: Sequence[str]) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "GROUP_"))}
    theirs, mine = os.pipe()  # nothing is written: that this process is there keeps it open
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "stretto.measure.local_processes", *arguments, str(rank), str(world)],
            env={**inherited, "OMP_NUM_THREADS": "1"},
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    os.close(theirs)
    try:
        complaints = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    except subprocess.TimeoutExpired:
        raise StrettoError(
            f"measuring communication between {world} local processes took over {TIMEOUT_S:.0f} s; give "
            "the cluster as a description (stretto.Cluster) instead"
        ) from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
        os.close(mine)
    for process, complaint in zip(processes, complaints, strict=True):
        if process.returncode:
            last = "".join(complaint.strip().splitlines()[-1:])
            raise StrettoError(f"measuring communication between {world} local processes failed: {last}")


def _measure(asked: str, gathered: str, rank: str, world: str) -> None:
    torch.set_num_threads(1)
    place = f"file://{asked}.store"
    dist.init_process_group("gloo", init_method=place, rank=int(rank), world_size=int(world))
    cpu = torch.device("cpu")
    mesh, wanted, link = pickle.loads(Path(asked).read_bytes())
    # First, and between two alone: messages of a pipeline have the machine's cores for themselves here.
    probed = measure_links([(0, 1)], cpu).get((0, 1)) if link else None
    collectives = measure_collectives(mesh, wanted, cpu)
    if dist.get_rank() == 0:
        Path(gathered).write_bytes(pickle.dumps((probed, collectives)))
    dist.destroy_process_group()


def _end_with_the_asker() -> None:
    """End this process when the one that started it is gone, however that ended: then its end of the pipe is
    closed. A signal's default action runs no `finally`."""

    def watch() -> None:
        os.read(0, 1)  # not by `sys.stdin`, whose lock the interpreter wants when this process ends by itself
        os._exit(1)

    threading.Thread(target=watch, name="asker", daemon=True).start()


if __name__ == "__main__":
    _end_with_the_asker()
    from stretto.measure import local_processes  # as its classes are named in what the asker reads

    local_processes._measure(*sys.argv[1:])
