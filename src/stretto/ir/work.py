"""How much a rank computes in a step, and what part of its device's peak that is: MFU and HFU.

FLOPs are counted on the captured graph by PyTorch's formulas (products, convolutions, attention, which counts
whole under a causal mask too). MFU leaves out what the backward computes again, HFU counts it (Chowdhery et
al. 2022, "PaLM", arXiv 2204.02311, appendix B). Numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.ir.costs import Peak
from stretto.ir.plan import Plan


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


def work_of(plan: Plan) -> Work:
    """A rank's work in a step of `plan`. Ranks of one place do equal work; places are averaged."""
    sums = [0, 0]
    for stage in plan.job.stages:
        for ops in stage.ops.values():
            for op in ops:
                sums[bool(op.repeats)] += op.flops
    each = plan.job.microbatches / plan.ranks
    return Work(sums[0] * each, sums[1] * each, plan.costs.peak)
