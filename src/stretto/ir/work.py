"""How much a rank computes in a step, and what part of its device's peak that is: MFU and HFU.

FLOPs are counted on the captured graph by PyTorch's formulas (products, convolutions, attention, in which a
causal mask saves nothing). MFU leaves out what the backward computes again, HFU counts it (Chowdhery et
al. 2022, "PaLM", arXiv 2204.02311, appendix B). That is recomputation of a plan's, and the scores of fused
attention: one of its backward's five products, which its forward made and did not keep. Numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from stretto.ir.axes import DP
from stretto.ir.costs import Peak
from stretto.ir.program import Job, Op

SCORES_AGAIN = 1 / 5
"""Of the FLOPs of a fused attention's backward."""


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of a rank in a step, the mean of all. flops: without recomputation; again_flops: of that alone.

    peak: of a rank's device; None where it is not known.
    """

    flops: float
    again_flops: float
    peak: Peak | None = None

    def mfu(self, step_us: float) -> float | None:
        """Model FLOPs utilisation of a step that takes so long, 0 to 1; None without a peak."""
        return self._of_peak(self.flops, step_us)

    def hfu(self, step_us: float) -> float | None:
        """Hardware FLOPs utilisation, likewise."""
        return self._of_peak(self.flops + self.again_flops, step_us)

    def _of_peak(self, flops: float, step_us: float) -> float | None:
        return flops / step_us / self.peak.flops_per_us if self.peak is not None and step_us else None


def work_of(job: Job, ranks: int, peak: Peak | None) -> Work:
    """A rank's work in a step of a plan on so many pipeline ranks. Ranks of one pipeline rank do equal work;
    pipeline ranks are averaged."""
    flops = again_flops = 0.0
    for _, op in job.all_ops:
        again = op.flops * _part_again(op)
        flops += op.flops - again
        again_flops += again
    each = job.microbatches / ranks
    return Work(flops * each, again_flops * each, peak)


def trained_on(job: Job) -> tuple[float, str]:
    """How many tokens a step trains on, of all ranks; samples where it takes no ids or its loss counts none.

    Tokens are the labels that the loss looks at, those that it leaves out (padding) too.
    """
    pieces = job.microbatches * job.size(DP.name)
    ids = any(spec.dtype == "int64" and len(spec.shape) > 1 for _, spec in job.batch)
    count = job.count or job.mean_over if ids else None
    if count is not None and isinstance(count.value, float | int):
        return count.value * pieces, "tokens"
    if count is not None:
        return pieces * max(prod(spec.shape) for op in count.ops for spec in op.outputs if spec), "tokens"
    rows = (spec.shape[0] for name, spec in job.batch if spec.shape and name not in job.replicated)
    return pieces * next(rows, 0), "samples"


def speed_words(job: Job, work: Work, world: int, step_us: float) -> str:
    """`4,113 tokens/s (2,056 a device), MFU 47.0 %`: what of it is known of a step that takes so long."""
    number, unit = trained_on(job)
    words = []
    if number and step_us and job.trains:
        per_s = number / step_us * 1e6
        words.append(f"{_short(per_s)} {unit}/s ({_short(per_s / world)} a device)")
    mfu = work.mfu(step_us)
    return ", ".join([*words, *([] if mfu is None else [f"MFU {100 * mfu:.3g} %"])])


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _part_again(op: Op) -> float:
    """What share of an op's FLOPs an earlier op has made already."""
    if op.repeats:
        return 1.0
    fused = "scaled_dot_product" in op.target and "_backward" in op.target
    return SCORES_AGAIN if fused else 0.0
