"""Orders and senders: the rules against every order there is, and the search against the rules."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.tensor.reshard.bound import sends_bound_us
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.modes import Send
from stretto.tensor.reshard.order import Arranger
from stretto.tensor.reshard.search import searched

HOSTS = Hosts.of(1, 8, link_bytes_per_s=1e6)


def send(nbytes, senders, *receivers):
    return Send(0, ((0, nbytes),), nbytes, tuple((r, 0) for r in senders), tuple((r,) for r in receivers))


def best_of_all(sends):
    """The least makespan over all orders and senders."""
    arranger = Arranger(sends, HOSTS, 1)
    found = []
    for choice in product(*(range(len(one.candidates)) for one in sends)):
        ways = [arranger.way(i, c, sends[i].groups) for i, c in enumerate(choice)]
        found += [arranger.arrangement(ways, order).makespan_us for order in permutations(range(len(sends)))]
    return min(found)


def arranged(sends, search_s=0.0):
    arranger = Arranger(sends, HOSTS, 1)
    bound = sends_bound_us(sends, HOSTS)
    found = arranger.balanced(bound)
    return searched(arranger, found, bound, search_s) if search_s else found


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
def test_a_search_finds_the_best_order_of_a_few_sends(sends):
    found = arranged(sends, search_s=0.02)
    assert found.makespan_us == pytest.approx(best_of_all(sends))
    assert found == arranged(sends, search_s=0.02), "equal input, equal choices"


def test_a_search_finds_an_order_that_no_rule_makes():
    """Each rule, and the rounds, start the wrong send at the wrong time; the search meets the bound."""
    sends = [send(5, [0], 3), send(2, [2], 5), send(2, [1], 5), send(5, [2], 4), send(4, [1], 4)]
    sends += [send(2, [0], 5), send(3, [0], 5)]
    assert sends_bound_us(sends, HOSTS) == pytest.approx(10)
    assert arranged(sends).makespan_us == pytest.approx(11)
    assert arranged(sends, search_s=0.1).makespan_us == pytest.approx(10)
