"""Names of what the lab leaves in the kernel, which distinguish leftovers of dead owners from live labs.

A name is `stretto-<pid>-<start>-<serial>-<part>`: the owner's process id, the time it started (in
clock ticks since boot, so that a reused id is not taken for the owner), the number of the lab in that
process, and `sw` for the switch or `h0`, `h1`, ... for the hosts. Touches /proc only to read.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"^stretto-(\d+)-(\d+)-(\d+)-(sw|h\d+)$")
_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class LabOwner:
    """The process that a lab belongs to, and which of its labs."""

    pid: int
    start_ticks: int
    serial: int

    @staticmethod
    def mine() -> LabOwner:
        """A fresh owner for one lab of this process."""
        pid = os.getpid()
        ticks = start_ticks(pid)
        assert ticks is not None, "this process is in /proc"
        return LabOwner(pid, ticks, next(_serials))

    @staticmethod
    def parse(name: str) -> LabOwner | None:
        """The owner that a name carries; None if the name is not of a lab."""
        match = _NAME.match(name)
        return LabOwner(int(match[1]), int(match[2]), int(match[3])) if match else None

    @property
    def alive(self) -> bool:
        """Whether the very process that made the lab still runs."""
        return start_ticks(self.pid) == self.start_ticks

    @property
    def switch(self) -> str:
        """Name of the namespace that holds the bridge."""
        return f"stretto-{self.pid}-{self.start_ticks}-{self.serial}-sw"

    def host(self, index: int) -> str:
        """Name of a host's namespace and of its control group."""
        return f"stretto-{self.pid}-{self.start_ticks}-{self.serial}-h{index}"


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold blanks and parentheses itself.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
