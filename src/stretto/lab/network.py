"""The lab's network: a namespace for each host, one for the switch, shaped links between them.

    host namespace                      switch namespace
    lab0 (10.77.0.1) ==== veth pair ==== h0 --+
    lab0 (10.77.0.2) ==== veth pair ==== h1 --+-- br0

Both ends of each pair carry a token bucket (docs/lab.md). Pairs are made inside the switch's namespace.
iproute2's own commands do it: they are what a user types to look into a running lab.

A namespace is called `stretto-<pid>-<start>-<serial>-<part>`: the owner's process id, the time it started (in
clock ticks since boot, so that a reused id is not taken for the owner), the number of the lab in that
process, and `sw` for the switch or `h0`, `h1`, ... for the hosts. So leftovers of dead owners are known.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import StrettoError, UsageError

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
        """Name of the namespace that has the bridge."""
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
    # The second field is the program's name in parentheses and may contain blanks and parentheses itself.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


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
    """Run `ip` or `tc` to its end and return what it printed. `batch` has command lines for `-batch -`.
    Raises StrettoError with the command and the tool's own words when it fails."""
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


# Jumbo frames, as training clusters use them: 99 % of the nominal rate is payload (1500 B: 95.6 %).
MTU_BYTES = 9000

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"^\s*(\d{1,12}(?:\.\d{1,12})?)\s*([a-zA-Z]+)\s*$")

# A sender's packets must fit the bucket as they are, else the kernel cuts each; and the bucket must be small:
# what it has crosses an idle link at once. Kernel time for 128 MiB each way at 1 Gbit/s, on Linux 6.18: 0.3 s
# so, 0.5 s with packets of 64 KiB that are cut, 4.4 s without segmentation offload and frames of 1500 B.
# Two segments of a 9000 B link with the 320 B and a little that Linux keeps free for headers.
_GSO_MIN_BYTES = 2 * MTU_BYTES + 512
_GSO_MAX_BYTES = 65536  # Linux's own limit for legacy TCP packets
_BURST_S = 0.25e-3  # measured: enough that timers do not starve 1 Gbit/s (97 % without, 99 % with it)
# Longer than the sum of what a few senders can have in flight (4 MiB each by Linux's default), so that
# the switch queues and does not drop: the lab emulates a link that is slow, not one that loses packets.
QUEUE_BYTES = 64 << 20


def parse_rate(text: str) -> int | None:
    """Bits per second of a rate such as `100mbit` (kbit, mbit, gbit as in tc); None for `unlimited`. Raises
    UsageError for anything else, and for 0."""
    if text.strip().lower() == "unlimited":
        return None
    match = _RATE.match(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"--rate {text!r}: expected a number and kbit, mbit or gbit (100mbit), or `unlimited`"
        )
    rate_bits_per_s = round(float(match[1]) * unit)
    if rate_bits_per_s < 1000:
        raise UsageError(f"--rate {text!r}: the slowest link is 1kbit; for no limit say `unlimited`")
    return rate_bits_per_s


@dataclass(frozen=True, slots=True)
class Bucket:
    """Settings of `tbf` and of the link's packets, for one rate."""

    rate_bits_per_s: int
    burst_bytes: int
    """What an idle link lets through at once."""
    gso_max_bytes: int
    """The largest packet that TCP may hand to the link; it fits the bucket."""

    @staticmethod
    def of(rate_bits_per_s: int) -> Bucket:
        """The bucket for a rate in bits per second."""
        timer_bytes = math.ceil(rate_bits_per_s * _BURST_S / 8)
        gso_bytes = min(max(timer_bytes, _GSO_MIN_BYTES), _GSO_MAX_BYTES)
        # tc keeps the bucket as a time in ticks of 64 ns; the margin covers its rounding.
        return Bucket(rate_bits_per_s, max(timer_bytes, gso_bytes + 512), gso_bytes)

    def tbf(self) -> str:
        """The words that `tc` takes after `tbf`."""
        return f"rate {self.rate_bits_per_s}bit burst {self.burst_bytes} limit {QUEUE_BYTES}"


NETNS_DIR = Path("/run/netns")  # where iproute2 mounts named namespaces
INTERFACE = "lab0"  # not eth0: /sys still shows the machine's own devices, and the two must not be mixed up
MAX_HOSTS = 254

# Written in each host's namespace; a file that a kernel lacks is passed over.
_SYSCTLS = {
    # Congestion control is for links shared with strangers. Reno is in every kernel and allowed in every
    # namespace (cubic is not where the default is bbr); on links that never drop it only opens its
    # window, so that the rate is the bucket's and not an estimate's.
    "ipv4/tcp_congestion_control": "reno",
    # A step is bursts and pauses; without this every burst would open its window again.
    "ipv4/tcp_slow_start_after_idle": "0",
    # What one connection learned about a link must not shape the next: runs would depend on their order.
    "ipv4/tcp_no_metrics_save": "1",
    # Gloo takes an interface's first address; a link-local IPv6 one appears late and cannot be bound.
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
}


def address(host: int) -> str:
    """IPv4 address of a host; equal in every lab, since each has namespaces of its own."""
    return f"10.77.0.{host + 1}"


def build(owner: LabOwner, hosts: int) -> None:
    """Make the switch and `hosts` hosts, with links that are up and not shaped. Raises StrettoError when the
    kernel refuses; what was made until then is for `remove`."""
    switch = owner.switch
    run_tool("ip", ["netns", "add", switch])
    lines = [
        "link set lo up",
        "link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
        f"link set br0 mtu {MTU_BYTES} up",
    ]
    for host in range(hosts):
        name = owner.host(host)
        run_tool("ip", ["netns", "add", name])
        # Before the link is up, so that no IPv6 address appears.
        settings = "; ".join(
            f"test ! -e /proc/sys/net/{key} || echo {value} > /proc/sys/net/{key}"
            for key, value in _SYSCTLS.items()
        )
        run_tool("ip", ["netns", "exec", name, "sh", "-c", f"set -e; {settings}"])
        lines += [
            f"link add h{host} mtu {MTU_BYTES} type veth peer name {INTERFACE} mtu {MTU_BYTES} netns {name}",
            f"link set h{host} master br0 up",
        ]
    run_tool("ip", ["-n", switch, "-batch", "-"], lines)
    for host in range(hosts):
        run_tool(
            "ip",
            ["-n", owner.host(host), "-batch", "-"],
            [
                "link set lo up",
                f"addr add {address(host)}/16 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            ],
        )


def shape(owner: LabOwner, hosts: int, rate_bits_per_s: int | None, delay_ms: float = 0.0) -> None:
    """Keep every link to a rate in both directions, and delay what it delivers by `delay_ms`, at the switch's
    end alone, so that each packet meets it once."""
    bucket = None if rate_bits_per_s is None else Bucket.of(rate_bits_per_s)
    ports = [f"h{host}" for host in range(hosts)]
    for name, devices, late_ms in (
        (owner.switch, ports, delay_ms),
        *((owner.host(host), [INTERFACE], 0.0) for host in range(hosts)),
    ):
        if bucket is not None:
            sizes = [f"link set {device} gso_max_size {bucket.gso_max_bytes}" for device in devices]
            run_tool("ip", ["-n", name, "-batch", "-"], sizes)
        if lines := [line for device in devices for line in qdisc_lines(device, bucket, late_ms)]:
            run_tool("tc", ["-n", name, "-batch", "-"], lines)


def qdisc_lines(device: str, bucket: Bucket | None, delay_ms: float) -> list[str]:
    """The `tc` commands that shape one device."""
    lines = []
    if bucket is not None:
        lines.append(f"qdisc add dev {device} root handle 1: tbf {bucket.tbf()}")
    if delay_ms > 0:
        place = "root" if bucket is None else "parent 1:1"
        # netem counts its queue in packets; a million never drops before the senders' windows are full.
        lines.append(f"qdisc add dev {device} {place} handle 2: netem delay {delay_ms}ms limit 1000000")
    return lines


def namespaces() -> list[str]:
    """Names of all namespaces that iproute2 knows, those of other programs too."""
    try:
        return sorted(path.name for path in NETNS_DIR.iterdir())
    except FileNotFoundError:
        return []


def remove(name: str) -> None:
    """Delete a namespace, and its links with it; gone already is as good."""
    if not (NETNS_DIR / name).exists():
        return
    try:
        run_tool("ip", ["netns", "del", name])
    except StrettoError:
        # Another lab may have swept it between the look and the deed.
        if (NETNS_DIR / name).exists():
            raise
