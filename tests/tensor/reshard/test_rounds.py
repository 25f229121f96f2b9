"""Orders by rounds: sends of one length take as long as the busiest link; the busiest are covered first."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.rounds import covering, in_rounds
from stretto.tensor.reshard.timeline import Timeline, footprint

HOSTS = Hosts.of(1, 8, link_bytes_per_s=1e6)
pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(4, 7)), min_size=1, max_size=24)


@given(pairs)
def test_sends_of_one_length_take_as_long_as_the_busiest_link(sent):
    takes = {i: footprint(10, pair, HOSTS, 1) for i, pair in enumerate(sent)}
    timeline = Timeline()
    order = in_rounds(takes)
    assert sorted(order) == list(range(len(sent)))
    for i in order:
        timeline.place(takes[i])
    ends = [rank for pair in sent for rank in pair]
    assert timeline.makespan_us == pytest.approx(10 * max(map(ends.count, ends)))


def test_sends_within_a_host_come_first_and_the_longest_before_the_others():
    here = Hosts.of(2, 4, link_bytes_per_s=1e6)
    takes = {
        i: footprint(n, pair, here, 1) for i, (n, pair) in enumerate([(5, (0, 2)), (9, (0, 2)), (3, (0, 1))])
    }
    assert in_rounds(takes) == [2, 1, 0]


@given(
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1),
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
def test_the_heaviest_links_that_a_matching_can_cover_are_covered(edges, weights):
    ups, downs = [("up", i) for i in range(4)], [("down", i) for i in range(4)]
    weight = dict(zip(ups + downs, weights))
    beside = {link: [] for link in weight}
    for i, j in sorted(edges):
        beside[ups[i]].append(downs[j])
        beside[downs[j]].append(ups[i])
    beside = {link: others for link, others in beside.items() if others}
    mates = covering(beside, sorted(beside, key=lambda link: (-weight[link], link)))
    for link, mate in mates.items():
        assert mates[mate] == link
        assert mate in beside[link]
    best = max(
        sum(weight[ups[i]] + weight[downs[j]] for i, j in chosen)
        for count in range(1, 5)
        for chosen in combinations(sorted(edges), count)
        if len({i for i, _ in chosen}) == len({j for _, j in chosen}) == count
    )
    assert sum(weight[link] for link in mates) == best
