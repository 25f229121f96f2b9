"""The signatures by which op times are kept."""

from __future__ import annotations

from stretto.ir.prices import signature
from stretto.ir.program import Const, Op, Ref, TensorSpec


def test_a_signature_says_shapes_layouts_and_numbers_and_no_names() -> None:
    specs = {"a": TensorSpec((2, 3), "float32"), "b": TensorSpec((3, 4), "bfloat16", (1, 3))}
    op = Op("mm_1", "aten.mm.default", (Ref("a"), Ref("b")))
    other = Op("mm_2", "aten.mm.default", (Ref("x"), Ref("y")))
    renamed = {"x": specs["a"], "y": specs["b"]}
    assert signature(op, specs) == "aten.mm.default(float32[2,3], bfloat16[3,4]{1,3})"
    assert signature(other, renamed) == signature(op, specs)
    listed = Op("c", "aten.cat.default", ((Ref("a"), Ref("b")), -1), (("dtype", Const("dtype", "float32")),))
    assert signature(listed, specs) == (
        "aten.cat.default([float32[2,3], bfloat16[3,4]{1,3}], -1, dtype=dtype:float32)"
    )
    assert signature(Op("s", "aten.sum.dim_IntList", (Ref("a"), (0,))), specs) != signature(
        Op("s", "aten.sum.dim_IntList", (Ref("a"), (1,))), specs
    )
