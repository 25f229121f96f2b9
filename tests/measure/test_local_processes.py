"""Processes that are started to measure between: they end with who started them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ASKER = """
import stretto.measure.local_processes as local
from stretto.ir.mesh import Mesh
from stretto.price.shared import WantedCollective

wanted = [WantedCollective("tp", "all_reduce", (2**20,) * 50, "float32")]
local.measure_between(Mesh((("tp", 2),)), wanted, link=True)
"""


def measuring(parent: int) -> list[int]:
    """Processes that measure for this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            of = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if of == parent and b"stretto.measure.local_processes" in words:
            found.append(int(path.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_none_is_left_when_who_asked_is_gone(number: signal.Signals) -> None:
    asker = subprocess.Popen([sys.executable, "-c", ASKER], env={**os.environ, "OMP_NUM_THREADS": "1"})
    until_s = time.monotonic() + 60
    while len(started := measuring(asker.pid)) < 2:
        assert asker.poll() is None
        assert time.monotonic() < until_s
        time.sleep(0.05)
    asker.send_signal(number)
    asker.wait(30)
    until_s = time.monotonic() + 100  # while they load PyTorch they do not listen
    while left := [pid for pid in started if Path(f"/proc/{pid}/cmdline").exists()]:
        assert time.monotonic() < until_s, f"{left} compute for no one"
        time.sleep(0.05)
