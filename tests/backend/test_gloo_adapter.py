"""Gloo's groups for lanes: one collective after the other; loop threads that are calm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.launch import launch

PROGRAM = """
import os
import torch, torch.distributed as dist
from stretto.backend.gloo_adapter import calm_loops, loop_threads
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Communicator
from stretto.runtime.torch_transport import TorchTransport

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
theirs = loop_threads()
assert theirs, "Gloo's loop threads have another name now"
classes = lambda threads: {os.sched_getscheduler(thread) for thread in threads}
assert classes(theirs) == {os.SCHED_OTHER}
with calm_loops():
    assert classes(theirs) == {os.SCHED_BATCH}
assert classes(theirs) == {os.SCHED_OTHER}
transport = TorchTransport()
transport.open([Communicator("tp", (0,), ("tp",))], torch.device("cpu"), Mesh((("pp", 1), ("tp", 2))))
ours = loop_threads() - theirs
assert ours and classes(ours) == {os.SCHED_BATCH}, (ours, theirs)
assert classes(theirs) == {os.SCHED_OTHER}, "the user's own groups are the user's"
dist.barrier()
transport.close()
dist.destroy_process_group()
"""


ORDERED = """
import time
import torch, torch.distributed as dist
from stretto.backend.gloo_adapter import lane_backend

dist.init_process_group("gloo")
ended = {}
for backend in ("gloo", lane_backend()):
    group = dist.new_group(backend=backend)
    large, small = torch.ones(40_000_000), torch.ones(1)
    dist.all_reduce(small, group=group)
    dist.barrier()
    works = [dist.all_reduce(x, group=group, async_op=True) for x in (large, small)]
    works[1].wait()
    ended[backend] = works[0].is_completed()
    works[0].wait()
assert ended[lane_backend()], "the second ended before the first"
if dist.get_rank() == 0:
    print(ended)
dist.barrier()
dist.destroy_process_group()
"""


def on_two_ranks(program: str, folder: Path) -> None:
    (folder / "program.py").write_text(program)
    launch(2, folder / "program.py")


def test_a_lanes_collectives_end_in_the_order_of_their_starts(tmp_path: Path) -> None:
    on_two_ranks(ORDERED, tmp_path)


@pytest.mark.quiet  # the test itself looks for loops by their names, which come late on a busy machine
@pytest.mark.skipif(torch.__version__ < "2.12", reason="PyTorch 2.11 gives Gloo's threads no names")
@pytest.mark.skipif(sys.platform != "linux", reason="scheduling classes are Linux'")
def test_loops_of_the_transport_are_calm_and_others_are_as_they_were(tmp_path: Path) -> None:
    on_two_ranks(PROGRAM, tmp_path)
