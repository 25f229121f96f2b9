"""The ranks of our launcher as forks of one process that has imported what they need: imports are paid once,
while the launcher looks at settings and makes tokens.

    1. The launcher starts a process with the ranks' own command, and goes on (`preloaded`).
    2. That process imports, with one thread and no computation, and says when it is ready (`become_rank`).
    3. For each rank it forks a process that forks the rank and ends. The rank becomes a child of the
       launcher, which adopts orphans: signals and exit statuses are as of processes that it started.
    4. The rank takes the environment that it is sent, and goes on with the command.

Only Linux lets a process adopt; elsewhere the launcher starts ranks that import by themselves, and so it does
where ranks may compute on accelerators, whose libraries need not work in forks. Loads nothing of PyTorch in
the launcher.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from stretto.config import HuggingFaceSettings, TrainSettings
from stretto.processor.control_groups import usable_cores
from stretto.train.failure import PRELOAD, is_worker

PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): a process gets the children of descendants that end."""
MODULES = ("stretto.train.launch", "stretto.train.trainer")
"""What every rank imports."""
READY = "ready"
DEVICES = Path("/dev")
DRIVERS = {"NVIDIA": "nvidia[0-9]*", "AMD": "kfd", "Ascend": "davinci[0-9]*"}
"""Makers of accelerators, and the files of devices that their drivers make on Linux."""


def drivers() -> list[str]:
    """The makers of accelerators that this machine has a driver for."""
    return [maker for maker, pattern in DRIVERS.items() if any(DEVICES.glob(pattern))]


def threads(wanted: int | None, local_size: int) -> int:
    """Threads for each rank: `training.threads_per_rank`, else OMP_NUM_THREADS, else cores over ranks."""
    if wanted is not None:
        return wanted
    count = os.environ.get("OMP_NUM_THREADS", "")
    if count.isdigit() and int(count) > 0:
        return int(count)
    return max(1, len(usable_cores()) // local_size)


# The launcher.


class Forked:
    """A rank, as `subprocess.Popen` has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises TimeoutExpired after `timeout` seconds."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until_s is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("stretto", timeout or 0.0)
            time.sleep(0.01)
        return status


LOST_S = 60.0
"""A rank that does not say within so long that it is there was killed before. Assumed: forks take
milliseconds."""


class Preloaded:
    """The process of which ranks are forked, from when it is started until `close`, or the last of them."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], names: Sequence[str], ranks: int
    ) -> None:
        """command: of the ranks. names: of modules to import besides `MODULES`; those of their members behind
        a colon. ranks: how many there will be."""
        self._left = ranks
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment, PRELOAD: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the launcher's
            )
        self._replies = self._socket.makefile("r", encoding="utf-8")
        self._send(names)

    def wait(self) -> bool:
        """Whether it has imported all, for which this waits; False when it ended before."""
        return self._reply() == READY

    def fork(self, environment: Mapping[str, str]) -> Forked | None:
        """A rank with this environment; None where there is none to be had."""
        self._socket.settimeout(LOST_S)
        self._send(dict(environment))
        pid = self._reply()
        self._left -= 1
        if not self._left:  # what it has imported it need not keep
            self.close()
        return Forked(int(pid)) if pid else None

    def close(self) -> None:
        """End the process, and no rank."""
        self._socket.close()
        self._replies.close()
        self._process.kill()
        self._process.wait()

    def _send(self, what: object) -> None:
        with suppress(OSError):  # it is gone, which the reply shows
            self._socket.sendall(json.dumps(what).encode() + b"\n")

    def _reply(self) -> str:
        """A line; "" when the process is gone."""
        try:
            return self._replies.readline().strip()
        except (OSError, ValueError):  # the latter once it is closed
            return ""


@contextmanager
def preloaded(
    settings: TrainSettings, command: Sequence[str], max_restarts: int = 0
) -> Iterator[Preloaded | None]:
    """Step 1, for as long as the context lasts; None where a process is a rank itself, and where the system
    does not let it adopt ranks. command: of the ranks. max_restarts: how often all may be started again."""
    ranks = settings.parallel.world
    devices = settings.training.device != "cpu" and drivers()
    if ranks == 1 or is_worker() or devices or not _adopt(True):
        yield None
        return
    model = settings.model
    names = [f"transformers:{model.architecture}"] if isinstance(model, HuggingFaceSettings) else []
    count = str(threads(settings.training.threads_per_rank, ranks))
    process = Preloaded(command, {"OMP_NUM_THREADS": count}, names, ranks * (1 + max_restarts))
    try:
        yield process
    finally:
        process.close()
        _adopt(False)


def _adopt(wanted: bool) -> bool:
    """Get the children of descendants that end from now on, or no more; whether the system does it."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) == 0)


# The process of which ranks are forked, and the ranks.


def become_rank() -> None:
    """Steps 2 to 4: returns in ranks alone. The process itself ends when its launcher is gone."""
    with socket.socket(fileno=int(os.environ.pop(PRELOAD))) as ours, ours.makefile("r") as lines:
        gc.disable()  # nothing that is imported is garbage
        for name in (*MODULES, *json.loads(lines.readline() or "[]")):
            module, _, member = name.partition(":")
            with suppress(Exception):  # the rank that needs it says it better
                getattr(import_module(module), member or "__name__")
        gc.freeze()
        with suppress(OSError):
            ours.sendall(f"{READY}\n".encode())
        for line in lines:
            middle = os.fork()
            if middle:
                if os.waitpid(middle, 0)[1]:  # no rank could be forked
                    ours.sendall(b"\n")
                continue
            middle = os.getpid()
            try:
                rank = os.fork()
            except OSError:
                os._exit(1)
            if rank:
                os._exit(0)
            os.setsid()
            while os.getppid() == middle:
                time.sleep(0.001)
            os.environ.clear()
            os.environ.update(json.loads(line))
            ours.sendall(f"{os.getpid()}\n".encode())
            gc.enable()
            return
    os._exit(0)
