"""Orders of windows by hand: the made-up case, odd cases, memory, and policies of your own."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stretto
from stretto.errors import StrettoError, TooLargeError, UsageError
from stretto.ir.action import Phase
from stretto.ir.plan import Item, ItemKind, Plan, Window
from stretto.ir.program import Job
from stretto.order.depend import Node, Role, WindowGraph, WindowStorage
from stretto.order.policies import POLICIES, legal_order, list_order, register, urgencies
from stretto.order.rank_window import make_rank_window
from stretto.order.search import SearchPoint, SearchScope
from stretto.order.walk import replay
from stretto.planning.make_plan import make_plan
from stretto.verifying import verify
from tests.order.best import shortest_us
from tests.synthetic_comm import make_comm_costs
from tests.verifying.comm_plans import comm_job

C = 400.0
"""Microseconds of a collective of the made-up case."""

FORWARD = (200, 150, "C", 300, "C", 10)
BACKWARD = (300, "C", 300, "C", 300)


def chains(*parts: Sequence[int | str], lane_us: float = C, fillers: Sequence[int] = ()) -> WindowGraph:
    """A window of parts, each a chain of ops (microseconds) and collectives ("C"); fillers: ops of the last
    part that need its first op, and that nothing needs (weight gradients)."""
    nodes: list[Node] = []
    before: list[tuple[int, ...]] = []

    def add(node: Node, *needs: int) -> int:
        nodes.append(node)
        before.append(tuple(needs))
        return len(nodes) - 1

    def item(part: int) -> Item:
        return Item(ItemKind.OP, part, f"n{len(nodes)}")

    first = -1
    for part, chain in enumerate(parts):
        last: tuple[int, ...] = ()
        for at, link in enumerate(chain):
            if link == "C":
                start = add(Node(item(part), Role.START, lane="tp", time_us=lane_us), *last)
                last = (add(Node(item(part), Role.FINISH, start=start, lazy=True), start),)
            else:
                last = (add(Node(item(part), Role.COMPUTE, float(link)), *last),)
            first = last[0] if at == 0 else first
    for us in fillers:
        add(Node(item(len(parts) - 1), Role.COMPUTE, float(us)), first)
    after: list[list[int]] = [[] for _ in nodes]
    for index, needs in enumerate(before):
        for needed in needs:
            after[needed].append(index)
    window = Window("by hand", tuple((0, Phase.F) for _ in parts), tuple(node.item for node in nodes))
    return WindowGraph(window, tuple(nodes), tuple(before), tuple(map(tuple, after)), ())


def time_of(graph: WindowGraph, policy: str) -> float:
    return replay(graph, legal_order(policy, graph)).end_us


def test_the_made_up_case_hides_what_can_be_hidden() -> None:
    graph = chains(FORWARD, BACKWARD)
    # Captured, each collective is waited for at once.
    assert time_of(graph, "captured") == 660 + 900 + 4 * C
    # The lane is the narrow place: it can begin after 300 us of the backward, has 1600 us of work, and then
    # at least the forward's last 10 us are left.
    assert time_of(graph, "improve") <= 1.01 * (300 + 4 * C + 10)
    assert time_of(graph, "list") <= 1.05 * time_of(graph, "improve")


def test_weight_gradients_stand_under_the_collective_of_the_input_gradient() -> None:
    graph = chains((300, "C", 300), fillers=(250, 100))
    order = list_order(graph)
    at = [index for index in order if graph.nodes[index].role is not Role.COMPUTE]
    assert time_of(graph, "list") == 300 + C + 300, "both fillers under the collective"
    assert order.index(at[0]) == 1
    assert order.index(at[1]) == len(order) - 2, "the wait directly before what reads it"


def test_what_would_overfill_one_gap_is_kept_for_the_next() -> None:
    graph = chains((10, "C", 10, "C", 10), lane_us=100, fillers=(60, 60))
    assert time_of(graph, "list") == 10 + 120 + 10 + 100 + 10, "whatever can run, runs"
    assert time_of(graph, "improve") == 10 + 100 + 10 + 100 + 10, "one filler under each"


def random_graph(seed: int) -> WindowGraph:
    draw = random.Random(seed)

    def chain() -> list[int | str]:
        links: list[int | str] = []
        for _ in range(draw.randrange(1, 4)):
            links += [draw.randrange(20, 500) for _ in range(draw.randrange(1, 3))]
            links += ["C"] if draw.random() < 0.8 else []
        return [*links, draw.randrange(5, 300)]

    fillers = [draw.randrange(20, 400) for _ in range(draw.randrange(0, 4))]
    return chains(
        *(chain() for _ in range(draw.randrange(1, 3))), lane_us=draw.choice((50, 200, 400)), fillers=fillers
    )


@pytest.mark.parametrize("graph", [chains(FORWARD, BACKWARD), *map(random_graph, range(40))], ids=str)
def test_orders_come_within_a_twentieth_of_the_shortest(graph: WindowGraph) -> None:
    shortest = shortest_us(graph)
    assert shortest <= time_of(graph, "improve") <= 1.05 * shortest
    # The search improves this one: of a hundred such windows six are more than 5 % off, by 13 % at most.
    assert shortest <= time_of(graph, "list") <= 1.15 * shortest


def test_a_wait_stands_for_the_slowest_rank_of_the_place() -> None:
    # 100, a collective of 400 under 420, then 50: the slowest is 52 behind, and the collective done for 20.
    graph = replace(chains([100, "C", 50], fillers=[420]), skew=0.1)
    order = [0, 1, 4, 2, 3]
    found = replay(graph, order)
    assert (found.end_us, found.stall_us) == (pytest.approx(602.0), pytest.approx(32.0))
    # Waited for at once: all that it worked before; then in step again.
    found = replay(graph, [0, 1, 2, 4, 3])
    assert (found.end_us, found.stall_us) == (pytest.approx(980.0), pytest.approx(410.0))
    # With more to do meanwhile nothing is left to wait for.
    longer = replace(chains([100, "C", 50], fillers=[500]), skew=0.1)
    assert replay(longer, order).stall_us == 0.0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("patience", [0.0, 0.5])
def test_a_window_that_is_listed_takes_as_long_as_its_order_walked_again(seed: int, patience: float) -> None:
    plain = random_graph(seed)
    draw = random.Random(seed)
    nodes = [replace(node, load=draw.choice((0.0, 0.3))) for node in plain.nodes]
    graph = replace(plain, nodes=tuple(nodes), skew=draw.choice((0.0, 0.1)))
    scope = SearchScope((make_rank_window(graph),), 0.0, 0.0, limit_bytes=10**9)
    made = scope.walk(SearchPoint((urgencies(graph),), (patience,)))
    assert made is not None
    again = replay(graph, made.orders[0])
    assert made.step_us == pytest.approx(again.step_us)
    # In the given order it is the same; and nothing is given up that is no longer.
    given = scope.walk(SearchPoint(orders=made.orders), again.step_us)
    assert given is not None
    assert given.step_us == pytest.approx(again.step_us)
    assert scope.walk(SearchPoint((urgencies(graph),), (patience,)), made.step_us) == made
    assert scope.walk(SearchPoint(orders=made.orders), 0.9 * graph.work_us) is None


def test_what_a_window_starts_counts_until_it_is_done() -> None:
    """A step ends with its reductions, whatever program has them: nothing in the window waits for these. The
    longer way goes first, and the compute lane waits for none."""
    ways = ((100.0, 10.0), (100.0, 300.0), (100.0, 200.0))
    nodes: list[Node] = []
    for us, lane_us in ways:
        nodes.append(Node(Item(ItemKind.OP, 0, f"n{len(nodes)}"), Role.COMPUTE, us))
        nodes.append(Node(Item(ItemKind.OP, 0, f"n{len(nodes)}"), Role.START, lane="dp", time_us=lane_us))
    before = [(at - 1,) if at % 2 else () for at in range(6)]
    after = [() if at % 2 else (at + 1,) for at in range(6)]
    window = Window("by hand", ((0, Phase.F),), tuple(node.item for node in nodes))
    graph = WindowGraph(window, tuple(nodes), tuple(before), tuple(after), ())
    assert graph.leaving == {1, 3, 5}
    made = replay(graph, legal_order("list", graph))
    assert made.step_us == 100 + 300 + 200 + 10
    assert made.end_us == 300


def test_a_memory_limit_holds_ops_back() -> None:
    # Eight independent ops of 10 bytes each, each freed by a second op; both can run at any time.
    nodes = [Node(Item(ItemKind.OP, 0, f"n{k}"), Role.COMPUTE, 10.0) for k in range(16)]
    before = [() if k < 8 else (k - 8,) for k in range(16)]
    after = [(k + 8,) if k < 8 else () for k in range(16)]
    storages = tuple(WindowStorage(10, k, (k, k + 8), False) for k in range(8))
    window = Window("by hand", ((0, Phase.F),), tuple(node.item for node in nodes))
    graph = WindowGraph(window, tuple(nodes), tuple(before), tuple(after), storages)
    wide = list_order(graph, urgency=[2.0] * 8 + [1.0] * 8, limit_bytes=10**9)
    tight = list_order(graph, urgency=[2.0] * 8 + [1.0] * 8, limit_bytes=30)
    assert replay(graph, wide).peak_bytes == 80
    assert replay(graph, tight).peak_bytes == 30


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a test registers is unknown to the next."""
    known = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(known)


def example() -> str:
    """The text of docs/overlap.md that registers a policy and plans with it."""
    text = (Path(__file__).parents[2] / "docs" / "overlap.md").read_text()
    [found] = [
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "register_order(" in block
    ]
    return str(found)


@pytest.mark.parametrize(
    ("family", "stages", "microbatches"),
    [("1f1b", 2, 4), ("eager-1f1b", 2, 3), ("gpipe", 2, 4), ("zb-h1", 2, 4), ("zb-h2", 2, 6), ("1f1b", 1, 4)],
)
def test_the_documented_policy_is_legal_in_all_windows(
    family: str, stages: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = comm_job(stages, microbatches, (("tp", 2),), blocks=2)
    costs = make_comm_costs(job, collective_us=100.0)

    def plan(job: Job, order: str) -> Plan:
        return make_plan(job, costs, schedule=family, overlap="window", order=order)

    names: dict[str, Any] = {"job": job}
    monkeypatch.setattr(stretto, "plan", plan, raising=False)
    exec(example(), names)
    verify(names["plan"])


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1], "n2 is missing; name every node once"),
        ([0, 1, 1, 2, 3], "n1 is there twice"),
        ([0, 2, 1, 3], "n2 comes before n1, which it needs"),
        ([0, 1, 2, 9], "9 is no node"),
        ([0, 1, 2, -1], "-1 is no node"),
        ([False, True, 2, 3], "False is no node"),
        ([0.0, 1.0, 2.0, 3.0], r"0\.0 is no node"),
        ([[0], [1], [2], [3]], r"\[0\] is no node; nodes are numbered from 0 to 3 \(integers"),
        (torch.zeros(4, dtype=torch.int64, device="meta"), "tensor.* is no node"),
        ("abcd", "'a' is no node"),
        (None, "it gives None; give the indexes of `graph.nodes`"),
        (3, "it gives 3; give the indexes of `graph.nodes`"),
        (np.array(3), "the policy fails with TypeError: iteration over a 0-d array"),
        (cycle(range(4)), "n0 is there twice"),
    ],
)
def test_illegal_orders_are_refused(order: Sequence[int], message: str) -> None:
    register("odd", lambda graph: order)
    with pytest.raises(UsageError, match=f"policy 'odd', window by hand: {message}"):
        legal_order("odd", chains((10, "C", 10)))


@pytest.mark.parametrize("order", [range(4), np.arange(4), torch.arange(4), [np.int32(k) for k in range(4)]])
def test_indexes_may_be_integers_of_any_kind(order: Sequence[int]) -> None:
    register("any", lambda graph: order)
    found = legal_order("any", chains((10, "C", 10)))
    assert found == (0, 1, 2, 3)
    assert {type(index) for index in found} == {int}


@pytest.mark.parametrize("error", [TooLargeError("too many ops"), StrettoError("not today")])
def test_what_a_policy_says_itself_is_told_as_it_is(error: StrettoError) -> None:
    def refuses(graph: WindowGraph) -> list[int]:
        raise error

    register("refuses", refuses)
    with pytest.raises(StrettoError) as caught:
        legal_order("refuses", chains((10, "C", 10)))
    assert caught.value is error


@pytest.mark.parametrize(
    ("name", "policy", "message"),
    [
        ("list", list_order, "has an ordering policy 'list'"),
        (5, list_order, "name is a text"),
        ("", list_order, "name is a text"),
        ("seven", 7, "cannot be called"),
        ("seven", None, "cannot be called"),
    ],
)
def test_what_cannot_be_registered(name: str, policy: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        register(name, policy)
    with pytest.raises(UsageError, match="unknown ordering policy 'fast'; choose one of: captured, list"):
        legal_order("fast", chains((10,)))
