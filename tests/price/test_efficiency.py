"""Op times by shape: waves of tiles, short products, unaligned dims, traffic, launches."""

from __future__ import annotations

import math

import pytest
from benchmarks.analytic import run_us
from hypothesis import given
from hypothesis import strategies as st

from stretto.price.devices import device
from stretto.price.efficiency import Matmul, matmul_dims, op_us

ROOF = device("a100-80gb").roof()
DIM = st.integers(1, 20_000)


def rate(dims: Matmul) -> float:
    """Part of the peak that a product reaches."""
    return dims.flops / op_us(0, 0, dims, ROOF) / ROOF.flops_per_us


def test_a_large_product_reaches_what_was_measured_and_none_more() -> None:
    large = rate(Matmul(16384, 13824, 8192))
    assert 0.9 * ROOF.efficiency.matmul < large <= ROOF.efficiency.matmul


@given(DIM, DIM, DIM)
def test_no_product_beats_the_peak(m: int, n: int, k: int) -> None:
    assert 0 < rate(Matmul(m, n, k)) <= ROOF.efficiency.matmul


@given(DIM, DIM, DIM, st.integers(0, 10**12))
def test_times_are_finite_positive_and_grow_with_traffic(m: int, n: int, k: int, nbytes: int) -> None:
    dims = Matmul(m, n, k)
    assert 0 < op_us(0, nbytes, dims, ROOF) <= op_us(0, 2 * nbytes, dims, ROOF) < math.inf


def test_one_tile_more_than_the_cores_hold_costs_a_wave() -> None:
    full = op_us(0, 0, Matmul(256 * ROOF.cores, 128, 4096), ROOF)
    more = op_us(0, 0, Matmul(256 * ROOF.cores + 64, 128, 4096), ROOF)
    assert more > 1.2 * full


def test_short_products_and_small_ones_reach_less() -> None:
    assert rate(Matmul(8192, 8192, 64)) < 0.8 * rate(Matmul(8192, 8192, 8192))
    assert rate(Matmul(128, 128, 128)) < 0.05


def test_rows_that_do_not_begin_at_16_bytes_cost_more() -> None:
    padded, plain = Matmul(4096, 50264, 1024), Matmul(4096, 50257, 1024)
    assert op_us(0, 0, plain, ROOF) > 1.5 * op_us(0, 0, padded, ROOF)


def test_a_product_of_many_small_ones_fills_the_cores() -> None:
    one, many = Matmul(128, 128, 128), Matmul(128, 128, 128, batch=64)
    assert op_us(0, 0, many, ROOF) < 2 * op_us(0, 0, one, ROOF)


def test_other_ops_go_by_their_bytes_or_their_arithmetic() -> None:
    reach = ROOF.efficiency
    nbytes = 1e9
    expected = nbytes / (2e6 * reach.memory) + reach.kernel_us
    assert op_us(0, nbytes, None, ROOF) == pytest.approx(expected)
    assert op_us(1e12, nbytes, None, ROOF) == pytest.approx(1e12 / (312e6 * reach.matmul) + reach.kernel_us)
    assert op_us(0, 0, None, ROOF) == reach.kernel_us


def test_a_run_of_ops_takes_the_longer_of_device_and_host() -> None:
    launch = ROOF.efficiency.launch_us
    assert run_us([1.0, 2.0], 10, ROOF) == 10 * launch
    assert run_us([1e6, 2.0], 10, ROOF) == 1e6 + 2.0


@pytest.mark.parametrize(
    ("target", "shapes", "expected"),
    [
        ("aten.mm.default", [(2, 3), (3, 5)], Matmul(2, 5, 3)),
        ("aten.addmm.default", [(5,), (2, 3), (3, 5)], Matmul(2, 5, 3)),
        ("aten.bmm.default", [(7, 2, 3), (7, 3, 5)], Matmul(2, 5, 3, 7)),
        ("aten.baddbmm.default", [(7, 2, 5), (7, 2, 3), (7, 3, 5)], Matmul(2, 5, 3, 7)),
        ("aten.add.Tensor", [(2, 3), (2, 3)], None),
        ("aten._scaled_dot_product_flash_attention.default", [(1, 2, 3, 4)] * 3, None),
    ],
)
def test_the_product_of_an_op(target: str, shapes: list[tuple[int, ...]], expected: Matmul | None) -> None:
    assert matmul_dims(target, shapes) == expected
