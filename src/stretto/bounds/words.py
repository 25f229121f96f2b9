"""Bounds for people: times, and what binds a step, in words."""

from __future__ import annotations

from stretto.bounds.live import LiveBound
from stretto.bounds.machine import Machine
from stretto.bounds.stage import COMPUTE


def format_us(us: float) -> str:
    """A time for people: `226 ms`, `1.38 s`, `12.5 us`."""
    for limit, unit, scale in ((1e3, "us", 1.0), (1e6, "ms", 1e3), (float("inf"), "s", 1e6)):
        if us < limit * 0.9995:
            value = us / scale
            return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return f"{us:g}"  # no number: a file of a run has it so


def machine_in_words(name: str, m: int, machine: Machine) -> str:
    """What a machine does, `m` times and once, after and before what, and what holds it up."""
    inside = [f"{m} x {format_us(machine.each_us)}"] if machine.each_us > 0 or not machine.once_us else []
    if machine.once_us > 0:
        inside.append(f"{format_us(machine.once_us)} once")
    if machine.extra_us > 0:
        inside.append(f"{format_us(machine.extra_us)} lost to communication")
    first, last = machine.at_first, machine.at_last
    text = f"{name} ({' and '.join(inside)})"
    text += _around(0.0 if first else machine.head_us, 0.0 if last else machine.tail_us)
    if first:
        hold = "holds" if first.feeder == COMPUTE else "hold"
        text += f", which {first.feeder} {hold} up until {format_us(machine.head_us)}:"
        text += f" {_at_most(first.done_us)} of that is done by then"
    if last:
        follow = "follows" if last.feeder == COMPUTE else "follow"
        text += f"{', and' if first else ','} which {last.feeder} {follow}:"
        text += f" {_at_most(last.done_us)} of that is left for the last {format_us(machine.tail_us)}"
    return text


def memory_in_words(stage: int, m: int, limit: int, live: LiveBound) -> str:
    """What a limit of live microbatches makes wait."""
    text = f"stage {stage}'s limit of {limit} live microbatch{'es' if limit > 1 else ''}"
    text += f" ({m} x {format_us(live.alive_us)} / {limit})"
    return text + _around(live.head_us, live.tail_us)


def collectives_of(axis: str) -> str:
    """The lane of an axis by what it carries."""
    return f"{axis} collectives"


def _at_most(us: float) -> str:
    return f"at most {format_us(us)}" if us > 0 else "none"


def _around(head_us: float, tail_us: float) -> str:
    text = f" after a head of {format_us(head_us)}" if head_us > 0 else ""
    if tail_us > 0:
        text += f"{' and' if text else ''} before a tail of {format_us(tail_us)}"
    return text
