"""What the kernel says of this process: which cores it may use, and, by its control groups, for how long.

Linux, versions 1 and 2 of the `cpu` controller; elsewhere nothing is known. Reads only.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
MOUNTS = Path("/sys/fs/cgroup")


def usable_cores() -> list[int]:
    """Cores that this process may use; all where the system does not say it."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def processor_quota(proc: Path = PROC, mounts: Path = MOUNTS) -> tuple[float, float] | None:
    """(period in microseconds, processor time that the process may have in one, in microseconds): the
    tightest limit, by `cpu.max` or `cpu.cfs_quota_us`, of its group and of those that have it, as far as the
    mount shows them (in a container, whose own group is the mount's top, that one). None without a limit."""
    try:
        root, path = _place(proc, mounts)
    except (OSError, ValueError):
        return None
    group = root / path
    limits = [_limit(directory) for directory in (group, *group.parents) if directory.is_relative_to(root)]
    known = [limit for limit in limits if limit is not None]
    return min(known, key=lambda limit: limit[1] / limit[0], default=None)


def own_share(threads: int, proc: Path = PROC, mounts: Path = MOUNTS) -> float:
    """The share of a processor that each of so many threads of this process has, by its quota, if all of them
    always compute: at most 1."""
    quota = processor_quota(proc, mounts)
    return 1.0 if quota is None else min(1.0, quota[1] / quota[0] / threads)


def _place(proc: Path, mounts: Path) -> tuple[Path, str]:
    """(the `cpu` controller's mount, the path of this process's group below it: "" at the top)."""
    unified = (mounts, "")
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return mounts / controllers, path.lstrip("/")
        if not controllers:
            unified = (mounts, path.lstrip("/"))
    return unified


def _limit(group: Path) -> tuple[float, float] | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
            return (float(period), float(quota)) if quota != "max" else None
        quota_us = float((group / "cpu.cfs_quota_us").read_text())
        return (float((group / "cpu.cfs_period_us").read_text()), quota_us) if quota_us > 0 else None
    except (OSError, ValueError):
        return None


def host() -> tuple[str, str]:
    """Names the host of this process: the machine since it booted, and its network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/net")
    except OSError:
        return (os.uname().nodename, "")
    return (boot, space)
