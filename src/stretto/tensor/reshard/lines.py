"""Messages between ranks: one process group over the ranks of both meshes, and a bound on bytes under way.

A send returns when the message is on its way; its buffer, a copy, lives until the receiver has it. A rank may
so go on while a later stage is still busy. Bytes of messages that wait to be sent are bounded, and a send
beyond the bound waits for the oldest one. That cannot lock: all ranks make their messages in one order, so
the receiver of the oldest one has only earlier ones before it.

On processors (Gloo) two threads wait for messages, one for those sent and one for those received, so that a
rank which waits can look out for trouble meanwhile. On accelerators waiting is the stream's matter.

Process groups are made when a pair of meshes is first used, by all ranks of the program, in its order, and
kept. (`new_group` by the members alone would do with fewer, but in PyTorch 2.13 the members then agree on a
name only if each of them is in as many groups.)
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stretto.errors import RunError
from stretto.tensor.reshard.agree import LOOK_S, Agreement, agreement, patience_s


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
        """Send a buffer that nobody else writes; waits while more than `limit_bytes` would be under way."""
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
