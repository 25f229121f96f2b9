"""The lab's network: a namespace for each host, one for the switch, shaped links between them.

    host namespace                      switch namespace
    lab0 (10.77.0.1) ==== veth pair ==== h0 --+
    lab0 (10.77.0.2) ==== veth pair ==== h1 --+-- br0

Both ends of each pair carry a token bucket: the host's end limits what the host sends, the switch's end
what it receives. The machine's own namespace is not touched: pairs are made inside the switch's.
"""

from __future__ import annotations

from pathlib import Path

from stretto.errors import StrettoError
from stretto.lab.names import LabOwner
from stretto.lab.rates import MTU_BYTES, Bucket
from stretto.lab.tools import run_tool

NETNS_DIR = Path("/run/netns")  # where iproute2 mounts named namespaces
INTERFACE = "lab0"  # not eth0: /sys still shows the machine's own devices, and the two must not be mixed up
MAX_HOSTS = 254

# Written in each host's namespace; a file that a kernel lacks is passed over.
_SYSCTLS = {
    # Congestion control is for links shared with strangers. Reno is in every kernel and allowed in every
    # namespace (cubic is not where the default is bbr); on links that never drop it only opens its
    # window, so that the rate is the bucket's and not an estimate's.
    "ipv4/tcp_congestion_control": "reno",
    # A step is bursts and pauses; without this every burst would open its window anew.
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
    """Make the switch and `hosts` hosts, with links that are up and not shaped.

    Raises StrettoError when the kernel refuses; what was made until then is for `remove`.
    """
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
    """Hold every link to a rate in both directions, and delay what it delivers by `delay_ms`.

    The delay is at the switch's end alone, so that each packet meets it once on its way.
    """
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
