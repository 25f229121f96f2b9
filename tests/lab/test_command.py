"""`stretto lab run` from outside: output, statuses, and that nothing is left however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.lab import network, quota
from stretto.lab.network import LabOwner, start_ticks

STRETTO = [sys.executable, "-m", "stretto"]


def lab_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STRETTO, "lab", "run", *arguments], capture_output=True, text=True, timeout=60)


def owned_by(pid: int) -> list[str]:
    groups = [group.name for group in quota.lab_groups(quota.find_controller())]
    owners = [(name, LabOwner.parse(name)) for name in [*network.namespaces(), *groups]]
    return [name for name, owner in owners if owner is not None and owner.pid == pid]


def heed_signals() -> None:
    """Tests that run in the background may have been told to ignore these, and what they start would, too."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start_sleepers(tmp_path: Path, *options: str, trap: str = "") -> subprocess.Popen[bytes]:
    """A lab whose two hosts, and a child of each, sleep; returns when they do."""
    script = f"{trap} sleep 97 & touch {tmp_path}/up-$RANK; wait; wait"
    process = subprocess.Popen(
        [*STRETTO, "lab", "run", "--rate", "100mbit", *options, "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )
    give_up_s = time.monotonic() + 20
    while not all((tmp_path / f"up-{rank}").exists() for rank in range(2)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no command given: for example"),
        (("--hosts", "0", "--", "true"), "--hosts 0"),
        (("--rate", "0mbit", "--", "true"), "slowest link"),
        (("--grace", "-1", "--", "true"), "--grace -1"),
        (("--output", "x", "--quiet-others", "--", "true"), "leave one out"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], says: str) -> None:
    done = lab_run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


pytest_lab = [pytest.mark.lab, pytest.mark.usefixtures("machine")]


class TestRuns:
    pytestmark = pytest_lab

    def test_lines_bear_the_host_and_the_streams_stay_apart(self) -> None:
        done = lab_run("--hosts", "3", "--", "sh", "-c", "echo out $RANK; echo err $RANK >&2")
        assert done.returncode == 0
        assert sorted(done.stdout.splitlines()) == [f"[host {i}] out {i}" for i in range(3)]
        assert sorted(done.stderr.splitlines()) == [f"[host {i}] err {i}" for i in range(3)]

    def test_output_goes_to_files(self, tmp_path: Path) -> None:
        done = lab_run("--output", str(tmp_path / "logs"), "--", "sh", "-c", "echo out $RANK; echo err >&2")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert [(tmp_path / "logs" / f"host-{i}.log").read_text() for i in range(2)] == [
            "out 0\nerr\n",
            "out 1\nerr\n",
        ]

    def test_quiet_others_speak_only_when_they_fail(self) -> None:
        script = "echo I am $RANK; exit $((RANK == 2 ? 5 : 0))"
        done = lab_run("--hosts", "3", "--quiet-others", "--", "sh", "-c", script)
        assert done.returncode == 5
        assert done.stdout == "[host 0] I am 0\n"
        assert "[host 2] I am 2\n" in done.stderr
        assert "I am 1" not in done.stderr

    def test_the_first_failure_is_the_status_and_the_others_are_ended(self) -> None:
        begin_s = time.monotonic()
        done = lab_run("--grace", "0.2", "--", "sh", "-c", "test $RANK = 0 || exit 9; sleep 60")
        assert done.returncode == 9
        assert "host 1 failed first, with status 9" in done.stderr
        assert time.monotonic() - begin_s < 15

    def test_a_signal_becomes_a_status(self) -> None:
        assert lab_run("--hosts", "1", "--", "sh", "-c", "kill -SEGV $$").returncode == 128 + signal.SIGSEGV

    def test_a_closed_output_ends_the_run(self) -> None:
        process = subprocess.Popen([*STRETTO, "lab", "run", "--", "yes"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(timeout=20) == 1, "as of any command whose reader leaves"
        assert owned_by(process.pid) == []


class TestEnds:
    pytestmark = pytest_lab

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_stop_signal_cleans_up(self, tmp_path: Path, number: signal.Signals) -> None:
        cpus = ("--cpus", "0.5") if quota.find_controller() is not None else ()
        process = start_sleepers(tmp_path, *cpus)
        names = owned_by(process.pid)
        assert len(names) == (5 if cpus else 3)
        process.send_signal(number)
        _, complaint = process.communicate(timeout=20)
        assert process.returncode == 128 + number, complaint
        assert f"stopped by {number.name}" in complaint.decode()
        assert b"Traceback" not in complaint
        assert owned_by(process.pid) == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_a_program_that_is_told_to_end_removes_its_lab(self, number: signal.Signals) -> None:
        """As the benches use it: no handler of their own."""
        program = (
            # A signal that the tests themselves ignore, as under `nohup`, would stay ignored.
            f"import signal; signal.signal({number.value}, signal.SIG_DFL)\n"
            "from stretto.lab import Lab\n"
            "with Lab(hosts=2, rate='100mbit') as lab:\n"
            "    lab.run(['sh', '-c', 'echo ready; sleep 100'])\n"
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        assert owned_by(process.pid)
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
        assert owned_by(process.pid) == []

    def test_a_second_ctrl_c_does_not_wait(self, tmp_path: Path) -> None:
        process = start_sleepers(tmp_path, trap="trap '' INT;")
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None  # the hosts ignore it, and have 30 s
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, complaint = process.communicate(timeout=10)
        assert process.returncode == 128 + signal.SIGINT, complaint
        assert owned_by(process.pid) == []

    def test_a_killed_lab_takes_its_commands_along_and_is_swept(self, tmp_path: Path) -> None:
        cpus = ("--cpus", "0.5") if quota.find_controller() is not None else ()
        process = start_sleepers(tmp_path, *cpus)
        host = next(name for name in owned_by(process.pid) if name.endswith("-h0"))
        inside = quota.processes_in(host)
        assert len(inside) == 2  # the command, and the child that it started
        process.kill()
        process.wait()
        quota.sweep()
        assert owned_by(process.pid) == []
        assert [start_ticks(pid) for pid in inside] == [None, None]

    def test_a_live_lab_is_not_swept(self, tmp_path: Path) -> None:
        process = start_sleepers(tmp_path)
        names = owned_by(process.pid)
        assert not set(quota.sweep()) & set(names)
        assert owned_by(process.pid) == names
        process.terminate()
        process.communicate(timeout=20)
