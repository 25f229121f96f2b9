"""Measuring single ops, each on inputs of its own: the times that a calibration has.

1. Which: those of jobs, or a sweep over sizes, from which others are interpolated: products (square, and of
   linear layers, forward and backward), fused attention, ops that only move memory.
2. Inputs are made up from their specs, in so many sets that the processor's caches cannot keep them
   all: in a step, an op's weights were last touched a stage ago.
3. Rounds of calls; a round is long enough for the clock. The mean of the faster half counts, and the
   half's range shows the noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from math import prod

import torch

from stretto.backend.device_time import synchronise
from stretto.backend.specs import decoded
from stretto.errors import StrettoError
from stretto.ir.action import ONCE_PHASES
from stretto.ir.flow import PHASES
from stretto.ir.integers import what_integers_say
from stretto.ir.placements import KNOWN_OPS
from stretto.ir.prices import Specs, made_bytes, signature, specs_of
from stretto.ir.program import Arg, Job, Op, Ref, TensorSpec
from stretto.measure.profile import device_name, function_of, made_up_tensor
from stretto.measure.stopwatch import repeats
from stretto.price.calibration import Machine, Timing
from stretto.price.shared import FREE

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
So rows are close together, and widths are powers of two and others."""

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
        yield _op("aten._softmax.default", x, x, more=(-1, False))
    for dtype in ("float32",) if device == "cpu" else ("float32", "bfloat16"):
        for m, n, k in sorted(PRODUCTS if device == "cpu" else ACCELERATOR_PRODUCTS, key=prod):
            yield _product(TensorSpec((m, k), dtype), TensorSpec((k, n), dtype))
        if device == "cpu":
            yield from linear_ops(LINEAR_ROWS, LINEAR_SIZES, dtype)
        else:
            yield from linear_ops(ACCELERATOR_ROWS, ACCELERATOR_SIZES, dtype)
    for batch, heads, length, head in ATTENTIONS:
        x = TensorSpec((batch, heads, length, head), "float32" if device == "cpu" else "bfloat16")
        kernel = "flash_attention_for_cpu" if device == "cpu" else "flash_attention"
        flops = 4 * batch * heads * length * length * head
        yield _op(f"aten._scaled_dot_product_{kernel}.default", x, x, x, x, flops=flops)


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


def _op(
    target: str, result: TensorSpec, *reads: TensorSpec, more: tuple[Arg, ...] = (), flops: int = 0
) -> Sample:
    specs = {f"x{at}": spec for at, spec in enumerate(reads)}
    return Op("y", target, (*map(Ref, specs), *more), (), (result,), flops=flops), specs


ROUNDS = 7
"""Counted rounds after one warm-up."""

ROUND_US = 3_000.0
"""A round repeats the op for about this long. Assumed: a thousand times the clock's own error."""

MOST_CALLS = 200
"""Calls in a round at most; and in a round that is queued on an accelerator, so that launches do not pile
up."""

CACHE_BYTES = 64 * 2**20
"""Inputs of all sets together, larger than a core's share of a last-level cache. Assumed."""

MOST_SETS = 16


def machine_of(device: torch.device) -> Machine:
    """What times on this device belong to."""
    name = device_name(device) if device.type == "cuda" else processor_name()
    return Machine(name, torch.__version__, torch.get_num_threads(), device.type)


def processor_name() -> str:
    """The processor's model, as the kernel shows it; its architecture where it does not."""
    import platform

    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def distinct_ops(jobs: Iterable[Job]) -> dict[str, tuple[Op, Specs]]:
    """Every distinct op of the jobs by signature, once, in order; those that cost nothing are left out. Of
    what runs once a step only copies are there: its communications are measured as such."""
    result: dict[str, tuple[Op, Specs]] = {}
    for job in jobs:
        specs = specs_of(job)
        for stage in job.stages:
            once = (op for phase in ONCE_PHASES for op in stage.ops.get(phase, ()))
            copies = (op for op in once if op.target.startswith(KNOWN_OPS) and op.alias is None)
            for op in (*(op for phase in PHASES for op in stage.ops[phase]), *copies):
                if op.target not in FREE:
                    result.setdefault(signature(op, specs), (op, specs))
    return result


def time_op(op: Op, specs: Specs, device: torch.device) -> Timing:
    """Measure one op. Raises StrettoError when it does not run on inputs of its specs alone."""
    unknown = [name for name in op.uses if name not in specs]
    if unknown:
        raise StrettoError(
            f"{signature(op, specs)} cannot be measured on its own: {unknown[0]} is no single tensor"
        )
    function = function_of(op.target, device)
    moved = made_bytes(op) + sum(specs[name].nbytes for name in op.uses)
    sets = int(max(1, min(MOST_SETS, CACHE_BYTES // max(moved, 1))))
    generator = torch.Generator(device="cpu").manual_seed(0)
    says = what_integers_say(op, specs)
    inputs = [
        {name: made_up_tensor(specs[name], generator, device, says.get(name)) for name in op.uses}
        for _ in range(sets)
    ]

    calls = [
        (
            [decoded(arg, given.__getitem__, device) for arg in op.args],
            {key: decoded(arg, given.__getitem__, device) for key, arg in op.kwargs},
        )
        for given in inputs
    ]

    def round_us(count: int) -> float:
        synchronise(device)
        begin = time.perf_counter_ns()
        for at in range(count):
            positional, named = calls[at % sets]
            function(*positional, **named)
        synchronise(device)
        return (time.perf_counter_ns() - begin) / 1000.0 / count

    # Dropout draws; the user's generator must not notice.
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            round_us(1)
            count = repeats(round_us(2), ROUND_US, 1, MOST_CALLS)
            rounds = sorted(round_us(count) for _ in range(ROUNDS))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise StrettoError(f"{signature(op, specs)} cannot be measured on its own: {reason}") from None
    half = rounds[: (len(rounds) + 1) // 2]
    us = statistics.fmean(half)
    return Timing(us, (half[-1] - half[0]) / us if us else 0.0, op.flops, moved)
