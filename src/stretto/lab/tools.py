"""Runs `ip` and `tc` and says what is missing; the lab's only door to iproute2.

The lab drives iproute2's own commands: they are what a user types to look into a running lab, they
put namespaces where `ip netns list` shows them, and their error messages are the ones that searches find.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from stretto.errors import StrettoError

# Root's programs are often not on the PATH of a shell that `su` or `docker exec` opened.
_SYSTEM_DIRS = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
_TIMEOUT_S = 30.0  # assumed: netlink answers in milliseconds; longer means that the kernel is stuck

INSTALL = "install iproute2 (`apt install iproute2`, `dnf install iproute-tc`)"


def find_tool(name: str) -> str | None:
    """Path of a program on PATH or in the system directories; None if it is in neither."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_SYSTEM_DIRS))


def missing() -> list[str]:
    """What this machine lacks to run a lab at all, each with what to do; empty if nothing."""
    if sys.platform != "linux":
        return [f"network namespaces exist only on Linux, and this is {sys.platform}: use a Linux machine"]
    lacking = []
    if os.geteuid() != 0:
        lacking.append("the lab needs root to make network namespaces: run it with sudo, or as root")
    lacking += [f"`{tool}` is not installed: {INSTALL}" for tool in ("ip", "tc") if find_tool(tool) is None]
    return lacking


def run_tool(name: str, arguments: Sequence[str], batch: Sequence[str] = ()) -> str:
    """Run `ip` or `tc` to its end and return what it printed.

    `batch` holds command lines for `-batch -`; one process then does them all. Raises StrettoError with the
    command and the tool's own words when it fails.
    """
    path = find_tool(name)
    if path is None:
        raise StrettoError(f"`{name}` is not installed: {INSTALL}")
    try:
        done = subprocess.run(
            [path, *arguments],
            input="".join(f"{line}\n" for line in batch),
            text=True,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StrettoError(
            f"`{name} {' '.join(arguments)}` gave no answer in {_TIMEOUT_S:.0f} s: is the machine overloaded?"
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        hint = ""
        if "Operation not permitted" in said or "Permission denied" in said:
            hint = " (root in a container needs more rights: start it with --privileged)"
        doing = "; ".join(batch) if batch else " ".join(arguments)
        raise StrettoError(f"`{name}` failed: {said}{hint}\n  while doing: {doing}")
    return done.stdout
