"""What a race of experts is asked (`Setup`), its systems, and its figures.

Exposed and hidden (`benchmarks.rows`) are all-to-alls over
`ep`, and not the sums of gradients on the same axis; `serial` waits for each at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import stretto
from benchmarks.kept import prediction_of
from benchmarks.moe_model import Routing, Stack, squared_error
from benchmarks.race import Times
from benchmarks.rows import exposed_s, hidden, time_row, versions
from benchmarks.work import Batch, PlaceWork
from stretto.ir.axes import EP
from stretto.ir.collectives import ALL_TO_ALL
from stretto.ir.costs import Prediction
from stretto.ir.plan import Plan
from stretto.ir.program import Job, OverlapMode
from stretto.ir.timeline import Timeline
from stretto.models.moe import MoEConfig
from stretto.order.policies import DEFAULT

AXIS = EP.name

SERIAL, MLP_ONLY, AUTO = "serial", "MLP-only", "auto"

UNDER_EXPERTS = "under experts"
"""The policy of `benchmarks.under_experts`."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """chunks: of the sequence (AMPipe). slices: of what experts get (pipe-experts)."""

    chunks: int = 1
    slices: int = 1


WHOLE = Cuts()


@dataclass(frozen=True, slots=True)
class System:
    """How it cuts, what may hide communication, and the policy that orders ops."""

    cuts: Cuts
    overlap: OverlapMode
    order: str = DEFAULT


SYSTEMS: Mapping[str, System] = {
    SERIAL: System(WHOLE, "off"),
    f"{MLP_ONLY} 2": System(Cuts(slices=2), "local", UNDER_EXPERTS),
    f"{MLP_ONLY} 4": System(Cuts(slices=4), "local", UNDER_EXPERTS),
    "pipe-experts 2": System(Cuts(slices=2), "local"),
    "AMPipe 2": System(Cuts(chunks=2), "local"),
    "AMPipe 4": System(Cuts(chunks=4), "local"),
    "AMPipe 2, pipe-experts 2": System(Cuts(chunks=2, slices=2), "local"),
    "windows": System(WHOLE, "window"),
}
"""All but `AUTO`: of windows over `AUTO_CHUNKS` and over whole sequences the fastest by prediction."""

AUTO_CHUNKS = (2, 4)
"""Beside whole sequences: what `ampipe_degree = "auto"` tries."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One race. Shapes are those of the whole model and of one microbatch of a rank. rate: as the lab takes
    it. expert_ratio: width of an expert over `hidden`."""

    rate: str = "unlimited"
    ep: int = 2
    routing: Routing = "balanced"
    hidden: int = 512
    heads: int = 8
    layers: int = 2
    sequence: int = 1024
    experts: int = 8
    top_k: int = 2
    expert_ratio: float = 2.0
    microbatch: int = 1
    microbatches: int = 4
    ep_buffer: float = 1.5
    rounds: int = 3
    threads_per_rank: int = 1
    dtype: str = "float32"

    @property
    def world(self) -> int:
        return self.ep

    def __str__(self) -> str:
        return f"ep={self.ep}, {self.routing}, {self.rate}"

    def build(self) -> tuple[Stack, Batch]:
        """The model and the whole batch, equal in all processes."""
        torch.manual_seed(0)
        config = MoEConfig(
            vocab_size=1,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            context=self.sequence,
            positions="learned",
            experts=self.experts,
            top_k=self.top_k,
            expert_ratio=self.expert_ratio,
            capacity_factor=1.0 if self.routing == "balanced" else None,
        )
        size = (self.microbatch * self.microbatches * self.ep, self.sequence, self.hidden)
        return Stack(config, self.routing), {name: torch.randn(size) for name in ("x", "target")}

    def capture(self, model: Stack, batch: Batch, **how: Any) -> Job:
        """The step as a job. how: more of `stretto.Parallel`."""
        if self.routing == "router":
            how["ep_buffer"] = self.ep_buffer
        parallel = stretto.Parallel(dp=self.ep, ep=self.ep, microbatches=self.microbatches, **how)
        return stretto.capture(model, batch, loss=squared_error, parallel=parallel)


def make_result(
    setup: Setup,
    plans: Mapping[str, Plan],
    times: Mapping[str, Times],
    timelines: Mapping[str, Sequence[Timeline]],
    work: PlaceWork,
    known: Prediction,
) -> dict[str, Any]:
    """The JSON of the race: {"setup": ..., "rows": [...]}, medians, with every round's time beside them.

    work: of a microbatch. known: what is predicted of `SERIAL` by costs that are measured again after the
    race, from which the bound is: of the step that is not cut, as cuts add work.
    """
    bound_s = known.bound_us / 1e6
    fastest_s = min(found.median_s for name, found in times.items() if name.startswith(MLP_ONLY))
    bases_s = {"serial": times[SERIAL].median_s, "mlp_only": fastest_s}
    exposed = {name: _all_to_all_s(plans[name], lines) for name, lines in timelines.items()}
    rows = []
    for name, found in times.items():
        plan, predicted_s = plans[name], prediction_of(plans[name]).step_us / 1e6
        rows.append(
            time_row(name, found, bases_s, bound_s)
            | {
                "bound_s": bound_s,
                "overlap": plan.overlap,
                "overlap_why": plan.overlap_why,
                "chunks": plan.job.chunks,
                "planned_s": predicted_s,
                "measured_over_planned": found.median_s / predicted_s,
                "exposed_s": exposed[name],
                "hidden": hidden([exposed[name]], [exposed[SERIAL]])[0],
                "peak_bytes": max(timelines[name][-1].peak_bytes),
            }
        )
    return {
        "setup": {
            **asdict(setup),
            **versions(),
            "bound_s": bound_s,
            "binds": known.binds,
            "microbatch_work": asdict(work),
            "communication_over_compute": work.ratio,
            "costs": plans[SERIAL].costs.source,
        },
        "rows": rows,
    }


def _all_to_all_s(plan: Plan, lines: Sequence[Timeline]) -> float:
    """Exposed, of the only place of the pipeline."""
    labels = {
        op.label
        for stage in plan.job.stages
        for ops in stage.ops.values()
        for op in ops
        if op.kind is ALL_TO_ALL
    }
    (found,) = exposed_s(lines, lambda span: span.name in labels)
    return found
