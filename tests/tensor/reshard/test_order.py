"""Orders and senders: the rules against orders worked by hand, and against every order there is."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.tensor.reshard.bound import bound_us
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.order import Arranger
from stretto.tensor.reshard.tasks import UnitTask

HOSTS = Hosts.of(1, 8, link_bytes_per_s=1e6)


def send(nbytes, senders, *receivers):
    return UnitTask(0, ((0, nbytes),), nbytes, tuple(senders), receivers)


def best_of_all(sends):
    """The least makespan over all orders and senders."""
    arranger = Arranger(sends, HOSTS, 1)
    found = []
    for choice in product(*(range(len(one.holders)) for one in sends)):
        ways = [arranger.way(i, c, [sends[i].receivers]) for i, c in enumerate(choice)]
        found += [arranger.arrangement(ways, order).makespan_us for order in permutations(range(len(sends)))]
    return min(found)


def arranged(sends):
    return Arranger(sends, HOSTS, 1).balanced(bound_us(sends, HOSTS))


def test_sends_between_other_hosts_run_at_once():
    sends = [send(10, [0], 2), send(10, [0], 3), send(10, [1], 2), send(10, [1], 3)]
    assert Arranger(sends, HOSTS, 1).naive().makespan_us == pytest.approx(30)
    assert arranged(sends).makespan_us == pytest.approx(20)


def test_replicas_share_the_sending():
    sends = [send(10, [0, 1], 2), send(10, [0, 1], 3), send(20, [0], 4)]
    found = arranged(sends)
    assert [way.sender for way in found.ways] == [1, 1, 0]
    assert found.makespan_us == pytest.approx(20)


def test_who_has_no_choice_of_sender_comes_before_longer_sends():
    sends = [send(10, [0, 1], 2), send(9, [0], 3)]
    ways = Arranger(sends, HOSTS, 1).balanced_ways()
    assert [way.sender for way in ways] == [1, 0]


def test_the_host_that_sends_most_stands_last_in_a_chain():
    """Host 1 has much to send: as the last of the chain it forwards nothing."""
    sends = [send(90, [1], 5), send(10, [0], 1, 2)]
    found = arranged(sends)
    assert found.ways[1].receivers == (2, 1)
    assert found.makespan_us == pytest.approx(90)


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
    assert best * (1 - 1e-9) <= found.makespan_us <= Arranger(sends, HOSTS, 1).naive().makespan_us
    # 4/3 for senders by the longest first, and once more for the receivers' links, which a list keeps busy
    assert found.makespan_us <= best * (4 / 3 + 1)
    assert found == arranged(sends), "equal input, equal choices"
