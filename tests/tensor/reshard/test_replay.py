"""Plans replayed on arrays: every pair of placements, meshes of every kind beside and across one another."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from stretto.tensor.layout import Layout
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.modes import MODES
from stretto.tensor.reshard.plan import Tensor, plan_reshards

from .replay import check_times, check_values

R, S0, S1 = Replicate(), Shard(0), Shard(1)

MESHES = {
    # (source, target): what is special about the pair
    ((0, 1, 2, 3), (4, 5, 6, 7)): "apart, of one size",
    ((0, 1), (2, 3, 4)): "apart, of two sizes",
    ((0, 1, 2, 3), (2, 3, 4)): "overlapping",
    ((0, 1, 2, 3), (3, 1, 0, 2)): "one mesh, ranks in another order",
    ((0, 1, 2, 3), (1, 2)): "whole to part",
    ((1, 2), (0, 1, 2, 3)): "part to whole",
    (((0, 1), (2, 3)), (4, 5, 6)): "other dimensionality",
    (((0, 1), (2, 3)), ((4, 5, 6), (7, 8, 9))): "two axes each",
    (((3, 1), (0, 2)), ((0, 1), (2, 3))): "two axes each, ranks in another order",
    ((5,), ((0, 1), (2, 3))): "one rank to a mesh",
}


def layouts(ranks, ndim=2):
    axes = 2 if isinstance(ranks[0], tuple) else 1
    return [Layout(ranks, held) for held in product((R, S0, S1)[: ndim + 1], repeat=axes)]


@pytest.mark.parametrize(("source", "target"), MESHES, ids=MESHES.values())
@pytest.mark.parametrize("mode", MODES)
def test_every_pair_of_placements_arrives_whole(source, target, mode):
    """Shapes: uneven, with fewer rows than ranks, and with an even split."""
    hosts = Hosts.of(2, 10, latency_us=3.0)
    for shape in ((10, 5), (2, 7), (12, 1)):
        for before, after in product(layouts(source), layouts(target)):
            tensors = [Tensor(shape, 4, before, after)]
            plan = plan_reshards(tensors, hosts, mode)
            check_values(plan, tensors)
            check_times(plan, hosts)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,)])
def test_tensors_with_nothing_to_cut(shape, mode):
    hosts = Hosts.of(2, 8)
    tensors = [Tensor(shape, 8, Layout((0, 1, 2), (R,)), Layout(((2, 3), (4, 5)), (R, R)))]
    plan = plan_reshards(tensors, hosts, mode)
    check_values(plan, tensors)
    check_times(plan, hosts)
    assert len(plan.copies) == (0 if 0 in shape else 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_target_has_the_value_once_and_zeros_elsewhere(mode):
    hosts = Hosts.of(2, 8)
    tensors = [Tensor((5, 4), 4, Layout((0, 1), (S0,)), Layout(((2, 3), (4, 5)), (Partial(), S1)))]
    plan = plan_reshards(tensors, hosts, mode)
    assert plan.zeros == ((0, 4), (0, 5))
    assert all(rank in (2, 3) for one in plan.transfers for rank in one.receivers)
    check_values(plan, tensors)
    averaged = [Tensor((5, 4), 4, Layout((0, 1), (S0,)), Layout((2, 3, 4), (Partial("avg"),)))]
    plan = plan_reshards(averaged, hosts, mode)
    assert plan.zeros == ()
    check_values(plan, averaged)


@st.composite
def some_layout(draw, ndim):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count = 1
    for size in shape:
        count *= size
    if count > 12:
        shape, count = (count % 12 + 1,), count % 12 + 1
    ranks = draw(st.permutations(range(12)))[:count]
    placements = [draw(st.sampled_from([R, *map(Shard, range(ndim))])) for _ in shape]
    return Layout(nested(ranks, shape), tuple(placements))


def nested(ranks, shape):
    if len(shape) == 1:
        return tuple(ranks)
    step = len(ranks) // shape[0]
    return tuple(nested(ranks[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))


@st.composite
def some_tensor(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return Tensor(shape, draw(st.sampled_from([1, 2, 8])), *(draw(some_layout(len(shape))) for _ in "ab"))


@st.composite
def some_hosts(draw):
    host_of = tuple(draw(st.lists(st.integers(0, 4), min_size=12, max_size=12)))
    return Hosts(host_of, 1e6, draw(st.sampled_from([0.0, 5.0])))


@given(
    st.lists(some_tensor(), min_size=1, max_size=3),
    some_hosts(),
    st.sampled_from(MODES),
    st.sampled_from(["naive", "balanced"]),
    st.integers(1, 100),
)
def test_any_reshard_arrives_once_from_who_holds_it(tensors, hosts, mode, choice, piece_bytes):
    plan = plan_reshards(tensors, hosts, mode, choice=choice, piece_bytes=piece_bytes)
    check_values(plan, tensors)
    check_times(plan, hosts)
    assert plan == plan_reshards(tensors, hosts, mode, choice=choice, piece_bytes=piece_bytes)


@given(
    st.lists(some_tensor(), min_size=1, max_size=3), some_hosts(), st.sampled_from(MODES), st.integers(1, 100)
)
def test_balanced_choices_are_no_worse_than_naive_ones_nor_better_than_the_bound(
    tensors, hosts, mode, piece_bytes
):
    naive, balanced = (
        plan_reshards(tensors, hosts, mode, choice=choice, piece_bytes=piece_bytes)
        for choice in ("naive", "balanced")
    )
    rounded = 1 + 1e-9
    assert balanced.bound_us <= balanced.makespan_us * rounded
    assert balanced.makespan_us <= naive.makespan_us * rounded
    assert balanced.bytes_sent == balanced.needed_bytes == naive.bytes_sent
    check_values(balanced, tensors)
