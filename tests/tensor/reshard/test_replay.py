"""Plans replayed on arrays: every pair of placements, meshes of every kind beside and across one another.

`plan_together`: of a tensor that several meshes need, anyone who received it may send it on.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from stretto.errors import UsageError
from stretto.tensor.layout import Layout
from stretto.tensor.reshard.plan import Tensor, Together, plan_reshards, plan_together
from stretto.tensor.reshard.tasks import MODES, Hosts

from .replay import check_times, check_values

R, S0, S1 = Replicate(), Shard(0), Shard(1)


MESHES = {
    "apart, of one size": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "apart, of two sizes": ((0, 1), (2, 3, 4)),
    "overlapping": ((0, 1, 2, 3), (2, 3, 4)),
    "one mesh, ranks in another order": ((0, 1, 2, 3), (3, 1, 0, 2)),
    "to a part": ((0, 1, 2, 3), (1, 2)),
    "from a part": ((1, 2), (0, 1, 2, 3)),
    "two axes to one": (((0, 1), (2, 3)), (4, 5, 6)),
    "two axes each": (((0, 1), (2, 3)), ((4, 5, 6), (7, 8, 9))),
    "two axes each, ranks in another order": (((3, 1), (0, 2)), ((0, 1), (2, 3))),
    "one rank to a mesh": ((5,), ((0, 1), (2, 3))),
}


def layouts(ranks):
    """All of two dims."""
    axes = 2 if isinstance(ranks[0], tuple) else 1
    return [Layout(ranks, kinds) for kinds in product((R, S0, S1), repeat=axes)]


@pytest.mark.parametrize(
    "meshes",
    [pytest.param(one, marks=pytest.mark.slow if one.startswith("two axes each") else ()) for one in MESHES],
)
@pytest.mark.parametrize("mode", MODES)
def test_every_pair_of_placements_arrives_once(meshes, mode):
    """Shapes: uneven, with fewer rows than ranks, and with an even split."""
    hosts = Hosts.of(2, 10, latency_us=3.0)
    for shape, *pair in product(((10, 5), (2, 7), (12, 1)), *map(layouts, MESHES[meshes])):
        tensors = [Tensor(shape, 4, *pair)]
        plan = plan_reshards(tensors, hosts, mode)
        check_values(plan, tensors)
        check_times(plan, hosts)


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_target_has_the_value_once_and_zeros_elsewhere(mode):
    hosts = Hosts.of(2, 8)
    tensors = [Tensor((5, 4), 4, Layout((0, 1), (S0,)), Layout(((2, 3), (4, 5)), (Partial(), S1)))]
    plan = plan_reshards(tensors, hosts, mode)
    assert tensors[0].targets[0].zero_ranks() == (4, 5)
    assert all(rank in (2, 3) for one in plan.transfers for rank in one.receivers)
    check_values(plan, tensors)
    averaged = [Tensor((5, 4), 4, Layout((0, 1), (S0,)), Layout((2, 3, 4), (Partial("avg"),)))]
    plan = plan_reshards(averaged, hosts, mode)
    assert averaged[0].targets[0].zero_ranks() == ()
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


@settings(max_examples=40)
@given(
    st.lists(some_tensor(), min_size=1, max_size=3), some_hosts(), st.sampled_from(MODES), st.integers(1, 100)
)
def test_any_reshard_arrives_once_from_who_has_it(tensors, hosts, mode, piece_bytes):
    """Balanced choices are no worse than naive ones, and none is better than the bound."""
    naive, balanced = plans = [
        plan_reshards(tensors, hosts, mode, choice=choice, piece_bytes=piece_bytes)
        for choice in ("naive", "balanced")
    ]
    for plan in plans:
        check_values(plan, tensors)
        check_times(plan, hosts)
    assert balanced.makespan_us <= naive.makespan_us * (1 + 1e-9)
    assert balanced.bytes_sent == balanced.needed_bytes == naive.bytes_sent
    assert balanced == plan_reshards(tensors, hosts, mode, piece_bytes=piece_bytes), "equal input, equal plan"


def together(tensors, hosts, mode="broadcast", **how) -> Together:
    """A joint plan, replayed on the tensors that it speaks of."""
    found = plan_together(tensors, hosts, mode, **how)
    parts = [
        replace(tensors[index], target=[tensors[index].targets[at] for at in targets])
        for index, targets in found.parts
    ]
    check_values(found.plan, parts)
    check_times(found.plan, hosts)
    served = sorted((index, at) for index, targets in found.parts for at in targets)
    assert served == [(index, at) for index, one in enumerate(tensors) for at in range(len(one.targets))]
    return found


def test_a_chain_runs_through_the_hosts_of_both_targets():
    """The source's link carries the tensor once, where two reshards for themselves carry it twice."""
    hosts = Hosts.of(1, 3, link_bytes_per_s=1e6)
    tensor = Tensor((1000,), 4, Layout((0,), (R,)), [Layout((1,), (R,)), Layout((2,), (R,))])
    found = together([tensor], hosts, piece_bytes=400)
    assert found.parts == ((0, (0, 1)),)
    assert [(one.sender, sorted(one.receivers)) for one in found.plan.transfers] == [(0, [1, 2])]
    assert found.plan.makespan_us == pytest.approx(4000 + 400)
    alone = plan_reshards([replace(tensor, target=target) for target in tensor.targets], hosts)
    assert alone.makespan_us == pytest.approx(8000)


def test_terms_of_a_sum_are_a_target_apart():
    hosts = Hosts.of(1, 5)
    targets = [Layout((1,), (R,)), Layout((2, 4), (Partial(),)), Layout((3,), (R,))]
    found = together([Tensor((50,), 8, Layout((0,), (R,)), targets)], hosts, piece_bytes=8)
    assert found.parts == ((0, (0, 2)), (0, (1,)))
    assert targets[1].zero_ranks() == (4,)
    with pytest.raises(UsageError, match="its ranks have terms, not the value; plan that target as a tensor"):
        plan_reshards([Tensor((50,), 8, Layout((0,), (R,)), targets)], hosts)
    with pytest.raises(UsageError, match="no target layout"):
        plan_reshards([Tensor((50,), 8, Layout((0,), (R,)), [])], hosts)


@st.composite
def some_tensor_for_several(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=2)))
    source, *targets = (draw(some_layout(len(shape))) for _ in range(draw(st.integers(2, 4))))
    return Tensor(shape, draw(st.sampled_from([1, 8])), source, targets)


@settings(max_examples=40)
@given(
    st.lists(some_tensor_for_several(), min_size=1, max_size=2),
    some_hosts(),
    st.sampled_from(MODES),
    st.integers(1, 100),
)
def test_any_tensors_for_any_targets_arrive_once_and_no_later_than_each_for_itself(
    tensors, hosts, mode, piece_bytes
):
    found = together(tensors, hosts, mode, piece_bytes=piece_bytes)
    apart = plan_reshards(
        [replace(one, target=target) for one in tensors for target in one.targets],
        hosts,
        mode,
        piece_bytes=piece_bytes,
    )
    assert found.plan.makespan_us <= apart.makespan_us * (1 + 1e-9)
    # also where the choice is not theirs, boxes of targets that lie across one another arrive once
    joined = plan_reshards(tensors, hosts, mode, piece_bytes=piece_bytes)
    check_values(joined, tensors)
    assert joined.bytes_sent <= apart.bytes_sent
    assert found == plan_together(tensors, hosts, mode, piece_bytes=piece_bytes)
