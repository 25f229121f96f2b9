"""Carries a reshard plan out: this rank's part of the transfers, piece by piece, as messages between ranks.

    1. Copy what this rank already has.
    2. Walk the plan's transfers, of all its tensors, in their order, which is the same on all ranks. Of each,
       cut into pieces that all ranks cut in the same way, this rank receives a piece from the one before it
       in the chain, if there is one, and hands it on to the one after it, if there is one.
    3. Receives are started ahead of their turn, as many bytes as the limit allows, so that pieces are under
       way while others are handed on.

A rank has its parts of the sources, its parts of the targets, and pieces under way: never more of a tensor.

A send returns when the message is on its way; its buffer, a copy, lives until the receiver has it. A rank may
so go on while a later stage is still busy. Bytes of messages that wait to be sent are bounded, and a send
beyond the bound waits for the oldest one. That cannot lock: all ranks make their messages in one order, so
the receiver of the oldest one has only earlier ones before it.

On processors (Gloo) two threads wait for messages, one for those sent and one for those received, so that a
rank which waits can look out for trouble meanwhile. On accelerators waiting is the stream's matter.

Process groups, over the ranks of both meshes, are made when these are first used, by all ranks of the
program, in its order, and kept. (`new_group` by the members alone would do with fewer, but in PyTorch 2.13
the members then agree on a name only if each of them is in as many groups.)
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stretto.errors import RunError
from stretto.tensor.layout import Region, region_count, region_shape
from stretto.tensor.reshard.agree import LOOK_S, Agreement, agreement, patience_s
from stretto.tensor.reshard.plan import ReshardPlan


@dataclass(eq=False)
class PieceMessage:
    """One message under way. buffer: 1-d, contiguous, bytes; kept until it is done."""

    work: Any
    buffer: torch.Tensor
    peer: int
    number: int
    done: Future[None] = field(default_factory=Future)


class _Waiter:
    """A thread that waits for messages in the order given; it does not keep the program from ending."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[PieceMessage] = queue.SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None

    def add(self, message: PieceMessage) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._waiting.put(message)

    def _run(self) -> None:
        while True:
            message = self._waiting.get()
            done, error = message.done, None
            try:
                message.work.wait()
            except Exception as found:
                error = found
            del message  # or its memory would be kept until the next one comes
            done.set_exception(error) if error else done.set_result(None)


class PeerLinks:
    """The messages of this rank, in one life of the default process group."""

    def __init__(self, agreed: Agreement) -> None:
        self.agreed = agreed
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._sent: deque[PieceMessage] = deque()
        self._sent_bytes = 0
        self._send_waiter = _Waiter("stretto reshard: sent")
        self._receive_waiter = _Waiter("stretto reshard: received")

    def group(self, device_type: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of these ranks, made when first used. All ranks of the program call this, in one order.

        On a rank that is not among them it is a placeholder. Raises RunError if ranks do not come.
        """
        key = (device_type, tuple(sorted(ranks)))
        if key not in self._groups:
            if self.agreed.rank in ranks:
                self.agreed.meet(f"{device_type}/{'.'.join(map(str, key[1]))}", key[1])
            # Gloo where the default group has only the accelerators' backend.
            backend = "gloo" if device_type == "cpu" and dist.get_backend() == "nccl" else None
            made = dist.new_group(
                list(key[1]),
                backend=backend,
                timeout=timedelta(seconds=patience_s()),
            )
            if device_type != "cpu" and self.agreed.rank in ranks:
                # A communicator that is made by its first message would be made in another order elsewhere.
                dist.barrier(made)
            self._groups[key] = made
        return self._groups[key]

    def send(self, group: dist.ProcessGroup, buffer: torch.Tensor, peer: int, limit_bytes: int) -> None:
        """Send a buffer that no one else writes; waits while more than `limit_bytes` would be under way."""
        while self._sent and (self._sent[0].done.done() or self._sent_bytes + buffer.numel() > limit_bytes):
            self._wait_for_oldest()
        message = self._start(dist.isend, group, buffer, peer, self._send_waiter)
        if not message.done.done():
            self._sent.append(message)
            self._sent_bytes += buffer.numel()

    def receive(self, group: dist.ProcessGroup, buffer: torch.Tensor, peer: int) -> PieceMessage:
        """Start to receive into a buffer; see `wait`."""
        return self._start(dist.irecv, group, buffer, peer, self._receive_waiter)

    def drain(self) -> None:
        """Wait until all that was sent has arrived. Raises RunError if it will not."""
        while self._sent:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self.wait(self._sent[0], "to send")
        self._sent_bytes -= self._sent.popleft().buffer.numel()

    def _start(
        self,
        how: Callable[..., Any],
        group: dist.ProcessGroup,
        buffer: torch.Tensor,
        peer: int,
        waiter: _Waiter,
    ) -> PieceMessage:
        number = self.agreed.number
        try:
            # As a batch of one, which uses the group's own communicator on every backend.
            (work,) = dist.batch_isend_irecv([dist.P2POp(how, buffer, peer, group)])
        except RuntimeError as error:
            raise self._lost(peer, number, error) from error
        message = PieceMessage(work, buffer, peer, number)
        if buffer.device.type == "cpu":
            waiter.add(message)
        else:
            work.wait()
            message.done.set_result(None)
        return message

    def wait(self, message: PieceMessage, what: str = "to receive") -> None:
        """Until a message is there, or has left. Raises RunError if it will not."""
        began = time.monotonic()
        waits_for = f"{what} {message.buffer.numel()} bytes, rank {message.peer}"
        while not wait([message.done], LOOK_S).done:
            self.agreed.look_out(message.number, [message.peer], began, waits_for)
        error = message.done.exception()
        if error is not None:
            # If the peer ended with an error of its own, that error is the better one.
            self.agreed.look_out(message.number, [message.peer], began, what)
            raise self._lost(message.peer, message.number, error) from error

    def _lost(self, peer: int, number: int, error: BaseException) -> RunError:
        return self.agreed.alarm(
            f"rank {self.agreed.rank}: rank {peer} does not answer in reshard number {number}: it has ended, "
            f"or failed; its own output says why ({str(error).splitlines()[0]})"
        )


_lines: PeerLinks | None = None


def lines() -> PeerLinks:
    """The lines of the default process group as it is now."""
    global _lines
    agreed = agreement()
    if _lines is None or _lines.agreed is not agreed:
        _lines = PeerLinks(agreed)
        agreed.drain = _lines.drain  # a program may end while others still take what it sent
    return _lines


@dataclass(frozen=True, slots=True)
class LocalBox:
    """This rank's part of a tensor: the box, and its elements. Without a box the rank is off the mesh."""

    region: Region | None
    tensor: torch.Tensor | None

    def has(self, box: Region) -> bool:
        """Whether a box is within the part."""
        if self.region is None:
            return False
        return all(first <= start and stop <= last for (start, stop), (first, last) in zip(box, self.region))

    def at(self, box: Region) -> torch.Tensor:
        """The elements of a box within the part; not a copy."""
        assert self.region is not None, "the plan reads and writes only on the mesh"
        assert self.tensor is not None, "a rank of the mesh has a part"
        result = self.tensor
        for dim, ((start, stop), (first, _)) in enumerate(zip(box, self.region)):
            result = result.narrow(dim, start - first, stop - start)
        return result


@dataclass(frozen=True, slots=True)
class PieceStep:
    """This rank's turn with one piece of a tensor: receive it, hand it on, or both."""

    tensor: int
    box: Region
    nbytes: int
    before: int | None
    after: int | None


def execute(
    plan: ReshardPlan,
    sources: Sequence[LocalBox],
    targets: Sequence[Sequence[LocalBox]],
    lines: PeerLinks,
    group: dist.ProcessGroup,
    limit_bytes: int,
) -> None:
    """Fill the targets' parts on this rank, and send what others need of the sources'.

    sources: this rank's part of each tensor that the plan speaks of. targets: of each, its parts of all the
    layouts that the tensor goes to. group: over all ranks of all layouts. limit_bytes: how many bytes of sent
    pieces, and as many of awaited ones, may be under way on this rank, of all tensors together.
    Returns when this rank has its parts; what it sent may still be under way.
    Raises RunError if a rank that it needs is lost or makes another reshard.
    """
    rank = lines.agreed.rank
    for copy in plan.copies:
        if copy.rank == rank:
            kept = sources[copy.tensor].at(copy.region)
            for place in _places(targets[copy.tensor], copy.region):
                place.copy_(kept)
    # An accelerator's stream does one after the other: what is started ahead would wait in front.
    filled = [part.tensor for parts in targets for part in parts if part.tensor is not None]
    ahead = all(tensor.device.type == "cpu" for tensor in filled)
    steps = list(_steps(plan, rank, limit_bytes))
    awaited: dict[int, tuple[PieceMessage, torch.Tensor]] = {}
    awaited_bytes = 0
    started = 0
    for at, step in enumerate(steps):
        while started < len(steps) and (
            started <= at or (steps[started].nbytes + awaited_bytes <= limit_bytes and ahead)
        ):
            if steps[started].before is not None:
                awaited[started] = _receive(lines, group, steps[started], targets)
                awaited_bytes += steps[started].nbytes
            started += 1
        if at in awaited:
            message, piece = awaited.pop(at)
            lines.wait(message)
            awaited_bytes -= step.nbytes
            for place in _places(targets[step.tensor], step.box):
                if place.data_ptr() != piece.data_ptr():
                    place.copy_(piece)
        if step.after is not None:
            if step.before is not None:
                sent = _places(targets[step.tensor], step.box)[0]
            else:
                sent = sources[step.tensor].at(step.box)
            copied = sent.clone(memory_format=torch.contiguous_format)
            lines.send(group, _bytes(copied), step.after, limit_bytes)


def _places(parts: Sequence[LocalBox], box: Region) -> list[torch.Tensor]:
    """Where a box is in the parts that have it, one at least; boxes are within a part or beside it."""
    result = [part.at(box) for part in parts if part.has(box)]
    assert result, "the plan sends a rank what it needs"
    return result


def _receive(
    lines: PeerLinks, group: dist.ProcessGroup, step: PieceStep, targets: Sequence[Sequence[LocalBox]]
) -> tuple[PieceMessage, torch.Tensor]:
    """Start to receive a piece: into its place where that is one stretch of memory, else aside."""
    assert step.before is not None
    piece = _places(targets[step.tensor], step.box)[0]
    if not piece.is_contiguous():
        piece = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
    return lines.receive(group, _bytes(piece), step.before), piece


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().view(-1).view(torch.uint8)


def _steps(plan: ReshardPlan, rank: int, limit_bytes: int) -> Iterator[PieceStep]:
    for transfer in plan.transfers:
        chain = (transfer.sender, *transfer.receivers)
        if rank not in chain:
            continue
        at = chain.index(rank)
        itemsize = transfer.nbytes // region_count(transfer.region)
        # A plain message needs pieces only so that its copy stays below the limit.
        largest = min(limit_bytes, plan.piece_bytes) if len(chain) > 2 else limit_bytes
        for box in pieces(transfer.region, max(1, largest // itemsize)):
            yield PieceStep(
                transfer.tensor,
                box,
                region_count(box) * itemsize,
                chain[at - 1] if at > 0 else None,
                chain[at + 1] if at + 1 < len(chain) else None,
            )


def pieces(region: Region, largest: int) -> Iterator[Region]:
    """A box cut into boxes of at most `largest` elements, in the order of its elements.

    It is cut along the first dims only, so that pieces of one stretch of memory stay one stretch.
    """
    if region_count(region) <= largest:
        yield region
        return
    sizes = region_shape(region)
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    start, stop = region[dim]
    inner = math.prod(sizes[dim + 1 :])
    rows = max(1, largest // inner)
    for first in range(start, stop, rows):
        box = (*region[:dim], (first, min(first + rows, stop)), *region[dim + 1 :])
        yield from pieces(box, largest)
