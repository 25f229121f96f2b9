"""Plans against the figures of the paper on cross-mesh resharding, and what else a plan must be.

The unit is the time of the full tensor over the link of one host. The figures are those at which Zhuang et
al. (MLSys 2023) compare orders and senders, worked out by hand: each of two hosts sends, and each of two
receives, half of the tensor. Layouts are in the notation of that paper.
"""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from stretto.errors import UsageError
from stretto.tensor.layout import Layout
from stretto.tensor.reshard.arguments import between_meshes, read
from stretto.tensor.reshard.plan import Tensor, plan_reshards
from stretto.tensor.reshard.tasks import Hosts

from .replay import check_values

R, S0 = Replicate(), Shard(0)
SHAPE = (1024, 1024, 512)


def plan_reshard(shape, itemsize_bytes, source, target, hosts, mode="broadcast", **how):
    return plan_reshards([Tensor(shape, itemsize_bytes, source, target)], hosts, mode, **how)


def units(shape, source, target, **how):
    """Makespan, in times of the full tensor over one link."""
    before, after, hosts = between_meshes(source, target)
    plan = plan_reshard(shape, 4, before, after, hosts, **how)
    return plan.makespan_us / plan.full_us


CASES = [
    # shape, source, target; makespan of naive choices, of the best
    (SHAPE, "2x4:S0RR", "2x4:S0RR", 0.5, 0.5),
    (SHAPE, "2x4:RS0R", "2x4:S0RR", 0.75, 0.5),
    (SHAPE, "2x4:S1RR", "2x4:S0RR", 1.0, 0.5),
    ((3072, 1024, 170), "2x4:S0RR", "3x4:S0RR", 1.0, 0.5),
]


@pytest.mark.parametrize(("shape", "source", "target", "naive", "best"), CASES)
def test_published_cases_reach_their_bound(shape, source, target, naive, best):
    assert units(shape, source, target) == pytest.approx(best, rel=1e-12)
    assert units(shape, source, target, choice="naive") == pytest.approx(naive, rel=1e-12)
    before, after, hosts = between_meshes(source, target)
    plan = plan_reshard(shape, 4, before, after, hosts)
    assert plan.bound_us / plan.full_us == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(("shape", "source", "target", "naive"), [(*case[:3], n) for case, n in zip(
    CASES, (2.0, 3.0, 4.0, 4.0))])  # fmt: skip
def test_point_to_point_sends_a_copy_to_every_device(shape, source, target, naive):
    """Four devices to a host: four times the half with balanced senders, up to twice that with naive ones."""
    assert units(shape, source, target, mode="point_to_point") == pytest.approx(2.0, rel=1e-12)
    assert units(shape, source, target, mode="point_to_point", choice="naive") == pytest.approx(naive)


def test_a_chain_is_flat_in_the_number_of_receiving_hosts():
    nbytes, piece_bytes, latency_us = 64_000_000, 250_000, 20.0
    for count in range(1, 9):
        hosts = Hosts.of(1, count + 1, link_bytes_per_s=1e9, latency_us=latency_us)
        target = Layout(tuple(range(1, count + 1)), (R,))
        broadcast, apart = (
            plan_reshard((nbytes,), 1, Layout((0,), (R,)), target, hosts, mode, piece_bytes=piece_bytes)
            for mode in ("broadcast", "point_to_point")
        )
        a_piece_us = piece_bytes / 1e3 + latency_us
        assert broadcast.makespan_us == pytest.approx(64_000 + latency_us + (count - 1) * a_piece_us)
        assert apart.makespan_us == pytest.approx(64_000 * count + latency_us)
        assert broadcast.bound_us == pytest.approx(64_000 + latency_us)
        assert set(broadcast.sent_bytes.values()) == {nbytes}, "each link carries it once"


def test_a_chain_goes_through_the_devices_of_a_host_before_the_next_host():
    hosts = Hosts((0, 1, 2, 1, 2))
    plan = plan_reshard((8,), 4, Layout((0,), (R,)), Layout((1, 2, 3, 4), (R,)), hosts)
    assert [one.receivers for one in plan.transfers] == [(1, 3, 2, 4)]
    assert (plan.link_bytes, plan.bytes_sent) == (64, 128)


def test_a_host_that_holds_a_box_serves_its_own_devices():
    """Ranks 0 and 1 share host 0, 2 and 3 host 1; rank 3 must not hear from host 0."""
    hosts = Hosts.of(2, 4)
    for mode in ("broadcast", "point_to_point"):
        plan = plan_reshard((8,), 4, Layout((0, 2), (R,)), Layout((0, 1, 2, 3), (R,)), hosts, mode)
        assert [(one.sender, one.receivers) for one in plan.transfers] == [(0, (1,)), (2, (3,))]
        assert [copy.rank for copy in plan.copies] == [0, 2]
        assert (plan.link_bytes, plan.makespan_us, plan.bound_us) == (0, 0.0, 0.0)


def test_two_tensors_together_share_the_links_better_than_one_after_the_other():
    """Each tensor alone keeps one of two senders busy; together they take no longer than one of them."""
    hosts = Hosts.of(1, 4, link_bytes_per_s=1e6)
    one = Tensor((100,), 1, Layout((0,), (R,)), Layout((2,), (R,)))
    other = Tensor((100,), 1, Layout((1,), (R,)), Layout((3,), (R,)))
    plan = plan_reshards([one, other], hosts)
    assert plan.makespan_us == pytest.approx(100.0)
    assert plan.full_us == pytest.approx(200.0)
    check_values(plan, [one, other])
    # kept by both senders: one tensor is sent by each
    both = [Tensor((100,), 1, Layout((0, 1), (R,)), Layout((rank,), (R,))) for rank in (2, 3)]
    plan = plan_reshards(both, hosts)
    assert sorted(one.sender for one in plan.transfers) == [0, 1]
    assert plan.makespan_us == pytest.approx(100.0)


def test_boxes_are_cut_where_whole_ones_leave_a_sender_idle():
    """Two hosts have what three need a third of each: one would send two thirds, cut they send half each."""
    assert units(SHAPE, "2x1:RRR", "3x1:S0RR") == pytest.approx(0.5, rel=1e-2)
    assert units(SHAPE, "2x1:RRR", "3x1:S0RR", choice="naive") == pytest.approx(1.0)


HOSTS = Hosts.of(1, 4)
HALVES, OTHERS = Layout((0, 1), (S0,)), Layout((2, 3), (S0,))
REFUSED = {
    r"not reduced yet.*Shard\(dim=0\)": lambda: plan_reshard(
        (8,), 4, Layout((0, 1), (Partial(),)), OTHERS, HOSTS
    ),
    r"ranks \[3\]": lambda: plan_reshard((8,), 4, HALVES, OTHERS, Hosts.of(1, 3)),
    "broadcast, point_to_point": lambda: plan_reshard((8,), 4, HALVES, OTHERS, HOSTS, "ring"),
    "no dim 0": lambda: plan_reshard((), 4, HALVES, OTHERS, HOSTS),
    "itemsize_bytes=0": lambda: plan_reshard((8,), 0, HALVES, OTHERS, HOSTS),
    "below 0": lambda: plan_reshard((-8,), 4, HALVES, OTHERS, HOSTS),
    "piece_bytes=0": lambda: plan_reshard((8,), 4, HALVES, OTHERS, HOSTS, piece_bytes=0),
    "balanced or naive": lambda: plan_reshard((8,), 4, HALVES, OTHERS, HOSTS, choice="best"),
    "link_bytes_per_s": lambda: Hosts((0, 1), link_bytes_per_s=0),
    "latency_us": lambda: Hosts((0, 1), latency_us=-1.0),
    "at least 1 of each": lambda: Hosts.of(0, 4),
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_planned_is_refused(word):
    with pytest.raises(UsageError, match=word):
        REFUSED[word]()


def test_a_letter_is_for_a_dim_and_a_digit_for_an_axis():
    assert read("2x4:S0RR").placements == (Shard(0), R)
    assert read("2x4:RS1S0").placements == (Shard(2), Shard(1))
    assert read("2x4:RS01").placements == (Shard(1), Shard(1))
    assert read("2x4:RRR").dims == 3
    assert read("1x1:").dims == 0


def test_the_target_stands_on_the_hosts_after_the_source():
    source, target, hosts = between_meshes("2x2:S0R", "1x3:RS1", Hosts((), 5.0, 7.0))
    assert source == Layout(((0, 1), (2, 3)), (Shard(0), R))
    assert target == Layout(((4, 5, 6),), (R, Shard(1)))
    assert hosts == Hosts((0, 0, 1, 1, 2, 2, 2), 5.0, 7.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("S0RR", "HOSTSxDEVICES:LETTERS"),
        ("2x4:S2RR", "HOSTSxDEVICES:LETTERS"),
        ("2x4:SRR", "such as 2x4:S0RR"),
        ("0x4:S0", "at least one host"),
        ("2x4:S0S0", "axis 0 cuts twice"),
        ("2x4:S00", "axis 0 cuts twice"),
        ("2x4:S10", "write S01"),
    ],
)
def test_what_is_not_in_the_notation_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        read(text)
