"""Variants that were tried: which one comes first, and why, in words.

What shares windows, or needs much more memory, comes first only where it gains more than costs can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from stretto.ir.parameters import Zero
from stretto.ir.program import OverlapMode
from stretto.passes.step import Pass

Variant = tuple[Pass, ...]
"""Passes, in order."""

WORTH = 0.98
"""Of the fastest other step, what one takes at most that overlaps by what costs more memory. Windows that
microbatches share keep more of them live and meet colder caches, and costs are off by a percent or two:
without a limit on the network a GPT with tp=2 was promised 1.5 %, and its ops took 5 % longer."""

HEAVY = 1.5
"""Times the memory of another variant, from where one must gain as much over it. Assumed: who needs the
memory for a larger model or batch gains more by it."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A variant with the step over few microbatches that it takes, and the most bytes of any rank; step_us is
    0 for one that has no alternative, infinite for one that is there in case that all others are refused.
    begin: how many of its passes change the job. exposed_us: communication that ranks wait for, of all ranks.
    zero, stays: of its job, and of its step."""

    variant: Variant
    overlap: OverlapMode
    step_us: float
    peak_bytes: int = 0
    begin: int = 0
    exposed_us: float = 0.0
    zero: Zero = 0
    stays: str = ""


def lighter(result: Sequence[Tried]) -> Tried:
    """Of variants, the fastest first, the one that is to come first: another that overlaps where the first
    needs much more memory for a gain that is within the error of costs."""
    first = result[0]
    close = (one for one in result[1:] if one.step_us * WORTH <= first.step_us and one.overlap != "off")
    return next((one for one in close if HEAVY * one.peak_bytes <= first.peak_bytes), first)


def why_less(asked: OverlapMode, chosen: Tried, tried: Sequence[Tried], missing: Sequence[str]) -> str:
    """Why `chosen`, of all that were `tried`, overlaps less than was asked; "" when it does not."""
    if chosen.overlap == asked:
        return ""
    fastest = min((one.step_us for one in tried if one.overlap == asked), default=None)
    if fastest is not None:
        if fastest >= chosen.step_us:
            times = fastest / chosen.step_us if chosen.step_us else 1.0
            return f"{asked} is predicted to take {times:.3f} times as long"
        if asked == "window" and fastest >= WORTH * chosen.step_us:
            gain = 100.0 * (1.0 - fastest / chosen.step_us)
            return f"{asked} is predicted to gain {gain:.1f} %, which is less than costs can show"
    return "; ".join(dict.fromkeys(missing)) or f"no {asked} plan is faster"


def why_zero(
    asked: Zero, chosen: Tried, tried: Sequence[Tried], max_bytes: int | None, missing: str, of: str
) -> str:
    """What `chosen`, of all that were `tried`, has of sharded state that planning has chosen, and what was
    slower or did not fit; "" where there was no choice. missing: why nothing that stays full was tried. of:
    which step was timed."""
    best: dict[tuple[Zero, bool], Tried] = {}
    for one in sorted(tried, key=lambda one: one.step_us):
        if one.step_us < inf:
            best.setdefault((one.zero, one.stays != ""), one)
    longer = {zero for zero, stays in best if stays}
    auto = asked == "auto"

    def words(name: str, one: Tried, takes: str) -> str:
        stays = (one.stays or "nothing stays full") if one.zero in longer else ""
        return ": ".join(text for text in (name if auto else "", stays, takes) if text)

    texts = [missing] if missing and not longer else []
    if len(best) > 1:
        texts.insert(0, words("auto", chosen, f"{chosen.step_us / 1000:.1f} ms{of}"))
    for key, one in sorted(best.items(), key=str):
        if key != (chosen.zero, chosen.stays != ""):
            much = max_bytes is not None and one.peak_bytes > max_bytes
            takes = f"needs {one.peak_bytes / 1e9:.3g} GB" if much else f"{one.step_us / 1000:.1f} ms"
            texts.append(words(str(one.zero), one, takes))
    return "; ".join(texts)
