"""Processes of this machine started to measure between: Gloo over loopback, one thread each.

A single process that plans for several ranks has nobody to talk to. `measure_between` starts as many as are
needed, has each run `python -m stretto.measure.local_processes`, and hands back what rank 0 told.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from stretto.errors import StrettoError
from stretto.files.typed_file import from_text, to_line
from stretto.ir.costs import Link
from stretto.ir.mesh import Mesh
from stretto.measure.measure_collectives import Measured, measure_collectives
from stretto.measure.messages import measure_both_ways, measure_links
from stretto.price.roofline import scaled
from stretto.price.wanted import Wanted

MOST_PROCESSES = 8
"""More are not started: each needs memory for the framework. Larger axes are scaled from what these show."""

TIMEOUT_S = 300.0


BOTH_WAYS_BYTES = 1_048_576
"""Bytes of the messages that go both ways at once: an activation's size."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What processes measure between them."""

    mesh: Mesh
    wanted: tuple[Wanted, ...]
    link: bool


@dataclass(frozen=True, slots=True)
class Between:
    """What was found between processes. link: None when it was not asked for; both_ways as
    `messages.measure_both_ways` tells it; spread as in `messages.FoundLink`; collectives by (axis, kind)."""

    link: Link | None
    both_ways: float
    spread: float
    collectives: dict[tuple[str, str], Measured]


def measure_between(
    mesh: Mesh, wanted: Sequence[Wanted], link: bool, timeout_s: float = TIMEOUT_S
) -> Between:
    """Messages between two processes (if `link`), and the collectives that are wanted, between processes.

    mesh: axes beside pp; when it has more than `MOST_PROCESSES` ranks, its largest axes are halved until
    it fits, and times are scaled as a ring's are (`scaled`); their source says so.

    Raises StrettoError when the processes cannot be started or fail.
    """
    small = fitting(mesh)
    asked = _Asked(small, tuple(wanted), link)
    found = _run(max(small.world, 2 if link else 1), asked, timeout_s)
    collectives = {}
    for (axis, kind), one in found.collectives.items():
        cost = replace(one.cost, source=f"{one.cost.source}, loopback")
        collectives[axis, kind] = replace(one, cost=scaled(cost, small.size(axis), mesh.size(axis)))
    return replace(found, collectives=collectives)


def fitting(mesh: Mesh) -> Mesh:
    """The mesh with its largest axes halved, never below 2, until it has `MOST_PROCESSES` ranks or fewer."""
    sizes = dict(mesh.sizes)
    while Mesh(tuple(sizes.items())).world > MOST_PROCESSES and max(sizes.values()) > 2:
        largest = max(sizes, key=lambda axis: sizes[axis])
        sizes[largest] = max(2, sizes[largest] // 2)
    return Mesh(tuple(sizes.items()))


def _run(world: int, asked: _Asked, timeout_s: float) -> Between:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "GROUP_"))}
    common = {**inherited, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    theirs, mine = os.pipe()  # nothing is written: that this process is there keeps it open
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "stretto.measure.local_processes", to_line(asked)],
            env={**common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    os.close(theirs)
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    except subprocess.TimeoutExpired:
        raise StrettoError(
            f"measuring communication between {world} local processes took over {timeout_s:.0f} s; give "
            "the cluster as a description (stretto.Cluster) instead"
        ) from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
        os.close(mine)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        lines = [line for rank in failed for line in outputs[rank][1].strip().splitlines()[-1:]]
        raise StrettoError(
            f"measuring communication between {world} local processes failed: {lines[0] if lines else ''}"
        )
    return from_text(Between, outputs[0][0].strip().splitlines()[-1], "what local processes measured")


def _probe(asked: _Asked) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    found = Between(None, 1.0, 0.0, {})
    if asked.link:
        # First, and between two alone: messages of a pipeline have the machine's cores for themselves here.
        link = measure_links([(0, 1)], cpu).get((0, 1))
        both_ways = measure_both_ways(0, 1, BOTH_WAYS_BYTES, cpu)
        if link is not None and both_ways is not None:
            found = Between(replace(link.link, source="measured, loopback"), both_ways, link.spread, {})
    if asked.mesh.world < dist.get_world_size():
        assert not asked.wanted, "a mesh of one rank has no collectives"
    found = replace(found, collectives=measure_collectives(asked.mesh, asked.wanted, cpu))
    if dist.get_rank() == 0:
        print(to_line(found))
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
    _probe(from_text(_Asked, sys.argv[1], "what to measure"))
