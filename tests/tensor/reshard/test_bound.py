"""The bound: worked by hand, and against all ways to divide."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from stretto.tensor.layout import Layout
from stretto.tensor.reshard.bound import bound_us, least_load
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.modes import sends_of
from stretto.tensor.reshard.tasks import Tensor, needs_of

R, S0 = Replicate(), Shard(0)
PER_BYTE = Hosts.of(1, 8, link_bytes_per_s=1e6)


def bound(source, target, shape=(120,), hosts=PER_BYTE):
    return bound_us(needs_of([Tensor(shape, 1, source, target)]).tasks, hosts)


def test_what_must_come_in_or_go_out_of_the_busiest_host():
    assert bound(Layout((0,), (R,)), Layout((1,), (R,))) == pytest.approx(120)
    assert bound(Layout((0,), (R,)), Layout((1, 2), (S0,))) == pytest.approx(120), "one sends both"
    assert bound(Layout((0, 1), (R,)), Layout((2, 3), (S0,))) == pytest.approx(60), "each sends one"
    assert bound(Layout((0, 1), (R,)), Layout((2, 3, 4), (S0,))) == pytest.approx(60), "divided at will"
    assert bound(Layout((0, 1), (S0,)), Layout((2, 3), (R,))) == pytest.approx(120), "each receives all"


def test_a_host_that_sends_and_receives_at_once_has_two_directions():
    # 0 and 1 hold a half each and need the other
    assert bound(Layout((0, 1), (S0,)), Layout((0, 1), (R,))) == pytest.approx(60)


def test_receivers_forward_so_a_lone_holder_sends_once():
    assert bound(Layout((0,), (R,)), Layout((1, 2, 3), (R,))) == pytest.approx(120)


def test_forwarding_loads_the_uplinks_of_all_hosts_together():
    # each of three holds a third and needs the others': six copies of a third, out of three hosts
    assert bound(Layout((0, 1, 2), (S0,)), Layout((0, 1, 2), (R,))) == pytest.approx(80)


def test_the_latency_is_there_once_and_only_if_a_link_is_used():
    slow = Hosts.of(1, 8, link_bytes_per_s=1e6, latency_us=5.0)
    assert bound(Layout((0,), (R,)), Layout((1,), (R,)), hosts=slow) == pytest.approx(125)
    assert bound(Layout((0, 1), (R,)), Layout((1,), (R,)), hosts=slow) == 0.0
    together = Hosts.of(2, 8, latency_us=5.0)
    assert bound(Layout((0,), (R,)), Layout((1,), (R,)), hosts=together) == 0.0


def test_a_mode_that_sends_more_than_it_must_has_a_bound_of_its_own():
    tasks = needs_of([Tensor((120,), 1, Layout((0,), (R,)), Layout((1, 2, 3), (R,)))]).tasks
    assert bound_us(sends_of(tasks, PER_BYTE, "broadcast"), PER_BYTE) == pytest.approx(120)
    assert bound_us(sends_of(tasks, PER_BYTE, "point_to_point"), PER_BYTE) == pytest.approx(360)


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
