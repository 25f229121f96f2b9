"""Times of matrix products of shapes that were not measured, from products that were.

A product of (m, k) by (k, n) takes time for its arithmetic, and for bringing each of its three matrices in
and out (a BLAS packs the operands into blocks; Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication", 2008). So its time is close to

    a 2mnk + b nk + c mk + d mn + e        all of a to e at least 0

with coefficients of their own for each op, dtype and layout of the operands. They are fitted to relative
errors. What that law does not know, such as which kernel a library takes for few rows, or rows that lie 4 KiB
apart, is taken from the products that are nearest: each was so much longer or shorter than the law says, and
counts by one over the fourth power of its distance, in doublings of the dims (D. Shepard, "A Two-Dimensional
Interpolation Function for Irregularly-Spaced Data", 1968).

Measured on one core with oneMKL, from the products of two GPTs (128 rows of width 512, 256 of 1024) and those
of `measure.time_ops`, the sum for 128 rows of width 1024 comes out 0.4 % too high, and for 192 rows of width
640 it is right; by the law alone 7 and 1 % too low, and without the sweep 6 and 1 %. Touches no device.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.ir.program import TensorSpec
from stretto.price.efficiency import Matmul, matmul_dims

LEAST_POINTS = 5
"""As many as there are coefficients. Fewer products of a family say too little about what makes them slow."""

BEYOND = 4.0
"""A dim this many times below the least or above the most that was measured is still priced. Assumed."""

NEAR = 0.02
"""Added to squares of distances, so that a product that was measured twice has the mean of both. Assumed."""

_SPEC = re.compile(r"(\w+\[[\d,]*\](?:\{[\d,]*\})?)")

Family = tuple[str, tuple[str, ...]]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product: `batch` of (m, k) by (k, n). family: its op, and its operands' dtypes and layouts."""

    family: Family
    dims: Matmul

    @staticmethod
    def of(signature: str) -> Product | None:
        """The product of an op's signature (`stretto.ir.prices.signature`); None for an op that is none."""
        target, _, rest = signature.partition("(")
        specs = [TensorSpec.parse(text) for text in _SPEC.findall(rest)]
        try:
            dims = matmul_dims(target, [spec.shape for spec in specs])
        except ValueError:
            return None  # an operand that is not a matrix
        if dims is None:
            return None
        layouts = tuple(f"{spec.dtype}{'' if spec.stride is None else ' strided'}" for spec in specs)
        return Product((target, layouts), dims)


class MatmulFit:
    """Times of products by family."""

    def __init__(self, known: Iterable[tuple[str, float]]) -> None:
        """known: signature and microseconds of measured ops; those that are no products are left out."""
        points: dict[Family, list[tuple[Matmul, float]]] = defaultdict(list)
        for key, us in known:
            product = Product.of(key)
            if product is not None and us > 0 and product.dims.flops > 0:
                points[product.family].append((product.dims, us))
        self._weights: dict[Family, Floats] = {}
        self._ranges: dict[Family, tuple[Floats, Floats]] = {}
        self._beside: dict[Family, tuple[Floats, Floats]] = {}
        """Where the products lie that were measured, and the logarithms of their times over the law's."""
        for family, result in points.items():
            if len({dims for dims, _ in result}) >= LEAST_POINTS:
                rows = np.array([_terms(dims) / us for dims, us in result])
                self._weights[family] = _least_squares(rows, np.ones(len(result)))
                sides = np.array([_sides(dims) for dims, _ in result])
                self._ranges[family] = (sides.min(axis=0) / BEYOND, sides.max(axis=0) * BEYOND)
                self._beside[family] = (np.log2(sides), -np.log(rows @ self._weights[family]))

    def us(self, signature: str) -> float | None:
        """Microseconds of a product; None for no product, or one unlike all that are known."""
        product = Product.of(signature)
        if product is None or product.family not in self._weights:
            return None
        least, most = self._ranges[product.family]
        sides = _sides(product.dims)
        if (sides < least).any() or (sides > most).any():
            return None
        law_us = float(_terms(product.dims) @ self._weights[product.family])
        places, logs = self._beside[product.family]
        near = (((places - np.log2(sides)) ** 2).sum(axis=1) + NEAR) ** -2
        return law_us * float(np.exp(near @ logs / near.sum())) or None


def _sides(dims: Matmul) -> Floats:
    return np.array((dims.m, dims.n, dims.k, dims.batch), dtype=float)


def _terms(dims: Matmul) -> Floats:
    m, n, k, batch = float(dims.m), float(dims.n), float(dims.k), float(dims.batch)
    return np.array((2 * m * n * k * batch, n * k * batch, m * k * batch, m * n * batch, 1.0))


def _least_squares(rows: Floats, wanted: Floats) -> Floats:
    """Coefficients of at least 0: those that come out below it are dropped, until none does. Plain scales
    differ by 10**9, so columns are scaled first."""
    scale = np.abs(rows).max(axis=0)
    kept = list(range(rows.shape[1]))
    while True:
        result, *_ = np.linalg.lstsq(rows[:, kept] / scale[kept], wanted, rcond=None)
        if (result >= 0).all():
            break
        kept = [column for column, value in zip(kept, result, strict=True) if value > 0]
    weights = np.zeros(rows.shape[1])
    weights[kept] = result / scale[kept]
    return weights
