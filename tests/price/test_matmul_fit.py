"""Products of shapes that were not measured are priced by those that were."""

from __future__ import annotations

import pytest

from stretto.price.alike import MatmulFit

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


def test_what_no_law_knows_is_taken_from_the_nearest_products() -> None:
    def kernels_us(m: int, n: int, k: int) -> float:
        """Few rows have a kernel of their own, which is slow where right operands are wide."""
        return _us(m, n, k) * (1.3 if m <= 128 and n >= 1024 else 1.0)

    rows, widths = (64, 96, 128, 192, 256), (256, 512, 1024, 2048)
    fit = MatmulFit((_key(m, n, k), kernels_us(m, n, k)) for m in rows for n in widths for k in (512, 1024))
    for shape in ((110, 1024, 1024), (110, 2048, 700), (220, 1400, 1024), (80, 400, 512)):
        assert fit.us(_key(*shape)) == pytest.approx(kernels_us(*shape), rel=0.05)
    # From few rows of narrow operands and many of wide ones no one can know the slow kernel.
    blind = MatmulFit(
        (_key(m, n, k), kernels_us(m, n, k))
        for m, n in ((64, 256), (128, 512), (192, 1024), (256, 2048))
        for k in (512, 1024)
    )
    assert blind.us(_key(96, 1024, 1024)) == pytest.approx(_us(96, 1024, 1024), rel=0.05)


def test_a_product_that_was_measured_twice_has_the_mean_of_both() -> None:
    key = _key(*SHAPES[0])
    twice = [(key, _us(*SHAPES[0]) * factor) for factor in (1.2, 1.4)]
    fit = MatmulFit([*((_key(*shape), _us(*shape)) for shape in SHAPES[1:]), *twice])
    assert fit.us(key) == pytest.approx(1.3 * _us(*SHAPES[0]), rel=0.02)


def test_batches_lie_apart() -> None:
    def batched(batch: int, side: int) -> str:
        return f"aten.bmm.default(float32[{batch},{side},{side}], float32[{batch},{side},{side}])"

    def us(batch: int, side: int) -> float:
        """One product alone has a kernel that is half as fast."""
        return batch * _us(side, side, side) * (2.0 if batch == 1 else 1.0)

    fit = MatmulFit((batched(b, side), us(b, side)) for b in (1, 8, 64) for side in (32, 64, 128, 256))
    assert fit.us(batched(1, 96)) == pytest.approx(us(1, 96), rel=0.1)
    assert fit.us(batched(16, 96)) == pytest.approx(us(16, 96), rel=0.1)
    assert fit.us(batched(64 * 100, 96)) is None, "far from all that is known"


def test_products_of_size_zero_are_neither_read_nor_priced() -> None:
    fit = MatmulFit([*((_key(*shape), _us(*shape)) for shape in SHAPES), (_key(0, 128, 128), 3.0)])
    assert fit.us(_key(128, 256, 512)) == pytest.approx(_us(128, 256, 512), rel=1e-6)
    assert fit.us(_key(0, 128, 128)) is None
