"""Bounds in words: times, and what binds a step."""

from __future__ import annotations

from stretto.bounds.machine import MachineBound


def format_us(us: float) -> str:
    """A time with its unit: `226 ms`, `1.38 s`, `12.5 us`."""
    for limit, unit, scale in ((1e3, "us", 1.0), (1e6, "ms", 1e3), (float("inf"), "s", 1e6)):
        if us < limit * 0.9995:
            value = us / scale
            return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return f"{us:g}"  # no number: a file of a run has it so


def machine_in_words(name: str, m: int, machine: MachineBound) -> str:
    """What a machine does, `m` times and once, after and before what."""
    inside = [f"{m} x {format_us(machine.each_us)}"] if machine.each_us > 0 or not machine.once_us else []
    if machine.once_us > 0:
        inside.append(f"{format_us(machine.once_us)} once")
    if machine.extra_us > 0:
        inside.append(f"{format_us(machine.extra_us)} lost to communication")
    return f"{name} ({' and '.join(inside)})" + around_in_words(machine.head_us, machine.tail_us)


def around_in_words(head_us: float, tail_us: float) -> str:
    """What must come before and after, where anything must."""
    text = f" after a head of {format_us(head_us)}" if head_us > 0 else ""
    if tail_us > 0:
        text += f"{' and' if text else ''} before a tail of {format_us(tail_us)}"
    return text
