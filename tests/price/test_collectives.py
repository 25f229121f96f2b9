"""The model of collectives: laws that are true of every fabric, and rates on the fabrics of the catalogue."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.ir import collectives
from stretto.ir.costs import Link
from stretto.ir.curve import Curve
from stretto.price.cluster_file import named_cluster
from stretto.price.collectives import Fabric, Group, axis_group, collective_curve
from stretto.price.devices import device, devices
from stretto.price.shared import ring_cost, scaled

KINDS = st.sampled_from([name for name, kind in collectives.KINDS.items() if kind.benchmark])
REGULAR = [key for key, found in devices().items() if found.fabric().topology != "cube-mesh"]
"""A cube mesh has more rings for 4 devices than for 3: there, more ranks are indeed cheaper at times."""
FABRICS = st.sampled_from(REGULAR).map(lambda key: device(key).fabric())
NBYTES = st.floats(0, 1e11)
GROUPS = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 64)).filter(lambda g: g[0] * g[1] > 1)


def collective_us(kind: str, nbytes: float, group: Group, fabric: Fabric) -> float:
    return collective_curve(kind, group, fabric).us(nbytes)


@given(KINDS, FABRICS, GROUPS, NBYTES, NBYTES)
def test_more_bytes_are_never_faster(
    kind: str, fabric: Fabric, at: tuple[int, int], a: float, b: float
) -> None:
    low, high = sorted((a, b))
    fewer, more = (collective_us(kind, nbytes, Group(*at), fabric) for nbytes in (low, high))
    assert 0 < fewer <= more < math.inf


@given(KINDS, FABRICS, GROUPS, st.integers(2, 4), st.floats(0, 1e9))
def test_more_nodes_are_never_cheaper_for_the_same_shard(
    kind: str, fabric: Fabric, at: tuple[int, int], times: int, shard: float
) -> None:
    k, m = at
    small, large = Group(k, m), Group(k, m * times)
    few = collective_us(kind, shard * small.size, small, fabric)
    assert few <= collective_us(kind, shard * large.size, large, fabric) * (1 + 1e-9)


@given(KINDS, FABRICS, st.integers(2, 7), st.floats(0, 1e9))
def test_more_ranks_of_a_node_are_never_cheaper_for_the_same_shard(
    kind: str, fabric: Fabric, k: int, shard: float
) -> None:
    # A reduction in the switch begins at 4 members, and is what makes them cheaper: looked at on either side.
    if kind == "send" or (fabric.in_switch and k == 3):
        return
    few = collective_us(kind, shard * k, Group(k, 1), fabric)
    assert few <= collective_us(kind, shard * (k + 1), Group(k + 1, 1), fabric) * (1 + 1e-9)


@given(FABRICS, GROUPS, NBYTES)
def test_gathering_and_scattering_cost_the_same_and_reducing_more(
    fabric: Fabric, at: tuple[int, int], nbytes: float
) -> None:
    group = Group(*at)
    gather = collective_us("all_gather", nbytes, group, fabric)
    assert gather == collective_us("reduce_scatter", nbytes, group, fabric)
    assert gather < collective_us("all_reduce", nbytes, group, fabric)


@given(KINDS, FABRICS, GROUPS)
def test_no_bytes_take_the_latency_whatever_the_rates(kind: str, fabric: Fabric, at: tuple[int, int]) -> None:
    slow = replace(
        fabric,
        device_bytes_per_us=fabric.device_bytes_per_us / 10,
        peer_bytes_per_us=fabric.peer_bytes_per_us / 10,
        nic_bytes_per_us=fabric.nic_bytes_per_us / 10,
    )
    assert collective_us(kind, 0, Group(*at), fabric) == collective_us(kind, 0, Group(*at), slow) > 0


@given(st.sampled_from(sorted(collectives.KINDS)), st.sampled_from([2, 3, 8]), st.integers(2, 512))
def test_a_measured_ring_is_scaled_as_its_row_says(kind: str, members: int, wish: int) -> None:
    link = Link(20.0, 1_000.0, processor_us_per_mb=3_000.0)
    found, want = scaled(ring_cost(link, kind, members), kind, members, wish), ring_cost(link, kind, wish)
    for nbytes in (0.0, 1e3, 1e6):
        assert found.curve.us(nbytes) == pytest.approx(want.curve.us(nbytes))
    assert found.processor_us_per_mb == pytest.approx(want.processor_us_per_mb)


@given(FABRICS, GROUPS, NBYTES)
def test_a_permutation_is_a_message_however_many_there_are(
    fabric: Fabric, at: tuple[int, int], nbytes: float
) -> None:
    permuted = collective_us("permute_next", nbytes, Group(*at), fabric)
    assert permuted == collective_us("send", nbytes, Group(2, 1) if at[1] == 1 else Group(1, 2), fabric)


def test_a_group_of_one_takes_no_time() -> None:
    assert collective_us("all_reduce", 1e9, Group(1, 1), device("h100").fabric()) == 0.0


def test_two_devices_of_a_mesh_have_one_link() -> None:
    for key in ("mi300x", "910b"):
        fabric = device(key).fabric()
        rate = fabric.peer_bytes_per_us * fabric.link_efficiency
        assert collective_us("all_reduce", 1e9, Group(2, 1), fabric) == pytest.approx(1e9 / rate, rel=0.01)
        # Eight have seven links each: seven times the rate for 7/4 of the traffic.
        eight = collective_us("all_reduce", 1e9, Group(8, 1), fabric)
        assert eight == pytest.approx(1.75 * 1e9 / (7 * rate), rel=0.02)


def test_mi300x_reaches_the_bus_rate_that_was_measured() -> None:
    us = collective_us("all_reduce", 8589934592, Group(8, 1), device("mi300x").fabric())
    assert us == pytest.approx(47617, rel=0.02)  # rccl-tests, 8 devices


def test_the_switch_reduces_faster_than_a_ring() -> None:
    fabric = device("h100").fabric()
    with_switch = collective_us("all_reduce", 1e9, Group(8, 1), fabric)
    ring = collective_us("all_reduce", 1e9, Group(8, 1), replace(fabric, in_switch=0.0))
    assert with_switch < 0.8 * ring


def test_h200_nodes_reduce_at_the_rate_that_was_measured() -> None:
    us = collective_us("all_reduce", 17179869184, Group(8, 2), device("h200").fabric())
    assert us == pytest.approx(66214, rel=0.06)  # a public nccl-tests log of 2 nodes


def test_a_member_a_node_has_one_card_and_eight_have_eight() -> None:
    fabric = device("a100-80gb").fabric()
    lonely = collective_us("all_gather", 1e9, Group(1, 4, 8), fabric)
    full = collective_us("all_gather", 1e9, Group(8, 4), fabric)
    assert lonely / full == pytest.approx(8 * (3 / 4) / (31 / 32), rel=0.02)


@pytest.mark.parametrize(
    ("mesh", "axis", "expected"),
    [
        ({"pp": 4, "dp": 4, "tp": 8}, "tp", Group(8, 1, 1)),
        ({"pp": 4, "dp": 4, "tp": 8}, "dp", Group(1, 4, 8)),
        ({"pp": 4, "dp": 4, "tp": 8}, "pp", Group(1, 4, 8)),
        ({"dp": 16, "tp": 2}, "dp", Group(4, 4, 2)),
        ({"dp": 16, "tp": 2}, "tp", Group(2, 1, 4)),
        ({"dp": 4, "tp": 16}, "tp", Group(8, 2, 1)),
        ({"pp": 2, "tp": 2}, "pp", Group(2, 1, 2)),
        ({"dp": 1, "tp": 8}, "dp", Group(1, 1, 8)),
        # uneven: three ranks side by side straddle nodes of eight, so they are taken as apart
        ({"dp": 8, "tp": 3}, "tp", Group(1, 3, 8)),
    ],
)
def test_where_the_members_of_an_axis_lie(mesh: dict[str, int], axis: str, expected: Group) -> None:
    assert axis_group(mesh, axis, 8) == expected


def test_a_measured_curve_takes_the_place_of_the_model_where_it_fits() -> None:
    flat = Curve(((0.0, 7.0),))
    cluster = replace(named_cluster("a100-80gbx64"), measured={("all_reduce", 8): flat})
    mesh = {"dp": 8, "tp": 8}
    assert cluster.collective("all_reduce", mesh, "tp").curve == flat
    assert cluster.collective("all_gather", mesh, "tp").curve.us(1e6) > 7.0
    # The benchmark filled one node; these are on eight, and share their cards.
    apart = collective_curve("all_reduce", Group(1, 8, 8), cluster.fabric)
    assert cluster.collective("all_reduce", mesh, "dp").curve == apart
