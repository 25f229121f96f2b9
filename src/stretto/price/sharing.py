"""Which axes' collectives use one network card, and so slow each other down.

Numbers and names only: who leaves a host is for the measuring, the calibration, or the description to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stretto.ir.axes import PIPELINE


def sharing(axes: Iterable[str], leaving: Collection[str], *, pipelined: bool) -> tuple[str, ...]:
    """Those of `axes` (beside pp) whose collectives share their place's card with something.

    leaving: the axes whose groups span hosts, `pp` among them if messages do; pipelined: whether there are
    messages. One axis alone has the card to itself. With messages that stay inside a host nothing shares:
    cards carry all messages or none (`stretto.simulating.cards`).
    """
    if pipelined and PIPELINE not in leaving:
        return ()
    result = tuple(axis for axis in axes if axis in leaving)
    return result if len(result) + pipelined > 1 else ()
