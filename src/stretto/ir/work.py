"""How much a rank computes in a step, and what part of its device's peak that is: MFU and HFU.

FLOPs are counted on the captured graph by PyTorch's formulas (products, convolutions, attention, in which a
causal mask saves nothing). MFU leaves out what the backward computes again, HFU counts it (Chowdhery et
al. 2022, "PaLM", arXiv 2204.02311, appendix B). That is recomputation of a plan's, and the scores of fused
attention: one of its backward's five products, which its forward made and did not keep. Numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.ir.costs import Peak
from stretto.ir.plan import Plan
from stretto.ir.program import Op

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


def work_of(plan: Plan) -> Work:
    """A rank's work in a step of `plan`. Ranks of one pipeline rank do equal work; pipeline ranks are
    averaged."""
    flops = again_flops = 0.0
    for _, op in plan.job.all_ops:
        again = op.flops * _part_again(op)
        flops += op.flops - again
        again_flops += again
    each = plan.job.microbatches / plan.ranks
    return Work(flops * each, again_flops * each, plan.costs.peak)


def _part_again(op: Op) -> float:
    """What share of an op's FLOPs an earlier op has made already."""
    if op.repeats:
        return 1.0
    fused = "scaled_dot_product" in op.target and "_backward" in op.target
    return SCORES_AGAIN if fused else 0.0
