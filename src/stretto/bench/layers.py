"""The linear layers of a calibration's sweep, timed while systems are.

    1. A visit computes every product of the sweep (`cost.sweep`) once, all ranks at one time; before the
       first one more time, which does not count. A weight was last touched many products ago, as in a step.
    2. A weight gradient is added to what its parameter has, as the runtime does.
    3. A product takes its thread's time, and as much longer as all of a visit's did by the clock: under a
       quota, or beside others on its core, a short one is seldom stopped, and then for long.

Touches what it measures, and no file.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from stretto.ir.prices import made_bytes, signature
from stretto.ir.program import TensorSpec
from stretto.measure.profile import random_tensor, typical
from stretto.measure.sweep import LINEAR_ROWS, LINEAR_SIZES, linear_ops
from stretto.price.op_cache import Timing

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Left and right matrix, and what the product is added to, if it is a weight gradient."""


class Layers:
    """Visits to linear layers; every rank makes one, and calls the same methods. Holds the sweep's matrices,
    once for each shape: some 200 MB."""

    def __init__(
        self, rows: Sequence[int] = LINEAR_ROWS, sizes: Sequence[tuple[int, int]] = LINEAR_SIZES
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        made: dict[tuple[str, TensorSpec], torch.Tensor] = {}

        def tensor(what: str, spec: TensorSpec) -> torch.Tensor:
            if (what, spec) not in made:
                made[what, spec] = random_tensor(spec, generator, torch.device("cpu"))
            return made[what, spec]

        self._calls: list[tuple[str, Operands]] = []
        self._work: dict[str, tuple[int, int]] = {}
        for op, specs in linear_ops(rows, sizes, "float32"):
            left, right, result = specs["x0"], specs["x1"], op.outputs[0]
            assert result is not None
            # Of a layer's products the weight gradient alone reads its left matrix transposed.
            sums = tensor("sum", result) if left.stride is not None else None
            key = signature(op, specs)
            self._calls.append((key, (tensor("left", left), tensor("right", right), sums)))
            self._work[key] = op.flops, left.nbytes + right.nbytes + made_bytes(op)
        self._found: dict[str, list[float]] = defaultdict(list)

    def visit(self) -> None:
        """Steps 1 to 3, once."""
        if not self._found:
            self._took()
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter_ns()
        took = self._took()
        stretch = max(1.0, (time.perf_counter_ns() - begin) / sum(took.values()))
        for key, ns in took.items():
            self._found[key].append(ns / 1e3 * stretch)

    def _took(self) -> dict[str, int]:
        """Nanoseconds of the computing thread, by product."""
        found: dict[str, int] = {}
        with torch.no_grad():
            for key, (left, right, sums) in self._calls:
                begin = time.thread_time_ns()
                if sums is None:
                    torch.mm(left, right)
                else:
                    torch.addmm(sums, left, right, out=sums)
                found[key] = time.thread_time_ns() - begin
        return found

    def agreed(self) -> dict[str, Timing]:
        """What products take, by signature, equal on all ranks: the median of what ranks found. After at
        least one visit."""
        mine = {key: typical(times) for key, times in self._found.items()}
        told: list[Any] = [mine]
        if dist.is_initialized():
            told *= dist.get_world_size()
            dist.all_gather_object(told, mine)
        return {key: Timing(median(one[key] for one in told), 0.0, *self._work[key]) for key in mine}
