"""Orders, senders and the bound: the rules against orders worked by hand, and against every order there is.

Turns: where each sends as much to each, it takes as long as the busiest link.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, combinations, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from stretto.tensor.layout import Layout
from stretto.tensor.reshard.order import SendArranger, in_turns
from stretto.tensor.reshard.plan import bound_us, least_load
from stretto.tensor.reshard.tasks import Hosts, LinkTimeline, Tensor, UnitTask, footprint, needs_of

HOSTS = Hosts.of(1, 8, link_bytes_per_s=1e6)


def send(nbytes, senders, *receivers):
    return UnitTask(0, ((0, nbytes),), nbytes, tuple(senders), receivers)


def best_of_all(sends):
    """The least makespan over all orders and senders."""
    arranger = SendArranger(sends, HOSTS, 1)
    found = []
    for choice in product(*(range(len(one.owners)) for one in sends)):
        ways = [arranger.way(i, c, [sends[i].receivers]) for i, c in enumerate(choice)]
        found += [arranger.arrangement(ways, order).makespan_us for order in permutations(range(len(sends)))]
    return min(found)


def arranged(sends):
    return SendArranger(sends, HOSTS, 1).balanced(bound_us(sends, HOSTS))


some_send = st.builds(
    lambda nbytes, senders, receiver: send(nbytes, sorted(senders), receiver),
    st.integers(1, 9),
    st.sets(st.integers(0, 1), min_size=1),
    st.integers(2, 4),
)


@given(st.lists(some_send, min_size=1, max_size=4))
def test_the_rules_lie_between_the_best_order_of_a_few_sends_and_the_naive_one(sends):
    found = arranged(sends)
    best = best_of_all(sends)
    assert best * (1 - 1e-9) <= found.makespan_us <= SendArranger(sends, HOSTS, 1).naive().makespan_us
    # 4/3 for senders by the longest first, and once more for the receivers' links, which a list keeps busy
    assert found.makespan_us <= best * (4 / 3 + 1)
    assert found == arranged(sends), "equal input, equal choices"


@given(st.integers(1, 4), st.integers(1, 4))
def test_where_each_has_as_much_for_each_the_busiest_link_is_never_idle(senders, receivers):
    takes = [footprint(10, pair, HOSTS, 1) for pair in product(range(senders), range(4, 4 + receivers))]
    timeline = LinkTimeline()
    order = in_turns(takes)
    assert sorted(order) == list(range(len(takes)))
    for i in order:
        timeline.place(takes[i])
    assert timeline.makespan_us == pytest.approx(10 * max(senders, receivers))


R, S0 = Replicate(), Shard(0)


def bound(source, target, shape=(120,), hosts=HOSTS):
    return bound_us(needs_of([Tensor(shape, 1, source, target)])[0], hosts)


BOUNDS = {
    # source, target; the time of the busiest host
    "one sends all": (Layout((0,), (R,)), Layout((1,), (R,)), 120),
    "one sends both": (Layout((0,), (R,)), Layout((1, 2), (S0,)), 120),
    "each sends one": (Layout((0, 1), (R,)), Layout((2, 3), (S0,)), 60),
    "divided at will": (Layout((0, 1), (R,)), Layout((2, 3, 4), (S0,)), 60),
    "each receives all": (Layout((0, 1), (S0,)), Layout((2, 3), (R,)), 120),
    "two directions": (Layout((0, 1), (S0,)), Layout((0, 1), (R,)), 60),
    "receivers forward": (Layout((0,), (R,)), Layout((1, 2, 3), (R,)), 120),
    # each of three has a third and needs the others': six copies of a third, out of three hosts
    "uplinks of all together": (Layout((0, 1, 2), (S0,)), Layout((0, 1, 2), (R,)), 80),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_what_must_come_in_or_go_out_of_the_busiest_host(name):
    source, target, expected_us = BOUNDS[name]
    assert bound(source, target) == pytest.approx(expected_us)


def test_the_latency_is_there_once_and_only_if_a_link_is_used():
    slow = Hosts.of(1, 8, link_bytes_per_s=1e6, latency_us=5.0)
    assert bound(Layout((0,), (R,)), Layout((1,), (R,)), hosts=slow) == pytest.approx(125)
    assert bound(Layout((0, 1), (R,)), Layout((1,), (R,)), hosts=slow) == 0.0
    together = Hosts.of(2, 8, latency_us=5.0)
    assert bound(Layout((0,), (R,)), Layout((1,), (R,)), hosts=together) == 0.0


@given(
    st.dictionaries(st.frozensets(st.integers(0, 4), min_size=1), st.integers(1, 50), min_size=1, max_size=8)
)
def test_the_least_load_is_that_of_the_worst_set_of_hosts(demands):
    hosts = sorted(frozenset().union(*demands))
    subsets = chain.from_iterable(combinations(hosts, n) for n in range(1, len(hosts) + 1))
    worst = max(
        Fraction(sum(nbytes for allowed, nbytes in demands.items() if allowed <= set(subset)), len(subset))
        for subset in subsets
    )
    assert least_load(demands) == worst
