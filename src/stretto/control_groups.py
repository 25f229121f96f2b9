"""What the kernel's control groups say of this process: where it is, and how much processor time it may have.

Linux, versions 1 and 2 of the `cpu` controller; elsewhere nothing is known. Reads only.
"""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
MOUNTS = Path("/sys/fs/cgroup")


def own_group(proc: Path = PROC, mounts: Path = MOUNTS) -> Path | None:
    """The directory of the control group that weighs this process's processor time; None for the group that
    holds all. Raises OSError or ValueError where the kernel does not tell."""
    unified = None
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return mounts / controllers / path.lstrip("/") if path != "/" else None
        if not controllers and path != "/":
            unified = mounts / path.lstrip("/")
    return unified


def processor_quota(proc: Path = PROC, mounts: Path = MOUNTS) -> tuple[float, float] | None:
    """(period in microseconds, processor time that the process's group may have in one, in microseconds):
    what `cpu.max`, or `cpu.cfs_quota_us`, says of the group itself. None without a limit."""
    try:
        group = own_group(proc, mounts)
        if group is None:
            return None
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
            return (float(period), float(quota)) if quota != "max" else None
        quota_us = float((group / "cpu.cfs_quota_us").read_text())
        return (float((group / "cpu.cfs_period_us").read_text()), quota_us) if quota_us > 0 else None
    except (OSError, ValueError):
        return None
