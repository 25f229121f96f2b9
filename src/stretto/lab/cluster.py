"""`Lab`: an emulated cluster on this machine, from its making to its removal; what this machine can emulate.

    with Lab(hosts=2, rate="100mbit", cpus=0.5) as lab:
        statuses = lab.run(["python", "train.py"])

It needs root. Nothing that it made outlives the `with`, whatever happens inside; what a killed lab left, the
next one sweeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from stretto.errors import StrettoError, UsageError
from stretto.lab import enter, network, quota
from stretto.lab.commands import (
    Printer,
    Statuses,
    blocked,
    ending_by_exit,
    signal_group,
    wait_for,
)
from stretto.lab.network import LabOwner
from stretto.processor.control_groups import usable_cores

MASTER_PORT = 29500  # torchrun's default; free in every lab, since each has its own network
ALONE = "STRETTO_ALONE"  # as `stretto.backend.gloo_adapter` reads it, which loads PyTorch
_Target = int | IO[bytes] | None


@dataclass(eq=False)
class Lab:
    """Hosts on this machine, joined by links of a given rate.

    hosts: number of hosts, 1 to 254. rate: rate of each link in each direction, as `tc` writes it
    (`100mbit`), or `unlimited`. cpus: processors of each host, None for no limit. delay_ms: one-way delay
    between any two hosts, which needs the kernel's netem. pin: keep host i on core i modulo the
    number of cores. ranks_per_host: how often each host runs a command; ranks of a host share its link, its
    processors and its core, and reach one another without the link.

    Raises UsageError for a wrong setting when made, StrettoError when entered on a machine that cannot do it.
    """

    hosts: int = 2
    rate: str = "unlimited"
    cpus: float | None = None
    _: KW_ONLY
    delay_ms: float = 0.0
    pin: bool = False
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        self.cores = usable_cores()
        if not 1 <= self.hosts <= network.MAX_HOSTS:
            raise UsageError(f"--hosts {self.hosts}: a lab has 1 to {network.MAX_HOSTS} hosts")
        if self.cpus is not None and not quota.MIN_CPUS <= self.cpus <= len(self.cores):
            raise UsageError(
                f"--cpus {self.cpus:g}: a host has {quota.MIN_CPUS} processors at least and "
                f"{len(self.cores)} at most, as many as this machine gives; leave it out for no limit"
            )
        if not 0 <= self.delay_ms <= 10_000:
            raise UsageError(f"--delay {self.delay_ms:g}: give milliseconds, 0 to 10000")
        if self.ranks_per_host < 1:
            raise UsageError(f"--ranks-per-host {self.ranks_per_host}: a host has 1 rank or more")
        self._rate_bits_per_s = network.parse_rate(self.rate)
        self._owner: LabOwner | None = None
        self._controller = quota.find_controller()
        self._groups: list[Path] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Lab:
        if lacking := network.missing():
            reasons = "\n".join(f"  {why}" for why in lacking)
            raise StrettoError(f"this machine cannot run the lab:\n{reasons}")
        quota.sweep()
        with contextlib.ExitStack() as stack:
            stack.enter_context(ending_by_exit())
            stack.callback(self.close)
            self._owner = LabOwner.mine()
            with blocked():
                self._build(self._owner)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _build(self, owner: LabOwner) -> None:
        if self.cpus is not None and self._controller is None:
            raise StrettoError(f"--cpus {self.cpus:g}: {quota.NO_QUOTA}")
        if self._controller is not None:
            self._groups = self._make_groups(owner, self._controller)
        network.build(owner, self.hosts)
        try:
            network.shape(owner, self.hosts, self._rate_bits_per_s, self.delay_ms)
        except StrettoError as error:
            if "netem" in str(error):
                raise StrettoError(
                    f"--delay {self.delay_ms:g}: this kernel has no netem, so delay cannot be emulated; "
                    f"leave --delay out, or `modprobe sch_netem` (package linux-modules-extra)\n  {error}"
                ) from error
            raise StrettoError(f"load the kernel module sch_tbf (`modprobe sch_tbf`): {error}") from error

    def _make_groups(self, owner: LabOwner, controller: quota.CpuController) -> list[Path]:
        """A control group for each host. Without a limit they are no more than a nicety: none if refused."""
        made: list[Path] = []
        try:
            for host in range(self.hosts):
                made.append(quota.make_group(controller, owner.host(host), self.cpus))
        except StrettoError:
            if self.cpus is not None:
                raise
            for file in made:
                quota.remove_group(file.parent)
            return []
        return made

    def close(self) -> None:
        """End every process of the lab and remove its namespaces and groups; to call it twice is harmless."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        faults = []
        with blocked():
            for process in self._processes:
                if process.poll() is None:
                    signal_group(process, signal.SIGKILL)
            for name in [*map(owner.host, range(self.hosts)), owner.switch]:
                try:
                    quota.remove_host(name, self._controller)
                except StrettoError as error:
                    faults.append(str(error))
            for process in self._processes:
                process.wait()
            self._processes.clear()
            self._groups.clear()
        if faults:
            raise StrettoError("the lab could not remove all that it made:\n  " + "\n  ".join(faults))

    def namespace(self, host: int) -> str:
        """Name of a host's network namespace, for `ip netns exec NAME COMMAND`."""
        return self._require_open().host(host)

    def name_of(self, rank: int) -> str:
        """A rank in messages: its host, and which rank it is where hosts have several."""
        host = rank // self.ranks_per_host
        return f"host {host}" if self.ranks_per_host == 1 else f"host {host} rank {rank}"

    def environment(
        self, host: int, env: Mapping[str, str] | None = None, local_rank: int = 0
    ) -> dict[str, str]:
        """A rank's environment: this process's, then the cluster's variables, then `env`."""
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "RANK": str(host * self.ranks_per_host + local_rank),
            "WORLD_SIZE": str(self.hosts * self.ranks_per_host),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": network.INTERFACE,
            "NCCL_SOCKET_IFNAME": network.INTERFACE,
            "TP_SOCKET_IFNAME": network.INTERFACE,
            "STRETTO_LAB": json.dumps(
                {
                    "hosts": self.hosts,
                    "ranks_per_host": self.ranks_per_host,
                    "rate": self.rate,
                    "rate_bits_per_s": self._rate_bits_per_s,
                    "cpus": self.cpus,
                    "delay_ms": self.delay_ms,
                    "pin": self.pin,
                }
            ),
            **({ALONE: "1"} if self._groups and self.ranks_per_host == 1 else {}),
            **(env or {}),
        }

    def popen(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        local_rank: int = 0,
        stdout: _Target = None,
        stderr: _Target = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on one host and return at once; it ends with the lab at the latest.

        local_rank: which of the host's ranks it is, for its environment.
        The command leads a session of its own and reads nothing. The kernel kills it when the thread
        that started it ends, so start it from one that lives as long. Raises UsageError if there is
        no such host or command.
        """
        owner = self._require_open()
        if not 0 <= host < self.hosts:
            raise UsageError(f"host {host}: the lab has hosts 0 to {self.hosts - 1}")
        environment = self.environment(host, env, local_rank)
        if not command:
            raise UsageError("no command given: say what each host is to run, after `--`")
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise UsageError(f"command {command[0]!r} is not on PATH, or is not executable")
        core = str(self.cores[host % len(self.cores)]) if self.pin else ""
        group = str(self._groups[host]) if self._groups else ""
        with blocked():
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", enter.__file__),
                    *(str(network.NETNS_DIR / owner.host(host)), group, core, str(os.getpid())),
                    *command,
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            self._processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        output: Path | None = None,
        quiet_others: bool = False,
        grace_s: float = 30.0,
        signals: list[int] | None = None,
    ) -> Statuses:
        """Run a command once for every rank, wait for all, and return their statuses by rank.

        Lines are printed as they come with the host's number before them, stdout and stderr separately. With
        `output`, host i writes `output/host-<i>.log` instead (where hosts have several ranks,
        `host-<i>-rank-<r>.log`); with `quiet_others` only rank 0 is printed, and the others where they fail.
        When one fails, the others have `grace_s` seconds before SIGTERM.
        Stop signals that are noted in `signals` end the run. Raises UsageError if there is no such command.
        """
        processes: list[subprocess.Popen[bytes]] = []
        printers: list[Printer] = []
        kept: dict[int, list[str]] = {}
        try:
            for rank in range(self.hosts * self.ranks_per_host):
                host, local_rank = divmod(rank, self.ranks_per_host)
                name = self.name_of(rank)
                if output is not None:
                    with _log_file(output, name) as log:
                        process = self.popen(
                            host, command, env, local_rank=local_rank, stdout=log, stderr=subprocess.STDOUT
                        )
                else:
                    if quiet_others and rank > 0:
                        kept[rank] = []
                    err = subprocess.STDOUT if rank in kept else subprocess.PIPE
                    process = self.popen(
                        host, command, env, local_rank=local_rank, stdout=subprocess.PIPE, stderr=err
                    )
                processes.append(process)
                for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    if stream is not None:
                        printers.append(Printer(stream, target, name, kept.get(rank)))
            statuses = wait_for(processes, printers, grace_s, signals)
        finally:
            for process in processes:
                if process.returncode is None:
                    signal_group(process, signal.SIGKILL)
                    process.wait()
                self._processes.remove(process)
        for rank, lines in kept.items():
            if statuses[rank] != 0:
                sys.stderr.writelines(lines)
                sys.stderr.flush()
        return statuses

    def _require_open(self) -> LabOwner:
        if self._owner is None:
            raise StrettoError("the lab is not running: use it inside `with Lab(...) as lab:`")
        return self._owner


def _log_file(directory: Path, name: str) -> BinaryIO:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return (directory / f"{name.replace(' ', '-')}.log").open("wb")
    except OSError as error:
        raise UsageError(f"--output {directory}: cannot write there: {error.strerror}") from error


TRIED: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    # what: (settings of a lab that needs it, whether no lab can run without it)
    "network namespaces": ({}, True),
    "link rate (tbf)": ({"rate": "100mbit"}, True),
    "delay (netem)": ({"delay_ms": 1.0}, False),
    "processor quota": ({"cpus": 0.5}, False),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried. says: what was found; where it is missing, what to do. required: whether the
    lab cannot run without it."""

    what: str
    ok: bool
    says: str
    required: bool = True


def examine() -> Iterator[Finding]:
    """Try one thing after the other; stops at what nothing else can do without."""
    lacking = network.missing()
    yield Finding("root, ip, tc", not lacking, "; ".join(lacking) or str(network.find_tool("ip")))
    if lacking:
        return
    if swept := quota.sweep():
        yield Finding("leftovers", True, f"removed what killed labs left: {', '.join(swept)}")
    for what, (settings, required) in TRIED.items():
        try:
            with Lab(hosts=2, **settings):
                yield Finding(what, True, "works", required)
        except StrettoError as error:
            yield Finding(what, False, str(error), required)
