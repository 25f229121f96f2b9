"""Messages between processes on `torch.distributed`: NCCL on accelerators, Gloo on processors.

A rank whose connection breaks or stays silent is named, except in a collective, where it may be any. Lanes:

1. Every communicator is a process group of its own, so that no lane waits for another. On Gloo it has threads
   and connections of its own; on NCCL a stream of high priority, so that a collective that is ready is not
   delayed by a long kernel. The process group joins it with the compute stream by events, at the start and at
   the wait. Nothing relies on kernels starting in the order in which they were queued on different streams.
2. They are created when the transport is opened, in the plan's order, which all ranks compare first: groups
   that are made in different orders would wait for each other forever. An accelerator's communicators are
   used once then, because they connect on first use.
3. What starts on a lane that was not opened is refused.
4. Gloo's threads of lanes do not take the core of a thread that has a lock that they need; during a step the
   thread that computes gives way to them (`stretto.backend.gloo_adapter` does both).
5. A buffer that a transfer reads or writes is kept by its handle until it was waited for.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stretto.backend import collectives, gloo_adapter
from stretto.backend.gloo_adapter import keeping_core, lanes_first
from stretto.errors import LostRankError, RunError, UsageError
from stretto.ir.mesh import Mesh
from stretto.ir.plan import Communicator
from stretto.processor.control_groups import host
from stretto.runtime.transport import Handle, Transport
from stretto.tensor.dtensor_adapter import outside_modes as uncounted

TIMEOUT_S = 300.0
"""How long a rank waits for a message before it gives the peer up. Assumed: ten times a long step."""

CLOCK_ROUNDS = 8
"""How often clocks are compared. Assumed."""


NETWORK_WORDS = ("connection", "socket", "closed", "timed out", "timeout", "broken pipe", "gloo/transport")
"""Words of Gloo's errors when a peer is gone, as seen with PyTorch 2.13; it raises plain RuntimeError."""


class TorchTransport(Transport):
    """One process's end. `torch.distributed` must be initialised (`init_process_group`)."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "torch.distributed is not initialised: run under torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._timeout_s = timeout_s
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._opened: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._on_processors = True
        self._beside: list[TorchTransport] = []
        with gloo_adapter.calm_new_loops():  # step 4
            self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def open(self, communicators: Sequence[Communicator], device: torch.device, mesh: Mesh) -> None:
        """Step 2. Raises UsageError on every rank when ranks would open other lanes, or in another order."""
        self._agree([(c.name, c.ranks, c.axes) for c in communicators])
        self._on_processors = device.type == "cpu"
        with gloo_adapter.calm_new_loops():  # step 4
            self._open(communicators, device, mesh)

    def _open(self, communicators: Sequence[Communicator], device: torch.device, mesh: Mesh) -> None:
        for communicator in communicators:
            # All ranks take part in making every group, so all must skip the same ones.
            groups = mesh.groups(communicator.axes, communicator.ranks)
            known = self._opened.setdefault(communicator.name, groups)
            if known is not groups:
                if known != groups:
                    raise UsageError(
                        f"lane {communicator.name!r} was opened for ranks {known}, and is wanted for "
                        f"{groups}: give a Runner of another layout a transport of its own"
                    )
                continue
            for members in groups:
                group = dist.new_group(
                    list(members), timeout=timedelta(seconds=self._timeout_s), **_lane_options(device)
                )
                if self.rank not in members:
                    continue
                assert isinstance(group, dist.ProcessGroup)
                self.members[communicator.name] = members
                self._groups[communicator.name] = group
                if device.type != "cpu":
                    self._connect(communicator.name, device)

    def _agree(self, lanes: list[tuple[str, tuple[int, ...], tuple[str, ...]]]) -> None:
        for rank, others in enumerate(self.all_gather(lanes)):
            if others != lanes:
                raise UsageError(
                    f"rank {self.rank} opens lanes {', '.join(name for name, *_ in lanes) or 'none'}, but "
                    f"rank {rank} opens {', '.join(name for name, *_ in others) or 'none'}: load one plan on "
                    "all ranks, and make their Runners in the same order"
                )

    def _connect(self, lane: str, device: torch.device) -> None:
        """Use a new communicator once, in the common order: a device backend connects on first use, and the
        first message that a rank posts would keep its processor until the peer posts the matching one."""
        group = self._group(lane)
        touch = torch.zeros(1, device=device)
        if lane.startswith("pp "):
            sender, receiver = self.members[lane]
            if self.rank == sender:
                dist.send(touch, receiver, group=group)
            else:
                dist.recv(touch, sender, group=group)
        else:
            dist.all_reduce(touch, group=group)
        torch.cuda.synchronize(device)

    def close(self) -> None:
        """Give all communicators back, those of ends beside too. Every rank must call it; the transport
        cannot be used after it."""
        for end in self._beside:
            end.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        dist.destroy_process_group(self._control)
        super().close()
        self._beside.clear()
        self._groups.clear()
        self._opened.clear()

    def send(self, lane: str, value: torch.Tensor, to: int) -> Handle:
        return self._start(lane, to, lambda: dist.isend(value, to, group=self._group(lane)), value)

    def recv(self, lane: str, buffer: torch.Tensor, source: int) -> Handle:
        return self._start(lane, source, lambda: dist.irecv(buffer, source, group=self._group(lane)), buffer)

    def broadcast(self, lane: str, value: torch.Tensor, source: int) -> Handle:
        return self._start(
            lane, None, lambda: dist.broadcast(value, source, group=self._group(lane), async_op=True), value
        )

    def collective(
        self, lane: str, kind: str, result: torch.Tensor, value: torch.Tensor, how: str = ""
    ) -> Handle:
        def begin() -> Any:
            with uncounted():
                return collectives.start(kind, result, value, self._group(lane), how)

        return self._start(lane, None, begin, result, value)

    def all_gather(self, item: Any) -> list[Any]:
        result: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(result, item, group=self._control)
        except RuntimeError as error:
            raise self._lost("control", None, error) from None
        return result

    def beside(self) -> TorchTransport:
        self._beside.append(TorchTransport(self._timeout_s))
        return self._beside[-1]

    def during_step(self) -> AbstractContextManager[None]:
        return lanes_first() if self._on_processors else nullcontext()

    def clock_offset_us(self) -> float:
        """Rank 0's clock minus this rank's (perf_counter). All ranks come out of a gather at one time, but
        for what its last message takes; the median of some counts."""
        if len(set(self.all_gather(host()[0]))) == 1:
            return 0.0  # one machine, one clock
        offsets_ns: list[int] = []
        for _ in range(CLOCK_ROUNDS):
            self.all_gather(None)
            now_ns = time.perf_counter_ns()
            offsets_ns.append(self.all_gather(now_ns)[0] - now_ns)
        return statistics.median(offsets_ns) / 1000.0

    def _group(self, lane: str) -> dist.ProcessGroup:
        self.members_of(lane)
        return self._groups[lane]

    def _start(self, lane: str, peer: int | None, begin: Any, *buffers: torch.Tensor) -> Handle:
        try:
            with keeping_core():
                work = begin()
        except RuntimeError as error:
            raise self._lost(lane, peer, error) from error
        kept = list(buffers)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(lane, peer, error) from None
            kept.clear()  # step 5

        return Handle(wait)

    def _lost(self, lane: str, peer: int | None, error: RuntimeError) -> RunError:
        others = [member for member in self.members.get(lane, ()) if member != self.rank]
        if peer is None and len(others) == 1:
            peer = others[0]
        # Without the place in the library's source that it begins with, and its advice.
        reason = re.sub(r"^\[[^\]]*:\d+\]\s*", "", str(error).strip().splitlines()[0]).split(". ")[0][:300]
        network = isinstance(error, (dist.DistBackendError, dist.DistNetworkError))
        if not network and not any(word in reason.lower() for word in NETWORK_WORDS):
            return RunError(f"rank {self.rank}: a message on lane {lane!r} could not be carried: {reason}")
        among = f"one of ranks {', '.join(map(str, others))}" if others else "a rank"
        who = f"rank {peer}" if peer is not None else among
        if "imed out" in reason or "imeout" in reason:
            what = f"did not answer on lane {lane!r} within {self._timeout_s:.0f} s; it may be lost or stuck"
        else:
            what = f"was lost (its connection on lane {lane!r} broke)"
        rest = f"Look at its output; resume from the last checkpoint ({reason})"
        return LostRankError(f"rank {self.rank}: {who} {what}. {rest}", peer)


def _lane_options(device: torch.device) -> dict[str, Any]:
    """Step 1: Gloo with one worker on a processor; with NCCL the group's stream has high priority."""
    if device.type == "cpu":
        return {"backend": gloo_adapter.lane_backend()}
    if device.type != "cuda" or "nccl" not in dist.get_backend_config():
        return {}
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return {"backend": "nccl", "pg_options": options}
