"""Measuring single ops, each on inputs of its own: the times that a calibration holds.

    1. Inputs are made up from their specs, integers so that they say what they say in a step (`ir.integers`).
       They are in as many sets as keep the processor's caches from holding them all: in a step, an op's
       weights were last touched a stage ago.
    2. Rounds of calls; a round is long enough for the clock. The mean of the faster half counts, and the
       half's range tells the noise.

Ops run one at a time under `no_grad`. Touches one device, no file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping

import torch

from stretto.backend.device_time import synchronise
from stretto.errors import StrettoError
from stretto.ir.flow import PHASES
from stretto.ir.integers import what_integers_say
from stretto.ir.prices import made_bytes, signature, specs_of
from stretto.ir.program import Job, Op, TensorSpec
from stretto.measure.fake_collectives import function_of
from stretto.measure.profile import device_name, fixed_argument, made_up_tensor, value_of
from stretto.price.op_times import Machine, Timing
from stretto.price.roofline import FREE

ROUNDS = 7
"""Counted rounds after one warm-up."""

ROUND_US = 3_000.0
"""A round repeats the op for about this long. Assumed: a thousand times the clock's own error."""

MOST_CALLS = 200
"""Calls in a round at most; and in one that is queued on an accelerator, so that launches do not pile up."""

CACHE_BYTES = 64 * 2**20
"""Inputs of all sets together, larger than a core's share of a last-level cache. Assumed."""

MOST_SETS = 16

Specs = Mapping[str, TensorSpec]


def machine_of(device: torch.device) -> Machine:
    """What times on this device belong to."""
    name = device_name(device) if device.type == "cuda" else processor_name()
    return Machine(name, torch.__version__, torch.get_num_threads(), device.type)


def processor_name() -> str:
    """The processor's model, as the kernel tells it; its architecture where it does not."""
    import platform

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def distinct_ops(jobs: Iterable[Job]) -> dict[str, tuple[Op, Specs]]:
    """Every distinct op of the jobs' microbatches by signature, once, in order; those that cost nothing are
    left out. What runs once a step are sums over ranks, which are measured as collectives."""
    result: dict[str, tuple[Op, Specs]] = {}
    for job in jobs:
        specs = specs_of(job)
        for stage in job.stages:
            for op in (op for phase in PHASES for op in stage.ops[phase]):
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
    arguments = [fixed_argument(arg, device) for arg in op.args]
    keywords = {key: fixed_argument(arg, device) for key, arg in op.kwargs}
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
            [value_of(arg, given) for arg in arguments],
            {key: value_of(arg, given) for key, arg in keywords.items()},
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
            count = int(max(1, min(MOST_CALLS, ROUND_US / max(round_us(2), 0.1))))
            rounds = sorted(round_us(count) for _ in range(ROUNDS))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise StrettoError(f"{signature(op, specs)} cannot be measured on its own: {reason}") from None
    half = rounds[: (len(rounds) + 1) // 2]
    us = statistics.fmean(half)
    return Timing(us, (half[-1] - half[0]) / us if us else 0.0, op.flops, moved)
