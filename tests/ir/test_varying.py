"""What differs along an axis, op by op."""

from __future__ import annotations

from stretto.ir.program import Op, Ref, TensorSpec
from stretto.ir.varying import varying

SPEC = TensorSpec((4,), "float32")


def op(name: str, target: str, *args: object) -> Op:
    return Op(name, target, args, (), (SPEC,))


def test_shards_coordinates_and_chunks_differ_and_sums_are_equal_again() -> None:
    ops = (
        op("equal", "aten.relu.default", Ref("batch/0")),
        op("part", "aten.mm.default", Ref("equal"), Ref("param/w")),
        op("sum", "comm.all_reduce", Ref("part"), "sum", "tp", 2),
        op("summed", "comm.wait", Ref("sum")),
        op("slices", "comm.reduce_scatter", Ref("part"), "sum", "tp", 2),
        op("slice", "comm.wait", Ref("slices")),
        op("gather", "comm.all_gather", Ref("slice"), "tp", 2),
        op("gathered", "comm.wait", Ref("gather")),
        op("place", "axis.index", "tp", 2),
        op("cut", "axis.chunk", Ref("equal"), 0, "tp", 2),
        op("mixed", "aten.add.Tensor", Ref("summed"), Ref("cut")),
    )
    assert varying(ops, {"param/w"}, "tp") == {"param/w", "part", "slices", "slice", "place", "cut", "mixed"}
    assert varying(ops, (), "dp") == set(), "nothing here is of the other axis"


def test_a_sum_along_another_axis_changes_nothing() -> None:
    ops = (
        op("part", "aten.mm.default", Ref("batch/0"), Ref("param/w")),
        op("sum", "comm.all_reduce", Ref("part"), "sum", "dp", 2),
    )
    assert "sum" in varying(ops, {"param/w"}, "tp")
