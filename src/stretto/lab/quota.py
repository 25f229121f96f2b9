"""Processors: one control group for each host, by the `cpu` controller of version 1 or 2; ends of processes.

A host with `cpus=0.5` may run for 5 ms in each period of 10 ms. The kernel's default period of 100 ms would
stop a process for up to 50 ms at a time, longer than many a collective takes. What dead labs left is removed:
only names of labs are touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import StrettoError
from stretto.lab import network
from stretto.lab.network import LabOwner
from stretto.processor.control_groups import MOUNTS

PERIOD_US = 10_000
NO_QUOTA = (
    "no `cpu` control group controller is mounted: mount one (`mount -t cgroup -o cpu cgroup "
    "/sys/fs/cgroup/cpu`), or boot with the unified hierarchy, or leave --cpus out"
)
MIN_CPUS = 0.1  # the kernel takes no quota below 1 ms
_REMOVE_S = 5.0  # assumed: a killed process leaves its group within milliseconds


@dataclass(frozen=True, slots=True)
class CpuController:
    """Where the `cpu` controller is, with its groups below, and its version."""

    root: Path
    version: int


def find_controller() -> CpuController | None:
    """The mounted `cpu` controller: version 1 if it is there, else 2; None if neither is."""
    if (MOUNTS / "cpu" / "cpu.shares").exists():
        return CpuController(MOUNTS / "cpu", 1)
    return CpuController(MOUNTS, 2) if "cpu" in _words(MOUNTS / "cgroup.controllers") else None


def make_group(controller: CpuController, name: str, cpus: float | None) -> Path:
    """Make a group limited to `cpus` processors (None: no limit); returns the file that takes process ids.
    Raises StrettoError when the kernel refuses."""
    group = controller.root / name
    try:
        if controller.version == 2 and "cpu" not in _words(controller.root / "cgroup.subtree_control"):
            (controller.root / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        if cpus is None:
            return group / "cgroup.procs"
        quota_us = round(cpus * PERIOD_US)
        if controller.version == 2:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EBUSY:
            why += ": the container's own processes sit at the top of its hierarchy; use the host's"
        raise StrettoError(f"cannot limit processors with {group}: {why}; or leave --cpus out") from error
    return group / "cgroup.procs"


def members(group: Path) -> list[int]:
    """Ids of the processes in a group; empty if the group is gone."""
    return [int(word) for word in _words(group / "cgroup.procs")]


def remove_group(group: Path) -> None:
    """Delete a group whose processes were killed. Raises StrettoError if it stays busy for 5 s."""
    deadline = time.monotonic() + _REMOVE_S
    while group.exists():
        try:
            group.rmdir()
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOENT) or time.monotonic() > deadline:
                raise StrettoError(
                    f"cannot remove the control group {group} ({error.strerror}); "
                    f"processes in it: {members(group) or 'none'}; end them and run `stretto lab check`"
                ) from error
            time.sleep(0.01)


def lab_groups(controller: CpuController | None) -> list[Path]:
    """All groups that a lab made, of this process or another."""
    if controller is None:
        return []
    with os.scandir(controller.root) as entries:
        return sorted(Path(entry.path) for entry in entries if LabOwner.parse(entry.name) is not None)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


_KILL_S = 5.0  # assumed: SIGKILL takes milliseconds unless a process sits in a broken device


def processes_in(namespace: str) -> list[int]:
    """Ids of the processes whose network is the named namespace; empty if there is none of that name."""
    if namespace not in network.namespaces():
        return []
    return [int(word) for word in network.run_tool("ip", ["netns", "pids", namespace]).split()]


def kill_all(find: Callable[[], list[int]], what: str) -> None:
    """SIGKILL what `find` returns until it returns nothing: a killed process may have had children. Raises
    StrettoError if some are still there after 5 s."""
    deadline = time.monotonic() + _KILL_S
    while pids := [pid for pid in find() if pid != os.getpid()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise StrettoError(f"processes {pids} in {what} do not end, not even by SIGKILL")
        time.sleep(0.005)


def remove_host(namespace: str, controller: CpuController | None) -> None:
    """End what runs in a host or a switch, and remove its namespace and control group, where they exist."""
    kill_all(lambda: processes_in(namespace), namespace)
    if controller is not None and (group := controller.root / namespace).exists():
        # A program may have left the namespace (a lab in a lab) and still be in the group.
        kill_all(lambda: members(group), str(group))
        remove_group(group)
    network.remove(namespace)


def sweep() -> list[str]:
    """Remove what labs left whose owner is dead (killed with SIGKILL); returns the names removed."""
    controller = find_controller()
    names = {*network.namespaces(), *(group.name for group in lab_groups(controller))}
    dead = sorted(name for name in names if (owner := LabOwner.parse(name)) is not None and not owner.alive)
    for name in dead:
        remove_host(name, controller)
    return dead
