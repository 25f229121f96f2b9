"""Layouts have the boxes that DTensor has, and refuse what is no layout."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from stretto.errors import UsageError
from stretto.tensor.clip import layout_on
from stretto.tensor.layout import Layout, region_shape
from tests.tensor.lone import single_rank

R = Replicate()


CASES = [
    *((shape, (4,), (Shard(0),)) for shape in ((10,), (5,), (2,), (4, 3), (0, 3), (1,), (9, 2))),
    *((shape, (4,), (R,)) for shape in ((), (3,), (2, 0))),
    ((3, 7), (4,), (Shard(1),)),
    ((3, 7), (4,), (Shard(-1),)),
    *((shape, (2, 2), pair) for shape in ((5, 3), (2, 1), (10, 6)) for pair in itertools.product(
        (Shard(0), Shard(1), R), repeat=2)),
    *(((n,), (2, 3), (Shard(0), Shard(0))) for n in range(12)),
    ((7, 5, 3), (2, 1, 3), (Shard(2), Shard(0), Shard(0))),
    ((), (2, 2), (R, R)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), CASES)
def test_a_rank_holds_what_dtensor_gives_it(shape, mesh_shape, placements):
    world = torch.Size(mesh_shape).numel()
    # the mesh is not in order of rank: where a rank is counts, not its number
    ranks = torch.arange(world).flip(0).reshape(mesh_shape)
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    layout = Layout(ranks.tolist(), placements)
    for rank in range(world):
        with single_rank(rank, world):
            mesh = DeviceMesh("cpu", ranks)
            assert layout_on(mesh, placements) == layout
            kept = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
        region = layout.region(shape, rank)
        assert region is not None
        assert region_shape(region) == tuple(kept.shape)
        assert torch.equal(full[tuple(slice(*ends) for ends in region)], kept)
        assert layout.regions(shape)[rank] == region


def test_a_rank_off_the_mesh_holds_nothing_and_a_partial_one_holds_a_whole_term():
    layout = Layout(((4, 5), (6, 7)), (Partial(), Shard(0)))
    assert layout.region((4,), 0) is None
    assert layout.region((4,), 7) == ((2, 4),)
    assert layout.region((4,), 6) == ((0, 2),)
    assert layout.partial_axes == (0,)


def test_zeros_stand_on_all_but_the_first_of_a_summed_axis():
    assert Layout(((4, 5), (6, 7)), (Partial(), Shard(0))).zero_ranks() == (6, 7)
    assert Layout(((4, 5), (6, 7)), (Partial(), Partial())).zero_ranks() == (5, 6, 7)
    assert Layout((4, 5), (Partial("avg"),)).zero_ranks() == ()
    with pytest.raises(UsageError, match=r"product.*use Replicate\(\)"):
        Layout((4, 5), (Partial("product"),)).zero_ranks()


def test_a_partial_axis_is_reduced_to_distinct_tiles_where_it_can_be():
    partial = Layout(((0, 1), (2, 3)), (Partial(), Shard(0)))
    assert partial.reduced((8, 6)).placements == (Shard(1), Shard(0))
    assert partial.reduced((8, 1)).placements == (R, Shard(0))
    assert Layout((0, 1), (Partial(),)).reduced((3, 5, 4)).placements == (Shard(2),), "even beats large"
    assert Layout((0, 1), (Partial(),)).reduced(()).placements == (R,)
    assert Layout((0, 1), (Partial(), )).reduced((7, 5)).placements == (Shard(0),)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "placements", "said"),
    [
        (((0, 1), (2,)), (R, R), "ragged"),
        ((0, (1, 2)), (R,), "ragged"),
        ((0, 1, 0), (R,), "repeats a rank"),
        ((), (R,), "no rank"),
        ((0, -1), (R,), "integers from 0"),
        ((0, 1.5), (R,), "integers from 0"),
        ((0, 1), (R, R), "one placement for each axis"),
        ((0, 1), ("R",), r"use Shard\(dim\), Replicate\(\) or Partial\(\)"),
        (3, (R,), "nested tuples"),
    ],
)
def test_what_is_no_layout_is_refused(ranks, placements, said):
    with pytest.raises(UsageError, match=said):
        Layout(ranks, placements)
