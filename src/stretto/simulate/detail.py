"""The inside of a window: when each op and collective runs, if nothing else is in the way.

For drawings and for people; the walk itself (`simulate.engine`) goes by segments. Messages are taken as
there, lanes as free, processors as unshared; so a run takes longer than this where it meets any of them.
"""

from __future__ import annotations

from stretto.ir.plan import Plan
from stretto.ir.program import WAIT
from stretto.ir.timeline import COMPUTE_LANE
from stretto.simulate.windows import make_ready


def op_times(plan: Plan, window: str) -> list[tuple[str, float, float, str]]:
    """(item name, start, duration, lane) of every op, collective and sum of a window, in the order of items.

    Microseconds from the window's start. An op that starts a collective is there on the compute lane, for
    what starting costs, and on the lane of its axis from that moment on, for what the collective takes; its
    wait begins when that is done. A sum of gradients is there on its lane only. A collective that
    another window starts is there already. The name is the item's in the plan's text: `mm_3`, or `#1 mm_3` in
    a window's second part.

    Raises PlanError as `simulate` does, for windows, ops and costs that are missing.
    """
    ready = make_ready(plan, window)
    found: list[tuple[str, float, float, str]] = []
    now_us = plan.costs.action_us
    free_us: dict[str, float] = {}
    done_us: dict[object, float] = {}
    for item, op, op_us, call in zip(ready.window.items, ready.ops, ready.op_us, ready.calls, strict=True):
        if op is None:
            continue
        if call is not None and op.target == WAIT:
            now_us = max(now_us, done_us.get((item.part, call.key), now_us))
        if call is None or not call.op.sums:
            found.append((str(item), now_us, op_us, COMPUTE_LANE))
        if call is not None and op.target != WAIT:
            begin_us = max(now_us, free_us.get(call.axis, 0.0))
            found.append((str(item), begin_us, call.time.us, call.axis))
            free_us[call.axis] = done_us[item.part, call.key] = begin_us + call.time.us
        now_us += op_us
    return found
