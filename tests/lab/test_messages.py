"""Messages between hosts as they are measured, against a clock: when they have arrived."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from stretto.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.quiet, pytest.mark.usefixtures("machine")]

SIZES = (2**18, 2**21, 2**23)
"""Bytes: what a socket takes over at once, and what is more than it takes."""

RANKS = f"""
import json, time
import torch, torch.distributed as dist
from stretto.measure.messages import measure_links

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, told = dist.get_rank(), torch.zeros(1)
found = measure_links([(0, 1)], torch.device("cpu"))
rows = []
for nbytes in {SIZES}:
    payload = torch.zeros(nbytes // 4)
    for _ in range(2):
        dist.barrier()
        if rank == 0:
            begin = time.perf_counter()
            dist.send(payload, 1)
            dist.recv(told, 1)
            rows.append((nbytes, time.perf_counter() - begin))
        else:
            dist.recv(payload, 0)
            dist.send(told, 0)
if rank == 0:
    link = found[0, 1].link
    print(json.dumps([link.bytes_per_us, link.latency_us, rows]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("rate", "bytes_per_us"), [pytest.param("50mbit", 6.25, marks=pytest.mark.slow), ("200mbit", 25.0)]
)
def test_a_message_takes_its_time(rate: str, bytes_per_us: float) -> None:
    with Lab(hosts=2, rate=rate) as lab:
        ranks = [lab.popen(host, [sys.executable, "-c", RANKS], stdout=subprocess.PIPE) for host in (0, 1)]
        said, _ = ranks[0].communicate(timeout=120)
        assert [process.wait(timeout=20) for process in ranks] == [0, 0]
    found_per_us, latency_us, rows = json.loads(said)
    assert found_per_us == pytest.approx(bytes_per_us, rel=0.06)
    for nbytes, there_s in rows:
        assert 1e6 * there_s == pytest.approx(latency_us + nbytes / found_per_us, rel=0.1, abs=5000)
