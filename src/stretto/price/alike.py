"""Prices by what is alike: ops that were measured, and those like them.

An op's time, the first that is known:

    measured      an op of the same signature
    fitted        a matrix product like others of its op, dtype and layout
    interpolated  ops of the same target and dtype (and kind of mask, of attention) with less and with more
                  work (arithmetic, or bytes where there is none): the time between theirs, on logarithmic
                  scales
    roofline      the best rates that any measured op reached, and the shortest time of one

A product of (m, k) by (k, n) takes time for its arithmetic, and for bringing each of its three matrices in
and out (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). So its time is
close to

    a 2mnk + b nk + c mk + d mn + e        all of a to e at least 0

with coefficients for each op, dtype and layout, fitted to relative errors. What that law does not know, such
as which kernel a library takes for few rows, is taken from the nearest products: each was so much longer or
shorter than the law says, and counts by one over the fourth power of its distance, in doublings of the dims
(D. Shepard, "A Two-Dimensional Interpolation Function for Irregularly-Spaced Data", 1968). Measured on one
core with oneMKL, from the products of two GPTs and those of `measure.time_ops`, sums of other shapes come
out within 0.4 %; by the law alone 1 to 7 % too low.
"""

from __future__ import annotations

import bisect
import math
import re
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean

import numpy as np
import numpy.typing as npt

from stretto.ir.collectives import Collective
from stretto.ir.costs import Costs
from stretto.ir.prices import FREE as FREE_WORD
from stretto.ir.prices import Priced, Pricer, Specs, signature, specs_of, traffic_bytes
from stretto.ir.program import WAIT, Job, Op, TensorSpec
from stretto.price.calibration import Timing
from stretto.price.efficiency import Matmul, matmul_dims
from stretto.price.shared import FREE

LEAST_POINTS = 5
"""As many as there are coefficients. Fewer products of a family say too little about what makes them slow."""

BEYOND = 4.0
"""A dim, or work, this many times below the least or above the most that was measured is still priced by
those; further away the roofline serves. Assumed."""

NEAR = 0.02
"""Added to squares of distances, so that a product that was measured twice has the mean of both. Assumed."""

_SPEC = re.compile(r"(\w+\[[\d,]*\](?:\{[\d,]*\})?)")

Family = tuple[str, tuple[str, ...]]
"""Of products: their op, and their operands' dtypes and layouts."""
Floats = npt.NDArray[np.float64]


def product_of(signature: str) -> tuple[Family, Matmul] | None:
    """The matrix product of an op's signature (`ir.prices.signature`); None for an op that is none."""
    target, _, rest = signature.partition("(")
    specs = [TensorSpec.parse(text) for text in _SPEC.findall(rest)]
    try:
        dims = matmul_dims(target, [spec.shape for spec in specs])
    except ValueError:
        return None  # an operand that is not a matrix
    if dims is None:
        return None
    layouts = tuple(f"{spec.dtype}{'' if spec.stride is None else ' strided'}" for spec in specs)
    return (target, layouts), dims


class MatmulFit:
    """Times of products by family."""

    def __init__(self, known: Iterable[tuple[str, float]]) -> None:
        """known: signature and microseconds of measured ops; those that are no products are left out."""
        points: dict[Family, list[tuple[Matmul, float]]] = defaultdict(list)
        for key, us in known:
            product = product_of(key)
            if product is not None and us > 0 and product[1].flops > 0:
                points[product[0]].append((product[1], us))
        self._laws: dict[Family, tuple[Floats, Floats, Floats]] = {}
        """The law's coefficients; sides of the products that were measured; logarithms of their times over
        the law's."""
        for family, result in points.items():
            if len({dims for dims, _ in result}) >= LEAST_POINTS:
                rows = np.array([_terms(dims) / us for dims, us in result])
                weights = _least_squares(rows, np.ones(len(result)))
                sides = np.array([_sides(dims) for dims, _ in result])
                self._laws[family] = weights, sides, -np.log(rows @ weights)

    def us(self, signature: str) -> float | None:
        """Microseconds of a product; None for no product, or one other than all that are known."""
        product = product_of(signature)
        if product is None or product[0] not in self._laws:
            return None
        family, dims = product
        weights, known, logs = self._laws[family]
        sides = _sides(dims)
        if (sides < known.min(axis=0) / BEYOND).any() or (sides > known.max(axis=0) * BEYOND).any():
            return None
        law_us = float(_terms(dims) @ weights)
        near = (((np.log2(known) - np.log2(sides)) ** 2).sum(axis=1) + NEAR) ** -2
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


_HIDES = re.compile(r"\bTrue\b|\bFalse\b|\bNone\b|\battn_mask=")


class AlikePricer(Pricer):
    """Prices ops from times by signature."""

    @property
    @abstractmethod
    def ops(self) -> Mapping[str, Timing]:
        """Those that are known."""

    @cached_property
    def _alike(self) -> dict[tuple[str, ...], list[tuple[float, float]]]:
        """Family of a signature -> (work, us), ascending by work, one time each."""
        result: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for key, timing in self.ops.items():
            work = float(timing.flops or timing.nbytes)
            if work and timing.us:
                result[_family(key)][work].append(timing.us)
        return {
            family: sorted((work, math.exp(sum(map(math.log, us)) / len(us))) for work, us in times.items())
            for family, times in result.items()
        }

    @cached_property
    def _matmuls(self) -> MatmulFit:
        return MatmulFit((key, timing.us) for key, timing in self.ops.items())

    @cached_property
    def _roof(self) -> tuple[float, float, float]:
        """(flops a microsecond, bytes a microsecond, shortest time)."""
        timings = self.timings()
        flops = max((t.flops / t.us for t in timings), default=0.0)
        rate = max((t.nbytes / t.us for t in timings), default=0.0)
        return flops or math.inf, rate or math.inf, min((t.us for t in timings), default=0.0)

    def timings(self) -> Sequence[Timing]:
        """Those that show rates."""
        return [timing for timing in self.ops.values() if timing.us]

    def look_up(self, op: Op, specs: Specs, key: str) -> Priced | None:
        """The price of an op that was measured."""
        exact = self.ops.get(key)
        return None if exact is None else Priced(exact.us, "measured")

    def view_us(self) -> float:
        """What a view takes that is like no other."""
        return self._roof[2]

    def least_us(self) -> float | None:
        """What an op takes that has next to no work; None where that is not known better than by the least
        of its kind."""
        return None

    def price(self, op: Op, specs: Specs) -> Priced:
        """As `Pricer.price`."""
        if op.target in FREE:
            return Priced(0.0, FREE_WORD)
        key = signature(op, specs)
        known = self.look_up(op, specs, key)
        if known is not None:
            return known
        us = self._matmuls.us(key)
        if us is not None:
            return Priced(us, "fitted")
        moved = traffic_bytes(op, specs)
        us = _between(self._alike.get(_family(key), []), float(op.flops or moved), self.least_us())
        if us is not None:
            return Priced(us, "interpolated")
        flops_per_us, bytes_per_us, least_us = self._roof
        if op.alias is not None:
            return Priced(self.view_us(), "roofline")
        # What does not work in place, in a copy, starts with a buffer, and moves nothing.
        if op.kind is not None and not op.kind.in_place:
            return Priced(least_us, "roofline")
        return Priced(max(least_us, op.flops / flops_per_us, moved / bytes_per_us), "roofline")


class ListedPricer(AlikePricer):
    """Prices ops by a job's own price list. Times are rounded as a file of them would be, so that ranks with
    other arithmetic units have the same."""

    def __init__(self, job: Job, costs: Costs) -> None:
        self._job = job
        self._listed = [
            (op, costs.op_us[stage, op.name]) for stage, op in job.all_ops if (stage, op.name) in costs.op_us
        ]

    @cached_property
    def ops(self) -> Mapping[str, Timing]:
        specs = specs_of(self._job)
        times: dict[str, list[float]] = defaultdict(list)
        work: dict[str, tuple[int, int]] = {}
        for op, us in self._listed:
            key = signature(op, specs)
            times[key].append(us)
            work[key] = op.flops, traffic_bytes(op, specs)
        return {key: Timing(fmean(took), 0.0, *work[key]) for key, took in times.items()}

    def timings(self) -> list[Timing]:
        """Of ops that compute or move, which views, parts of tuples and collectives do not."""
        specs = specs_of(self._job)
        return [
            Timing(us, 0.0, op.flops, traffic_bytes(op, specs))
            for op, us in self._listed
            if us and op.alias is None and op.collective is None and op.target not in FREE
        ]

    def look_up(self, op: Op, specs: Specs, key: str) -> Priced | None:
        """What is on the list is known as the list's source says."""
        known = super().look_up(op, specs, key)
        return None if known is None else replace(known, how="")

    def least_us(self) -> float:
        """The shortest that is listed: a part of an op pays it as well."""
        return self._roof[2]

    def view_us(self) -> float:
        """The shortest that is listed: views move nothing."""
        return min((us for op, us in self._listed if op.alias is not None and op.target != WAIT), default=0.0)

    def price(self, op: Op, specs: Specs) -> Priced:
        """As `Pricer.price`."""
        # A list may say that what is free for others takes time.
        free = self.look_up(op, specs, signature(op, specs)) if op.target in FREE else None
        result = free or super().price(op, specs)
        return replace(result, us=round(result.us, 3))

    def finish_us(self, asked: Collective) -> float:
        """That of the listed waits for those about as large."""
        known = self._waits.get((asked.axis, asked.kind))
        if known is None:
            return 0.0
        return round(fmean(known[min(known, key=lambda nbytes: abs(nbytes - asked.nbytes))]), 3)

    @cached_property
    def _waits(self) -> dict[tuple[str, str], dict[int, list[float]]]:
        """(axis, kind) -> bytes -> listed times of waits."""
        asked = {op.name: op.collective for _, op in self._job.all_ops}
        result: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for op, us in self._listed:
            one = asked.get(op.uses[0]) if op.target == WAIT else None
            if one is not None:
                result[one.axis, one.kind][one.nbytes].append(us)
        return result


def _family(key: str) -> tuple[str, ...]:
    """(target, dtype of the first tensor) of a signature; of attention also whether it is causal and has a
    mask, of which its arithmetic does not show."""
    target, _, rest = key.partition("(")
    hides = _HIDES.findall(rest) if "scaled_dot_product" in target else ()
    return target, rest.partition("[")[0].lstrip("["), *hides


def _between(points: list[tuple[float, float]], work: float, least_us: float | None) -> float | None:
    """Time for `work` by points (work, us), on logarithmic scales; None when they are too far away."""
    if not points or work <= 0 or not points[0][0] / BEYOND <= work <= points[-1][0] * BEYOND:
        return None
    at = bisect.bisect_left(points, (work, 0.0))
    if at == 0:
        # Less work may take as long: small ops are all overhead.
        least_work, us = points[0]
        return us if least_us is None else least_us + (us - least_us) * work / least_work
    if at == len(points):
        return points[-1][1] * work / points[-1][0]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    share = math.log(work / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))
