"""What differs along an axis, op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.ir.placed_programs import place_all, placers_of
from stretto.ir.program import Op, Ref, Shard, TensorSpec

SPEC = TensorSpec((4, 4), "float32")
SHARDS = {"param/w": Shard("tp", 0)}


def op(name: str, target: str, *args: object) -> Op:
    return Op(name, target, args, (), (SPEC,))


def differing(
    ops: Sequence[Op], given: dict[str, TensorSpec], shards: Mapping[str, Shard], axis: str
) -> set[str]:
    """Values that two ranks along an axis do not both have in full."""
    placers = placers_of(axis, 2, shards)
    list(place_all([ops], placers, given))
    return {name for placer in placers for name, at in placer.values.items() if not at.is_full}


def differ(ops: tuple[Op, ...], axis: str) -> set[str]:
    given = {"batch/0": SPEC, "param/w": SPEC}
    return differing(ops, given, SHARDS if axis == "tp" else {}, axis)


def test_shards_coordinates_and_chunks_differ_and_sums_are_equal_again() -> None:
    ops = (
        op("equal", "aten.relu.default", Ref("batch/0")),
        op("part", "aten.relu.default", Ref("param/w")),
        op("partial_sum", "aten.sum.dim_IntList", Ref("part"), (0,)),
        op("sum", "comm.all_reduce", Ref("partial_sum"), "sum", "tp", 2),
        op("summed", "comm.wait", Ref("sum")),
        op("slices", "comm.reduce_scatter", Ref("partial_sum"), "sum", "tp", 2),
        op("slice", "comm.wait", Ref("slices")),
        op("gather", "comm.all_gather", Ref("slice"), "tp", 2),
        op("gathered", "comm.wait", Ref("gather")),
        op("place", "axis.index", "tp", 2),
        op("cut", "axis.chunk", Ref("equal"), 0, "tp", 2),
        op("mixed", "aten.add.Tensor", Ref("summed"), Ref("cut")),
    )
    wanted = {"param/w", "part", "partial_sum", "slices", "slice", "place", "cut", "mixed"}
    assert differ(ops, "tp") == wanted
    assert differ(ops, "dp") == set(), "nothing here is of the other axis"


def test_a_sum_along_another_axis_changes_nothing() -> None:
    ops = (
        op("part", "aten.sum.dim_IntList", Ref("param/w"), (0,)),
        op("sum", "comm.all_reduce", Ref("part"), "sum", "dp", 2),
    )
    assert "sum" in differ(ops, "tp")
