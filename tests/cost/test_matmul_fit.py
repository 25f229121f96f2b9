"""Products of shapes that were not measured are priced by those that were."""

from __future__ import annotations

from itertools import pairwise

import pytest

from stretto.cost.matmul_fit import MatmulFit, Product

SHAPES = [(m, n, k) for m in (64, 256) for n in (128, 512) for k in (128, 1024)]


def _key(m: int, n: int, k: int, transposed: bool = False) -> str:
    layout = f"{{1,{k}}}" if transposed else ""
    return f"aten.mm.default(float32[{m},{k}], float32[{k},{n}]{layout})"


def _us(m: int, n: int, k: int) -> float:
    """90 GFLOP/s, 8 GB/s for the right operand, 5 us of overhead."""
    return 2 * m * n * k / 90e3 + 4 * n * k / 8e3 + 5


def test_products_that_follow_the_law_are_priced_exactly() -> None:
    fit = MatmulFit((_key(*shape), _us(*shape)) for shape in SHAPES)
    for shape in ((128, 256, 512), (192, 640, 640), (300, 700, 200)):
        assert fit.us(_key(*shape)) == pytest.approx(_us(*shape), rel=1e-6)


def test_layouts_and_ops_have_times_of_their_own() -> None:
    fit = MatmulFit((_key(*shape), _us(*shape)) for shape in SHAPES)
    assert fit.us(_key(128, 256, 512, transposed=True)) is None
    assert fit.us("aten.bmm.default(float32[4,64,64], float32[4,64,64])") is None
    assert fit.us("aten.add.Tensor(float32[64,64], float32[64,64])") is None


def test_what_is_far_from_all_that_is_known_is_not_priced() -> None:
    fit = MatmulFit((_key(*shape), _us(*shape)) for shape in SHAPES)
    assert fit.us(_key(64, 128, 128 * 100)) is None
    few = MatmulFit((_key(*shape), _us(*shape)) for shape in SHAPES[:3])
    assert few.us(_key(*SHAPES[0])) is None


def test_more_work_never_takes_less_time_even_on_noisy_points() -> None:
    noisy = [(_key(*s), _us(*s) * (1.2 if at % 2 else 0.85)) for at, s in enumerate(SHAPES)]
    fit = MatmulFit(noisy)
    times = [fit.us(_key(m, 256, 256)) for m in (32, 64, 128, 256, 512)]
    assert all(a is not None and b is not None and a <= b for a, b in pairwise(times))


def test_signatures_are_read() -> None:
    product = Product.of("aten.addmm.default(float32[512], float32[128,64]{1,128}, float32[64,512])")
    assert product is not None
    assert (product.dims.m, product.dims.n, product.dims.k) == (128, 512, 64)
    assert product.family[1] == ("float32", "float32 strided", "float32")
    assert Product.of("aten.mm.default(?, ?)") is None
