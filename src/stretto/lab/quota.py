"""Processors: one control group for each host, by the `cpu` controller of version 1 or 2.

Within a group its processes are weighed against each other, and the group as a whole against other hosts.

A host with `cpus=0.5` may run for 5 ms in each period of 10 ms. The kernel's default period of 100 ms would
stop a process for up to 50 ms at a time, longer than many a collective takes; 10 ms is what the design fixes.
Writes only below the controller's mount.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import StrettoError
from stretto.lab.names import LabOwner
from stretto.processor.control_groups import MOUNTS

PERIOD_US = 10_000
MIN_CPUS = 0.1  # the kernel takes no quota below 1 ms
_REMOVE_S = 5.0  # assumed: a killed process leaves its group within milliseconds


@dataclass(frozen=True, slots=True)
class CpuController:
    """Where the `cpu` controller is, and its version."""

    root: Path
    version: int

    def group(self, name: str) -> Path:
        """Directory of a group, whether it exists or not."""
        return self.root / name


def find_controller() -> CpuController | None:
    """The mounted `cpu` controller: version 1 if it is there, else 2; None if neither is."""
    if (MOUNTS / "cpu" / "cpu.shares").exists():
        return CpuController(MOUNTS / "cpu", 1)
    return CpuController(MOUNTS, 2) if "cpu" in _words(MOUNTS / "cgroup.controllers") else None


def why_no_quota() -> str:
    """What to say to the user when there is no controller."""
    return (
        "no `cpu` control group controller is mounted: mount one (`mount -t cgroup -o cpu cgroup "
        "/sys/fs/cgroup/cpu`), or boot with the unified hierarchy, or leave --cpus out"
    )


def make_group(controller: CpuController, name: str, cpus: float | None) -> Path:
    """Make a group limited to `cpus` processors (None: no limit); returns the file that takes process ids.

    Raises StrettoError when the kernel refuses.
    """
    group = controller.group(name)
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
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
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
