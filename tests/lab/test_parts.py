"""The parts of the lab that need neither root nor a network: rates, names, output, quotas, refusals."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from stretto.errors import StrettoError, UsageError
from stretto.lab import Lab, network, quota
from stretto.lab.commands import Printer, Statuses, exit_status
from stretto.lab.network import MTU_BYTES, Bucket, LabOwner, parse_rate, start_ticks
from stretto.lab.quota import CpuController


@pytest.mark.parametrize(
    ("text", "rate_bits_per_s"),
    [
        ("100mbit", 100_000_000),
        ("2.5Gbit", 2_500_000_000),
        (" 64 kbit ", 64_000),
        ("unlimited", None),
    ],
)
def test_rates_are_read_as_tc_reads_them(text: str, rate_bits_per_s: int | None) -> None:
    assert parse_rate(text) == rate_bits_per_s


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0mbit", "slowest link is 1kbit"),
        ("fast", "expected a number and kbit, mbit or gbit"),
        ("100", "expected a number"),
        ("-5mbit", "expected a number"),
        ("100mbps", "expected a number and kbit, mbit or gbit"),
        ("", "expected a number"),
    ],
)
def test_wrong_rates_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_rate(text)


@pytest.mark.parametrize("rate_bits_per_s", [10**6, 10**8, 10**9, 10**10, 10**11])
def test_the_bucket_holds_the_largest_packet(rate_bits_per_s: int) -> None:
    bucket = Bucket.of(rate_bits_per_s)
    assert MTU_BYTES < bucket.gso_max_bytes < bucket.burst_bytes
    # What an idle link lets through at once is a quarter of a millisecond, or a packet or two.
    assert bucket.burst_bytes <= max(rate_bits_per_s / 8 * 0.25e-3 + 513, 3 * MTU_BYTES)


def test_names_carry_the_owner() -> None:
    owner = LabOwner.mine()
    assert LabOwner.parse(owner.host(3)) == LabOwner.parse(owner.switch) == owner
    assert owner.alive
    assert owner.pid == os.getpid()
    assert LabOwner.mine() != owner
    assert [
        LabOwner.parse(name) for name in ("stretto", "stretto-1-h0", "x-1-2-3-h0", "stretto-1-2-3-h0/x")
    ] == [None] * 4


def test_a_reused_process_id_is_not_taken_for_the_owner() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert not LabOwner(os.getpid(), ticks - 1, 0).alive


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(process.pid) is None
    process.wait()


def printed(said: bytes, target: TextIO, name: str = "host 2", kept: list[str] | None = None) -> Printer:
    """A printer that has read all that a rank said."""
    printer = Printer(io.BytesIO(said), target, name, kept)
    printer.join(10)
    return printer


def test_lines_are_whole_and_bear_the_host() -> None:
    stream = io.StringIO()
    assert printed(b"one\n\n10 %\r20 %\r\nhalf", stream).error is None
    printed("née\n".encode() + b"\xff\n", stream, "host 1 rank 3")
    assert stream.getvalue() == (
        "[host 2] one\n[host 2] \n[host 2] 10 %\r20 %\r\n[host 2] half\n"
        "[host 1 rank 3] née\n[host 1 rank 3] \ufffd\n"
    )
    kept: list[str] = []
    printed(b"one\ntwo", stream, kept=kept)
    assert kept == ["[host 2] one\n", "[host 2] two\n"]
    stream.close()
    assert "closed" in str(printed(b"one\n" * 3, stream).error)


@pytest.mark.parametrize(
    ("version", "files"),
    [(1, {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "15000"}), (2, {"cpu.max": "15000 10000"})],
)
def test_quota_files(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    assert quota.make_group(CpuController(tmp_path, version), "g", 1.5) == tmp_path / "g" / "cgroup.procs"
    assert {file.name: file.read_text() for file in (tmp_path / "g").iterdir()} == files
    assert (tmp_path / "cgroup.subtree_control").read_text() == ("+cpu" if version == 2 else "memory")


def test_a_quota_that_the_kernel_refuses_is_explained(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"cannot limit processors with .*g: .*leave --cpus out"):
        quota.make_group(CpuController(tmp_path / "absent", 1), "g", cpus=1.0)


def test_netem_hangs_below_the_bucket() -> None:
    bucket = Bucket.of(10**8)
    assert network.qdisc_lines("h0", bucket, delay_ms=2.5) == [
        f"qdisc add dev h0 root handle 1: tbf {bucket.tbf()}",
        "qdisc add dev h0 parent 1:1 handle 2: netem delay 2.5ms limit 1000000",
    ]
    assert network.qdisc_lines("h0", None, delay_ms=1) == [
        "qdisc add dev h0 root handle 2: netem delay 1ms limit 1000000"
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"hosts": 0}, "--hosts 0: a lab has 1 to 254 hosts"),
        ({"hosts": 300}, "--hosts 300"),
        ({"rate": "0kbit"}, "--rate"),
        ({"cpus": 0.0}, "--cpus 0: a host has 0.1 processors at least"),
        ({"cpus": 10_000.0}, "at most, as many as this machine gives"),
        ({"delay_ms": -1.0}, "--delay -1"),
        ({"ranks_per_host": 0}, "--ranks-per-host 0: a host has 1 rank or more"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Lab(**settings)  # type: ignore[arg-type]


def test_what_the_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network, "find_tool", lambda name: None if name == "tc" else f"/sbin/{name}")
    with pytest.raises(StrettoError) as caught, Lab(hosts=1):
        pass
    assert "needs root" in str(caught.value)
    assert "`tc` is not installed: install iproute2" in str(caught.value)
    assert caught.value.exit_status == 1


def test_a_lab_that_is_not_entered_runs_nothing() -> None:
    with pytest.raises(StrettoError, match=r"inside `with Lab"):
        Lab(hosts=1).popen(0, ["true"])


def test_ranks_fill_hosts_in_order_as_torchrun_numbers_them() -> None:
    lab = Lab(hosts=2, ranks_per_host=3)
    told = [lab.environment(host, local_rank=local) for host in range(2) for local in range(3)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [tuple(int(one[name]) for name in names) for one in told] == [
        (rank, 6, rank % 3, 3) for rank in range(6)
    ]
    assert lab.name_of(4) == "host 1 rank 4"
    assert Lab(hosts=2).name_of(1) == "host 1"


def test_statuses_are_a_shells() -> None:
    assert (exit_status(-15), exit_status(3), exit_status(0)) == (143, 3, 0)
    statuses = Statuses([7, 0, 143])
    assert statuses.exit_status == 0  # no one was noted as failed
    statuses.first_failed = 2
    assert statuses.exit_status == 143
    statuses.stopped_by = 2
    assert statuses.exit_status == 130
