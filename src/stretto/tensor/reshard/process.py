"""What the kernel says of this process: whether bytes move on its connections, and whether a thread works.

Linux only: elsewhere `traffic` knows nothing and says so. Reads /proc and sockets; changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_FDS = Path("/proc/self/fd")
_TASKS = Path("/proc/self/task")

_TCP_INFO = getattr(socket, "TCP_INFO", None)

_CONNECTED, _CONNECTS, _OTHER_HAS_CLOSED, _LISTENS = 1, 2, 8, 10
_STATE_AT, _UNACKED_AT, _ACKED_AT, _RECEIVED_AT, _UNSENT_AT = 0, 24, 120, 128, 144
"""Of `struct tcp_info`, linux/tcp.h, since Linux 4.6: states, and where what stands, in bytes."""

_LEAST_BYTES = _UNSENT_AT + 4

LOOKS, BETWEEN_LOOKS_S = 3, 0.01
"""How often a thread is looked at that seems to be at work."""

_ADDRESS_BYTES = 128
"""Of `struct sockaddr_storage`; the port stands at 2, in network order, for both kinds of IP."""

_libc = ctypes.CDLL(None, use_errno=True) if _TCP_INFO is not None else None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of all TCP connections of this process.

    carried_bytes: sent and acknowledged, and received, in the life of those that are open now.
    under_way: whether the other side has yet to acknowledge something, or a connection is being made.
    """

    carried_bytes: int
    under_way: bool


def traffic(but_port: int) -> Traffic | None:
    """Whether bytes move; None where the kernel does not tell.

    but_port: connections from or to this port do not count.
    """
    if _libc is None:
        return None
    carried, under_way = 0, False
    try:
        names = os.listdir(_FDS)
    except OSError:
        return None
    for name in names:
        fd = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
        except OSError:
            continue  # closed meanwhile
        # Not by Python's `socket`, which may make a foreign socket non-blocking (`setdefaulttimeout`).
        info = ctypes.create_string_buffer(256)
        length = ctypes.c_uint32(len(info))
        if _libc.getsockopt(fd, socket.IPPROTO_TCP, _TCP_INFO, info, ctypes.byref(length)) != 0:
            continue  # not TCP
        if length.value < _LEAST_BYTES:
            return None
        state = info.raw[_STATE_AT]
        if state == _LISTENS or (but_port and but_port in _ports(fd)):
            continue
        open_to_send = state in (_CONNECTED, _OTHER_HAS_CLOSED)
        (unacked,) = struct.unpack_from("I", info, _UNACKED_AT)
        (unsent,) = struct.unpack_from("I", info, _UNSENT_AT)
        carried += sum(struct.unpack_from("Q", info, at)[0] for at in (_ACKED_AT, _RECEIVED_AT))
        under_way = under_way or state == _CONNECTS or (open_to_send and unacked + unsent > 0)
    return Traffic(carried, under_way)


def _ports(fd: int) -> tuple[int, int]:
    """This side's port and the other's; 0 where there is none."""
    assert _libc is not None, "asked only where connections are read"
    found = []
    for ask in (_libc.getsockname, _libc.getpeername):
        address = ctypes.create_string_buffer(_ADDRESS_BYTES)
        length = ctypes.c_uint32(len(address))
        known = ask(fd, address, ctypes.byref(length)) == 0
        found.append(struct.unpack_from("!H", address, 2)[0] if known else 0)
    return found[0], found[1]


def others_work() -> bool:
    """Whether a thread of this process, but the one that asks, runs, or would run, or waits for a disk.

    It is at work if it is whenever it is looked at: one that wakes up, looks around and sleeps again is not.
    """
    at_work = _at_work()
    for _ in range(LOOKS - 1):
        if not at_work:
            return False
        time.sleep(BETWEEN_LOOKS_S)
        at_work &= _at_work()
    return bool(at_work)


def _at_work() -> set[str]:
    own = str(threading.get_native_id())
    found: set[str] = set()
    try:
        tasks = [name for name in os.listdir(_TASKS) if name != own]
    except OSError:
        return found
    for name in tasks:
        try:
            text = (_TASKS / name / "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        if text.rpartition(")")[2].split()[0] in "RD":
            found.add(name)
    return found


def others_processor_s() -> float:
    """Processor time of this process, without that of the thread that asks."""
    return time.process_time() - time.thread_time()
