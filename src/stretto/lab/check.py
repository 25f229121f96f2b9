"""Finds out what this machine can emulate, by trying it: `stretto lab check`.

Makes a small lab, measures it, and removes it. Each finding says what is missing and what to install.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stretto.errors import StrettoError
from stretto.lab import leftovers, probe, quota, tools
from stretto.lab.cluster import Lab

PORT = 29501
_RATE = "100mbit"
_RATE_BITS_PER_S = 100e6
_SENT_BYTES = 25_000_000  # 2 s at 100 Mbit/s
_SPIN_S = 0.3
_SPIN_CPUS = 0.5
_TOLERANCE = 0.1  # beyond 10 % the emulation misleads more than it shows
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried."""

    what: str
    ok: bool
    says: str
    """What was found; where it is missing, what to do."""
    required: bool = True
    """Whether the lab cannot run without it."""


def examine() -> Iterator[Finding]:
    """Try one thing after the other; stops at what nothing else can do without."""
    lacking = tools.missing()
    yield Finding("root, ip, tc", not lacking, "; ".join(lacking) or str(tools.find_tool("ip")))
    if lacking:
        return
    swept = leftovers.sweep()
    if swept:
        yield Finding("leftovers", True, f"removed what killed labs left: {', '.join(swept)}")
    controller = quota.find_controller()
    try:
        with Lab(hosts=2) as lab:
            yield Finding("network namespaces", True, "two hosts joined by a bridge")
            shaped = _try(lambda: lab.set_rate(_RATE))
            yield Finding(
                "link rate (tbf)",
                shaped is None,
                "works"
                if shaped is None
                else f"load the kernel module sch_tbf (`modprobe sch_tbf`): {shaped}",
            )
            yield _netem(lab)
            if shaped is None:
                yield _measured(f"measured, {_RATE}, one way", lambda: _one_way(lab))
                yield _measured(f"measured, {_RATE}, both ways", lambda: _both_ways(lab))
    except StrettoError as error:
        yield Finding("network namespaces", False, str(error))
        return
    if controller is None:
        yield Finding("processor quota", False, quota.why_no_quota(), required=False)
        return
    where = f"version {controller.version} at {controller.root}"
    try:
        with Lab(hosts=1, cpus=_SPIN_CPUS) as lab:
            yield Finding("processor quota", True, where, required=False)
            yield _measured(f"measured, {_SPIN_CPUS} cpus", lambda: _spin(lab), required=False)
    except StrettoError as error:
        yield Finding("processor quota", False, str(error), required=False)


def _netem(lab: Lab) -> Finding:
    refused = _try(
        lambda: tools.run_tool(
            "tc", f"-n {lab.namespace(0)} qdisc add dev lo root handle 9: netem delay 1ms".split()
        )
    )
    says = "works" if refused is None else "this kernel has none, so --delay is refused; `modprobe sch_netem`"
    return Finding("delay (netem)", refused is None, says, required=False)


def _try(deed: Callable[[], object]) -> str | None:
    try:
        deed()
    except StrettoError as error:
        return str(error).splitlines()[0]
    return None


def _measured(what: str, measure: Callable[[], tuple[float, str]], required: bool = True) -> Finding:
    try:
        ratio, says = measure()
    except StrettoError as error:
        return Finding(what, False, str(error), required)
    ok = abs(ratio - 1) <= _TOLERANCE
    hint = "" if ok else ": is the machine busy? Try again when nothing else runs"
    return Finding(what, ok, says + hint, required)


def _one_way(lab: Lab) -> tuple[float, str]:
    return _rate(lab, "receive", "send", directions="from host 1 to host 0")


def _both_ways(lab: Lab) -> tuple[float, str]:
    return _rate(lab, "echo", "exchange", directions="each way, both at once")


def _rate(lab: Lab, partner: str, mover: str, directions: str) -> tuple[float, str]:
    server = lab.popen(0, probe_command(partner, str(PORT)))
    took_s = probe_seconds(lab, 1, mover, lab.address(0), str(PORT), str(_SENT_BYTES))
    server.wait()
    rate_bits_per_s = 8 * _SENT_BYTES / took_s
    return rate_bits_per_s / _RATE_BITS_PER_S, f"{rate_bits_per_s / 1e6:.1f} Mbit/s of payload {directions}"


def _spin(lab: Lab) -> tuple[float, str]:
    took_s = probe_seconds(lab, 0, "spin", str(_SPIN_S))
    return (
        _SPIN_S / _SPIN_CPUS / took_s,
        f"{_SPIN_S} s of work took {took_s:.2f} s (nominal {_SPIN_S / _SPIN_CPUS:.2f} s)",
    )


def probe_command(*arguments: str) -> list[str]:
    """The command that runs one of the probe's programs; see `stretto.lab.probe`."""
    return [sys.executable, "-I", "-S", probe.__file__, *arguments]


def probe_seconds(lab: Lab, host: int, *arguments: str) -> float:
    """Run a probe on a host and return the seconds that it printed. Raises StrettoError if it failed."""
    process = lab.popen(host, probe_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        said, complaint = process.communicate(timeout=_PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise StrettoError(f"`{' '.join(arguments)}` did not end in {_PROBE_TIMEOUT_S:.0f} s") from None
    if process.returncode != 0:
        raise StrettoError(f"`{' '.join(arguments)}` failed on host {host}: {complaint.decode().strip()}")
    return float(said)
