"""Ops to measure when no plan says which: sizes of each kind, from which other sizes are interpolated.

Products (square, and those of linear layers, forward and backward), fused attention, and ops that only move
memory, each as the dispatcher sees it. Makes ops, runs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.ir.program import Op, Ref, TensorSpec

Sample = tuple[Op, dict[str, TensorSpec]]

PRODUCTS = (
    *((n, n, n) for n in (64, 128, 256, 512, 1024)),
    *((rows, 4 * hidden, hidden) for rows in (64, 256, 1024) for hidden in (256, 1024)),
    *((rows, hidden, 4 * hidden) for rows in (64, 256, 1024) for hidden in (256, 1024)),
)
"""(m, n, k) of products: a transformer's block at a few widths and lengths."""

LINEAR_ROWS = (64, 96, 144, 216, 324)
LINEAR_SIZES = (
    *((384, 768), (768, 768), (768, 1536), (1536, 768)),
    *((512, 512), (512, 1024), (1024, 512), (1024, 1024)),
    *((1024, 2048), (2048, 1024), (1024, 4096), (4096, 1024)),
)
"""Rows, and (inputs, outputs), of linear layers. A library has a kernel for few rows and another for many,
and matrices whose rows lie 4 KiB apart have less of a cache: measured with oneMKL, an input gradient of 128
rows runs at 149 GFLOP/s with 1536 inputs and 768 outputs, and at 128 with 2048 and 1024; of 256 at 150 both.
So rows lie close together, and widths are powers of two and others."""

ACCELERATOR_PRODUCTS = tuple((n, n, n) for n in (256, 1024, 4096, 8192))

ACCELERATOR_ROWS = (1024, 8192)
ACCELERATOR_SIZES = ((1024, 4096), (4096, 1024), (4096, 16384), (16384, 4096))
"""The MLP of a transformer, as `LINEAR_SIZES`. Assumed: no accelerator was at hand to see where kernels
change."""

ATTENTIONS = ((1, 4, 64, 32), (1, 4, 256, 64), (2, 8, 256, 64), (1, 8, 1024, 64))
"""(batch, heads, sequence, head)."""

ELEMENTS = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
"""Elements of ops that only move memory: within the first cache, the second, the last, and memory."""

MEMORY_OPS = ("aten.add.Tensor", "aten.mul.Tensor", "aten.gelu.default", "aten.clone.default")


def sweep_ops(device: str) -> Iterator[Sample]:
    """The sweep. device: "cpu" or "cuda", whose products are larger and in bfloat16 too."""
    for count in ELEMENTS:
        x = TensorSpec((count // 256, 256), "float32") if count >= 256 else TensorSpec((count,), "float32")
        for target in MEMORY_OPS:
            two = target in ("aten.add.Tensor", "aten.mul.Tensor")
            yield _op(target, x, *([x, x] if two else [x]))
        yield _softmax(x)
    for dtype in ("float32",) if device == "cpu" else ("float32", "bfloat16"):
        for m, n, k in sorted(PRODUCTS if device == "cpu" else ACCELERATOR_PRODUCTS, key=_work):
            yield _product(TensorSpec((m, k), dtype), TensorSpec((k, n), dtype))
        if device == "cpu":
            yield from linear_ops(LINEAR_ROWS, LINEAR_SIZES, dtype)
        else:
            yield from linear_ops(ACCELERATOR_ROWS, ACCELERATOR_SIZES, dtype)
    for batch, heads, length, head in ATTENTIONS:
        x = TensorSpec((batch, heads, length, head), "float32" if device == "cpu" else "bfloat16")
        yield _op(
            "aten._scaled_dot_product_flash_attention" + ("_for_cpu" if device == "cpu" else "") + ".default",
            x,
            x,
            x,
            x,
            flops=4 * batch * heads * length * length * head,
        )


def linear_ops(rows: Sequence[int], sizes: Sequence[tuple[int, int]], dtype: str) -> Iterator[Sample]:
    """The three products of a linear layer of each (inputs, outputs), in the layouts that autograd gives
    them: forward, input gradient, weight gradient. Layers of equal rows follow each other."""
    for count in rows:
        for inputs, outputs in sizes:
            x, dy = TensorSpec((count, inputs), dtype), TensorSpec((count, outputs), dtype)
            weight = TensorSpec((outputs, inputs), dtype)
            yield _product(x, _transposed(weight))
            yield _product(dy, weight)
            yield _product(_transposed(dy), x)


def _transposed(matrix: TensorSpec) -> TensorSpec:
    rows, columns = matrix.shape
    return TensorSpec((columns, rows), matrix.dtype, (1, columns))


def _product(left: TensorSpec, right: TensorSpec) -> Sample:
    (m, k), (_, n) = left.shape, right.shape
    return _op("aten.mm.default", TensorSpec((m, n), left.dtype), left, right, flops=2 * m * n * k)


def _work(dims: tuple[int, int, int]) -> int:
    return dims[0] * dims[1] * dims[2]


def _softmax(x: TensorSpec) -> Sample:
    return Op("y", "aten._softmax.default", (Ref("x0"), -1, False), (), (x,)), {"x0": x}


def _op(target: str, result: TensorSpec, *reads: TensorSpec, flops: int = 0) -> Sample:
    specs = {f"x{at}": spec for at, spec in enumerate(reads)}
    return Op("y", target, tuple(Ref(name) for name in specs), (), (result,), flops=flops), specs
