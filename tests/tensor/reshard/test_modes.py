"""What each mode sends, and how a box is cut."""

from __future__ import annotations

import pytest

from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.modes import cut, sends_of
from stretto.tensor.reshard.tasks import UnitTask
from stretto.tensor.reshard.timeline import footprint

HOLDERS = (0, 1)
TASK = UnitTask(0, ((2, 8), (0, 3)), 6 * 3 * 4, HOLDERS, (4, 5, 6, 7))
HOSTS = Hosts.of(2, 8, link_bytes_per_s=1e6, latency_us=1.0)


def test_broadcast_is_one_send_through_all_hosts():
    (send,) = sends_of([TASK], HOSTS, "broadcast")
    assert (send.holders, send.receivers, send.nbytes) == (HOLDERS, (4, 5, 6, 7), 72)


def test_point_to_point_is_a_send_for_each_receiver():
    sends = sends_of([TASK], HOSTS, "point_to_point")
    assert [send.receivers for send in sends] == [(4,), (5,), (6,), (7,)]
    assert {send.nbytes for send in sends} == {72}


@pytest.mark.parametrize(
    ("region", "parts", "cuts"),
    [
        (((2, 8), (0, 3)), 2, [((2, 5), (0, 3)), ((5, 8), (0, 3))]),
        (((0, 1), (0, 5)), 2, [((0, 1), (0, 3)), ((0, 1), (3, 5))]),
        (((0, 3), (0, 4)), 2, [((0, 3), (0, 2)), ((0, 3), (2, 4))]),
        (((0, 2), (0, 1)), 4, [((0, 1), (0, 1)), ((1, 2), (0, 1))]),
        ((), 3, [()]),
    ],
)
def test_a_box_is_cut_along_the_dim_that_divides_best(region, parts, cuts):
    count = 4
    for start, stop in region:
        count *= stop - start
    found = list(cut(UnitTask(0, region, count, HOLDERS, (4,)), parts))
    assert [one.region for one in found] == cuts
    assert sum(one.nbytes for one in found) == count


def test_boxes_between_hosts_are_cut_but_no_smaller_than_asked():
    assert [send.nbytes for send in sends_of([TASK], HOSTS, "broadcast", 3)] == [24, 24, 24]
    assert [send.nbytes for send in sends_of([TASK], HOSTS, "broadcast", 3, least_bytes=30)] == [36, 36]
    assert [send.nbytes for send in sends_of([TASK], HOSTS, "broadcast", 3, least_bytes=100)] == [72]


def test_a_chain_takes_each_link_a_piece_later_than_the_one_before():
    takes = footprint(100, (0, 2, 3, 4), HOSTS, piece_bytes=10)
    assert takes.uses == (
        (("up", 0), 0.0, 100.0),
        (("down", 1), 0.0, 100.0),
        # rank 3 is on host 1 too, and hears at once; the next host a piece and the latency later
        (("up", 1), 11.0, 111.0),
        (("down", 2), 11.0, 111.0),
    )
    assert takes.arrival_us == 112.0
