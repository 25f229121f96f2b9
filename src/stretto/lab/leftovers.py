"""Ends every process of a host and removes what dead labs left behind. Touches only names of labs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from stretto.errors import StrettoError
from stretto.lab import network, quota, tools
from stretto.lab.names import LabOwner

_KILL_S = 5.0  # assumed: SIGKILL takes milliseconds unless a process sits in a broken device


def processes_in(namespace: str) -> list[int]:
    """Ids of the processes whose network is the named namespace; empty if there is none of that name."""
    if namespace not in network.namespaces():
        return []
    return [int(word) for word in tools.run_tool("ip", ["netns", "pids", namespace]).split()]


def kill_all(find: Callable[[], list[int]], what: str) -> None:
    """SIGKILL what `find` returns until it returns nothing: a killed process may have had children.

    Raises StrettoError if some are still there after 5 s.
    """
    deadline = time.monotonic() + _KILL_S
    while pids := [pid for pid in find() if pid != os.getpid()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise StrettoError(f"processes {pids} in {what} do not end, not even by SIGKILL")
        time.sleep(0.005)


def remove_host(namespace: str, controller: quota.CpuController | None) -> None:
    """End what runs in a host or a switch, and remove its namespace and control group, where they exist."""
    kill_all(lambda: processes_in(namespace), namespace)
    group: Path | None = controller.group(namespace) if controller else None
    if group is not None and group.exists():
        result = group
        # A program may have left the namespace (a lab in a lab) and still be in the group.
        kill_all(lambda: quota.members(result), str(result))
        quota.remove_group(result)
    network.remove(namespace)


def sweep() -> list[str]:
    """Remove what labs left whose owner is dead (killed with SIGKILL); returns the names removed."""
    controller = quota.find_controller()
    names = {*network.namespaces(), *(group.name for group in quota.lab_groups(controller))}
    dead = sorted(name for name in names if (owner := LabOwner.parse(name)) is not None and not owner.alive)
    for name in dead:
        remove_host(name, controller)
    return dead
