"""Where a thread stands: in each way to wait for other ranks that PyTorch has, and in ways to be busy.

One world of two ranks: rank 1 comes to a collective only when rank 0 has been seen to stand in it.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import stretto
from stretto.tensor.reshard.frames_adapter import Place, place_of
from tests.tensor.world import all_end_well

SEEN_S = 0.25
"""A thread that has not moved for so long stands."""

HAS_A_LIMIT = "a barrier with a time limit"
"""The one way that ends by itself, and is not taken for one to wait for ever."""

Call = Callable[[], Any]


def where_it_stands(thread: int, at_most_s: float = 5.0) -> Place | None:
    """Where a thread has not moved for `SEEN_S`; None if it always moves."""
    last, since = place_of(thread), time.monotonic()
    end = since + at_most_s
    while time.monotonic() < end:
        time.sleep(0.01)
        now = place_of(thread)
        if now is None or last is None or now.mark != last.mark:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > SEEN_S:
            return now
    return None


def waited() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()


def in_autograd(model: nn.Module) -> None:
    model(torch.ones(3, 4)).sum().backward()


def ways_to_wait() -> dict[str, Call]:
    mesh = DeviceMesh("cpu", [0, 1])
    plain = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    ours = stretto.shard(torch.ones(4, 4), mesh, [Shard(0)])
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    ops: Any = torch.ops._c10d_functional
    return {
        "barrier": dist.barrier,
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "objects": lambda: dist.all_gather_object([None, None], "word"),
        "wait": waited,
        "backward": lambda: in_autograd(model),
        "functional": lambda: functional.all_reduce(torch.ones(3), "sum", mesh) + 1,
        "op": lambda: ops.wait_tensor(ops.all_reduce(torch.ones(3), "sum", name)),
        "redistribute": lambda: plain.redistribute(mesh, [Replicate()]).to_local() + 1,
        "full tensor": lambda: plain.full_tensor() + 1,
        "an op that gathers": lambda: torch.sort(plain, dim=0)[0].to_local() + 1,
        "global tensor": lambda: torch.relu(ours.redistribute(mesh, [Replicate()])).sum().full_tensor(),
        "new group": lambda: dist.new_group([0, 1]),
        HAS_A_LIMIT: lambda: dist.monitored_barrier(timeout=timedelta(seconds=20)),
    }


def two_ranks() -> None:
    """Rank 0 is looked at by a thread of its own, which then calls rank 1."""
    side = dist.new_group([0, 1])
    wrong = []
    for name, call in ways_to_wait().items():
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), src=0, group=side)
            call()
            continue
        seen: list[Place | None] = []
        main = threading.get_ident()

        def look(seen: list[Place | None] = seen, main: int = main) -> None:
            seen.append(where_it_stands(main))
            dist.send(torch.ones(1), dst=1, group=side)

        looker = threading.Thread(target=look)
        looker.start()
        call()
        looker.join()
        (place,) = seen
        expected = name != HAS_A_LIMIT
        if (
            place is None
            or place.communicates != expected
            or not place.file.endswith("test_frames_adapter.py")
        ):
            wrong.append(f"{name}: {place}")
    assert not wrong, "\n".join(wrong)
    dist.barrier()


def seen_busy(call: Call) -> bool:
    """Whether a thread that makes a call seems to communicate."""
    thread = threading.Thread(target=call)
    thread.start()
    assert thread.ident is not None
    place = where_it_stands(thread.ident, 3.0)
    thread.join()
    assert place is not None, "it stood in the call"
    return place.communicates


def test_every_way_to_wait_for_other_ranks_is_known() -> None:
    all_end_well([(2, "tests.tensor.test_frames_adapter:two_ranks")])


def slow_file() -> None:
    """A checkpoint's file, which nobody reads for a while."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder) / "pipe"
        os.mkfifo(pipe)
        reader = threading.Timer(0.6, lambda: pipe.read_bytes())
        reader.start()
        pipe.write_bytes(b"checkpoint")
        reader.join()


def test_a_busy_thread_does_not_communicate() -> None:
    event, empty = threading.Event(), queue.Queue[None]()

    def no_item() -> None:
        try:
            empty.get(timeout=0.6)
        except queue.Empty:
            return

    for call in (
        lambda: time.sleep(0.6),
        lambda: event.wait(0.6),
        slow_file,
        no_item,
        lambda: subprocess.run([sys.executable, "-c", "import time; time.sleep(0.6)"]),
    ):
        assert not seen_busy(call)


def test_the_text_is_the_users_line() -> None:
    place = place_of(threading.get_ident())
    assert place is not None
    assert "test_frames_adapter.py:" in place.text()
    assert place.text().endswith("`place = place_of(threading.get_ident())`")
    assert place_of(-1) is None
