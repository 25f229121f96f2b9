"""The small programs that tests run inside hosts to measure them; standard library only.

probe.py receive PORT               take one connection, read to its end, answer one byte
probe.py send ADDRESS PORT BYTES    send that much, wait for the answer, print the seconds it took
probe.py exchange ADDRESS PORT BYTES   the same, with as much coming back at the same time
probe.py echo PORT                  the partner of `exchange`
probe.py spin SECONDS               use that much processor time, print the seconds it took
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable

_CHUNK_BYTES = 1 << 18
_CONNECT_S = 10.0  # assumed: the partner is a Python program that starts at the same time


def receive(port: str) -> None:
    """Read one connection to its end and answer."""
    with socket.create_server(("", int(port))) as server:
        connection, _ = server.accept()
    with connection:
        _drain(connection)
        connection.sendall(b".")


def echo(port: str) -> None:
    """Send back what one connection brings, without waiting for its end."""
    with socket.create_server(("", int(port))) as server:
        connection, _ = server.accept()
    with connection:
        while chunk := connection.recv(_CHUNK_BYTES):
            connection.sendall(chunk)


def send(address: str, port: str, count_bytes: str) -> None:
    """Send, wait for the answer, print the seconds."""
    with _connect(address, int(port)) as connection:
        begin_s = time.perf_counter()
        _push(connection, int(count_bytes))
        connection.recv(1)
        print(time.perf_counter() - begin_s)


def exchange(address: str, port: str, count_bytes: str) -> None:
    """Send to an `echo` and read at the same time; print the seconds until the last byte is back."""
    with _connect(address, int(port)) as connection:
        begin_s = time.perf_counter()
        pushing = threading.Thread(target=_push, args=(connection, int(count_bytes)))
        pushing.start()
        _drain(connection)
        print(time.perf_counter() - begin_s)
        pushing.join()


def spin(seconds: str) -> None:
    """Use processor time, print wall-clock time."""
    begin_s, end_s = time.perf_counter(), time.process_time() + float(seconds)
    while time.process_time() < end_s:
        pass
    print(time.perf_counter() - begin_s)


def _connect(address: str, port: int) -> socket.socket:
    give_up_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.02)


def _push(connection: socket.socket, count_bytes: int) -> None:
    chunk = bytes(_CHUNK_BYTES)
    for start in range(0, count_bytes, _CHUNK_BYTES):
        connection.sendall(chunk[: count_bytes - start])
    connection.shutdown(socket.SHUT_WR)


def _drain(connection: socket.socket) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    while connection.recv_into(buffer):
        pass


PROGRAMS: dict[str, Callable[..., None]] = {
    "receive": receive,
    "echo": echo,
    "send": send,
    "exchange": exchange,
    "spin": spin,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
