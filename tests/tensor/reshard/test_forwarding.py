"""A tensor that several meshes need: whoever received it may send it on."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from stretto.tensor.layout import Layout
from stretto.tensor.reshard.forwarding import plan_forwarding
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.plan import Tensor, plan_reshard

from .replay import check_times, check_values

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def checked(shape, source, targets, hosts, **how):
    """Plans of forwarding, each replayed on the layouts that it may take from."""
    plans = plan_forwarding(shape, 4, source, targets, hosts, **how)
    for number, (plan, target) in enumerate(zip(plans, targets)):
        tensor = Tensor(shape, 4, (source, *targets[:number]), target)
        check_values(plan, [tensor])
        check_times(plan, hosts)
    return plans


def test_a_device_beside_one_that_received_it_hears_from_there():
    """Rank 3 stands on host 1, where rank 2 has the tensor once it has been there."""
    hosts = Hosts.of(2, 4)
    first, second = checked((8, 4), Layout((0, 1), (S0,)), [Layout((2,), (R,)), Layout((3,), (R,))], hosts)
    assert {one.sender for one in first.transfers} == {0, 1}
    assert [(one.sender, one.holding, one.receivers) for one in second.transfers] == [(2, 1, (3,))]
    assert second.link_bytes == 0
    alone = plan_reshard((8, 4), 4, Layout((0, 1), (S0,)), Layout((3,), (R,)), hosts)
    assert alone.link_bytes == 8 * 4 * 4


def test_source_and_first_target_share_the_sending_where_each_alone_would_take_longer():
    """One host has it, then another: two receivers of a half each hear one from either."""
    hosts = Hosts.of(1, 4, link_bytes_per_s=1e6)
    _, second = checked((1000,), Layout((0,), (R,)), [Layout((1,), (R,)), Layout((2, 3), (S0,))], hosts)
    assert sorted((one.sender, one.holding) for one in second.transfers) == [(0, 0), (1, 1)]
    assert second.makespan_us == pytest.approx(2000.0)
    alone = plan_reshard((1000,), 4, Layout((0,), (R,)), Layout((2, 3), (S0,)), hosts)
    assert alone.makespan_us == pytest.approx(4000.0)


def test_boxes_of_two_layouts_that_lie_across_one_another():
    hosts = Hosts.of(1, 9)
    targets = [Layout((3, 4), (S1,)), Layout((5, 6), (S0,)), Layout((3, 7, 8), (S0,))]
    checked((7, 5), Layout((0, 1, 2), (S0,)), targets, hosts)
    checked((7, 5), Layout((0, 1, 2), (S0,)), targets, hosts, mode="all_gather")


def test_terms_of_a_sum_serve_no_one():
    hosts = Hosts.of(2, 5)
    partial = Layout((1, 2), (Partial(),))
    plans = checked((8,), Layout((0,), (R,)), [partial, Layout((3,), (R,)), Layout((2,), (R,))], hosts)
    # rank 2 shares its host with rank 3, which has the value; its own term of the sum is zeros
    assert [(one.sender, one.holding) for one in plans[2].transfers] == [(3, 2)]
