"""Ordering policies by name, the check that what a policy gives is a legal order, and the windows of a plan
in the order of a policy. Also here are the baseline's windows, in which nothing hides a collective.

A policy is a function from a window's graph to the indexes of its nodes in the order in which they run. A
node needs only nodes of lower numbers, some of them of earlier parts: of two backwards in one window, 0B+0B,
the second adds its gradients to what the first has added.

Stretto's own order one window by itself:

1. The captured order, and list orders (`order.list_scheduler`) with the longest path as urgency. The memory
   limit is kept wherever something else than what would exceed it can run.
2. From the best of these the search (`order.search`) goes on by other urgencies, then by forward-backward
   improvement.
3. A window's last run has another measure (`order.last_runs`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from reprlib import repr as short

from stretto.errors import StrettoError, UsageError, meant
from stretto.ir.costs import Costs
from stretto.ir.plan import Item, ItemKind, Window
from stretto.ir.program import WAIT, Job
from stretto.order.depend import Role, WindowGraph, make_graph
from stretto.order.rank_window import make_rank_window
from stretto.order.search import (
    ForwardBackward,
    OrderSearch,
    SearchPoint,
    SearchScope,
    WalkBudget,
    new_urgencies,
)
from stretto.order.walk import WalkResult, replay

Policy = Callable[[WindowGraph], Sequence[int]]

LITTLE = 0.0005
"""Share of the window's work up to which an op comes directly before its first user in the search. On GPTs
that is two ops of three, and 2 % of the time."""

WALKS = 600
"""Walks for a window, at most. Assumed."""

WORK = 100_000
"""Walks times nodes that are placed by themselves, at most: large windows get fewer walks. Assumed."""

FEWEST = 30
"""Walks of even the largest window. Assumed."""

PIECES = (1, 8, 64)
"""In how many equal pieces of the captured order a list keeps it, until its memory fits. Of 16 layers that
compute again, 64 fit; the step was as long in each. Assumed."""

OVER = 1.5
"""Times the memory that it is given, from where a window's order is too much: plans are proved with all of a
rank's memory, of which a window has a part. Assumed.
"""

STALE_WALKS = 100
"""Walks without a gain that end a move of the search. Assumed."""

CHANGE = 2.0
"""By how much urgencies are changed, in parts of a typical collective and a typical stretch of ops.
Assumed."""

CLOSE = 1.001
"""An order is not improved within this factor of what no order can beat. Assumed."""


def urgencies(graph: WindowGraph) -> list[float]:
    """How urgent nodes of one window are, in microseconds: the longest path to its end, through lanes as well
    as compute (critical path). What nothing waits for, as weight gradients, is the least urgent and fills
    gaps."""
    path_us = [0.0] * len(graph.nodes)
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        behind = max((path_us[n] for n in graph.after[index]), default=0.0)
        on_lane_us = node.time_us if node.role in (Role.START, Role.SEND) else 0.0
        path_us[index] = max(node.work_us, on_lane_us) + behind
    return path_us


def captured_limit(graph: WindowGraph) -> int:
    """The bytes that the captured order needs, one part after the other: what an order may use as well."""
    return replay(graph, range(len(graph.nodes))).peak_bytes


def floor_us(graph: WindowGraph) -> float:
    """No order is faster: all work, and what collectives take of the processor meanwhile."""
    return graph.work_us + sum(n.load * n.time_us for n in graph.nodes if n.role is Role.START)


def list_order(
    graph: WindowGraph, *, urgency: Sequence[float] | None = None, limit_bytes: int | None = None
) -> tuple[int, ...]:
    """An order of the graph's nodes.

    urgency: by node; `urgencies` without it. limit_bytes: above the memory at the window's begin; what the
    captured order needs without it. Where an order needs much more (`OVER`), as one does that computes much
    again before it is read, the captured order is kept in more and more of its pieces (`PIECES`).
    """
    limit = captured_limit(graph) if limit_bytes is None else limit_bytes
    scope = SearchScope((make_rank_window(graph),), 0.0, 0.0, limit_bytes=limit)
    given = urgencies(graph) if urgency is None else urgency
    above_us = max(given, default=0.0) - min(given, default=0.0)
    most = OVER * limit
    walked: list[WalkResult] = []
    for pieces in PIECES:
        # What begins later as captured is less urgent than all that does earlier.
        late = (pieces * at // len(given) for at in range(len(given)))
        result = scope.walk(
            SearchPoint(([us - n * above_us for us, n in zip(given, late, strict=True)],), (0.0,))
        )
        assert result is not None, "a window by itself comes to its end"
        walked.append(result)
        if result.peak_bytes <= most:
            break
    return min(walked, key=lambda one: (max(one.peak_bytes, most), one.step_us)).orders[0]


def improve_order(
    graph: WindowGraph, *, limit_bytes: int | None = None, walks: int | None = None, share: float = 1.0
) -> tuple[int, ...]:
    """The best order of the search. limit_bytes: as in `list_order`; walks: instead of the constants above;
    share: of them, what the window is worth."""
    fine = SearchScope((make_rank_window(graph),), CLOSE * floor_us(graph), 0.0)
    captured = replace(fine, limit_bytes=0).walk(SearchPoint(orders=(range(len(graph.nodes)),)))
    assert captured is not None, "a legal order of one window comes to its end"
    limit = captured.peak_bytes if limit_bytes is None else limit_bytes
    fine = replace(fine, limit_bytes=limit)
    # All ops where they can run, also the small ones: by the longest path, and as the search orders them.
    search = OrderSearch(fine, WalkBudget(0))
    search.best = captured
    search.tried(SearchPoint((urgencies(graph),), (0.0,)))
    if not search.close and walks != 0:
        order = _searched(graph, fine, walks, share)
        search.tried(SearchPoint(orders=(order,)))
        positions = {index: -float(at) for at, index in enumerate(order)}
        search.tried(SearchPoint(([positions[index] for index in range(len(order))],), (0.0,)))
        search.settled(ForwardBackward(fine.windows))
    if search.best.peak_bytes > OVER * limit:
        return list_order(graph, limit_bytes=limit)
    return search.best.orders[0]


def _searched(graph: WindowGraph, fine: SearchScope, walks: int | None, share: float) -> tuple[int, ...]:
    """Step 2, with few ops placed by themselves."""
    window = make_rank_window(graph, little=LITTLE)
    most = min(WALKS, WORK // max(1, sum(window.placed)))
    budget = WalkBudget(walks or max(FEWEST, int(share * most)))
    starts_us = [node.time_us for node in graph.nodes if node.role is Role.START]
    typical_us = sum(starts_us) / max(1, len(starts_us)) + graph.work_us / max(1, len(window.stretches))
    search = OrderSearch(replace(fine, windows=(window,), change_us=CHANGE * typical_us), budget)
    for patience in (0.0, 0.5):
        search.tried(SearchPoint((urgencies(graph),), (patience,)))
    search.go(new_urgencies, budget.left // 2, STALE_WALKS)
    search.go(ForwardBackward((window,)), budget.left, STALE_WALKS)
    assert search.best is not None, "a window by itself comes to its end"
    return search.best.orders[0]


CAPTURED = "captured"
"""The policy that leaves windows as they are."""

POLICIES: dict[str, Policy] = {
    CAPTURED: lambda graph: range(len(graph.nodes)),
    "list": list_order,
    "improve": improve_order,
}
"""Every policy by its name: those of Stretto, and what users register."""

DEFAULT = "improve"

BUILT_IN = frozenset(POLICIES)
"""The policies of Stretto."""

WITH_LAST_RUNS = frozenset({"list", "improve"})
"""Policies with which last runs have orders of their own (`order.last_runs`). "captured" is as captured, and
of a user's own policy every run is as it says."""


def register(name: str, policy: Policy) -> None:
    """Make `policy` known under `name`, for `stretto.plan(job, order=name)`.

    It is called once for each kind of window and must depend on the graph alone. Raises UsageError when
    Stretto has a policy of that name (a user's own is replaced), for a name that is no text, and for a policy
    that cannot be called.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"an ordering policy's name is a text, not {short(name)}: register(name, policy)")
    if name in BUILT_IN:
        raise UsageError(f"Stretto has an ordering policy {name!r}: register yours under another name")
    if not callable(policy):
        raise UsageError(
            f"ordering policy {name!r} is {short(policy)}, which cannot be called: give a function"
        )
    POLICIES[name] = policy


def policy_of(name: str) -> Policy:
    """The policy of that name. Raises UsageError when there is none."""
    if not isinstance(name, str) or name not in POLICIES:
        raise UsageError(
            f"unknown ordering policy {name!r}; {meant(name, POLICIES)}choose one of: {', '.join(POLICIES)}. "
            "`stretto.order.register` names one of your own"
        )
    return POLICIES[name]


def legal_order(name: str, graph: WindowGraph) -> tuple[int, ...]:
    """What the policy `name` makes of the graph.

    Raises UsageError when it is no legal order: no numbers of nodes, a node that is missing or there twice,
    or one that comes before what it needs. Also for a user's policy that fails.
    """
    where = f"policy {name!r}, window {graph.window.name}"
    count = len(graph.nodes)
    order = tuple(_index(where, given, count) for given in _given(name, graph, where))
    positions = {index: at for at, index in enumerate(order)}
    if len(positions) < len(order):
        twice = next(index for at, index in enumerate(order) if positions[index] != at)
        raise UsageError(f"{where}: {_called(graph, twice)} is there twice; name every node once")
    if len(order) < count:
        missing = next(index for index in range(count) if index not in positions)
        raise UsageError(f"{where}: {_called(graph, missing)} is missing; name every node once")
    for index, needs in enumerate(graph.before):
        for needed in needs:
            if positions[needed] > positions[index]:
                raise UsageError(
                    f"{where}: {_called(graph, index)} comes before {_called(graph, needed)}, which it "
                    "needs; keep every node behind all of `graph.before`"
                )
    return order


def _given(name: str, graph: WindowGraph, where: str) -> list[object]:
    """What the policy gives, one by one; of too many the first that is one too many, as it may never end."""
    policy = policy_of(name)
    try:
        given: object = policy(graph)
        if isinstance(given, Iterable):
            return list(islice(given, len(graph.nodes) + 1))
    except Exception as error:
        if name in BUILT_IN or isinstance(error, StrettoError):
            raise  # of a policy with a message of its own, or of a defect here
        raise UsageError(
            f"{where}: the policy fails with {type(error).__name__}: {error}; correct it, for it has to "
            "order every window"
        ) from error
    raise UsageError(f"{where}: it gives {short(given)}; give the indexes of `graph.nodes` in their order")


def _index(where: str, given: object, count: int) -> int:
    """The number of a node, which may be an integer of NumPy or torch: what sorting there gives."""
    try:
        index = -1 if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # the latter from a tensor without data
        index = -1
    if not 0 <= index < count:
        raise UsageError(
            f"{where}: {short(given)} is no node; nodes are numbered from 0 to {count - 1} (integers, not "
            "the nodes themselves)"
        )
    return index


def _called(graph: WindowGraph, index: int) -> str:
    """A node in messages. Where a window has several parts, their ops may have the same names."""
    item = graph.nodes[index].item
    if len(graph.window.parts) == 1:
        return str(item)
    stage, phase = graph.window.parts[item.part]
    return f"{replace(item, part=0)} of part {item.part} ({stage}{phase})"


class WindowOrders:
    """Orders windows of one job, and remembers the orders of those that it has seen. policy: a name. share:
    of the search for an order, what a window is worth."""

    def __init__(
        self, job: Job, costs: Costs, stage_ranks: Sequence[int], policy: str = DEFAULT, share: float = 1.0
    ) -> None:
        self._given = job, costs
        self._stage_ranks = stage_ranks
        self._order = (
            partial(improve_order, share=share) if policy == DEFAULT else partial(legal_order, policy)
        )
        self._orders: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._windows: dict[str, Window] = {}

    def ordered(self, window: Window) -> Window:
        """The window in the policy's order; as it is when nothing in it communicates over an axis.

        Raises UsageError for a policy that is unknown or gives an illegal order.
        """
        if window.name not in self._windows:
            graph = make_graph(*self._given, window, self._stage_ranks)
            if graph.communicates:
                key = graph.key()
                if key not in self._orders:
                    self._orders[key] = self._order(graph)
                items = tuple(graph.nodes[index].item for index in self._orders[key])
                window = replace(window, items=items)
            self._windows[window.name] = window
        return self._windows[window.name]


def waits_at_once(job: Job, window: Window) -> Window:
    """The window in its captured order, but every collective is waited for directly after its start, and
    every send comes directly after the item that makes what it sends."""
    ops = [
        {op.name: op for sub in phase.programs for op in job.stages[stage].ops[sub]}
        for stage, phase in window.parts
    ]
    # (part, op) -> which item it is, or which it comes directly behind as its wait.
    places: dict[tuple[int, str], tuple[int, bool]] = {}

    def place(at: int, item: Item) -> tuple[int, bool, bool]:
        if item.kind is ItemKind.SEND:
            return *places[item.part, job.edges[int(item.ref)].value], True
        mine = at, False
        if item.kind is ItemKind.OP:
            op = ops[item.part][str(item.ref)]
            if op.target == WAIT and (item.part, op.uses[0]) in places:
                mine = places[item.part, op.uses[0]][0], True
            places[item.part, op.name] = mine
        return *mine, False

    turns = [place(at, item) for at, item in enumerate(window.items)]
    order = sorted(range(len(turns)), key=turns.__getitem__)
    return replace(window, items=tuple(window.items[at] for at in order))
