"""The figures of a pipeline race: medians of step times, over PyTorch's and over the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.kept import prediction_of
from benchmarks.pipeline_setup import Setup
from benchmarks.race import Times
from benchmarks.rows import exposed_s, time_row, versions
from benchmarks.torch_pipelines import KINDS, TORCH_1F1B
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline


def make_result(
    setup: Setup,
    plans: Mapping[str, Plan],
    times: Mapping[str, Times],
    timelines: Mapping[str, Sequence[Timeline]],
) -> dict[str, Any]:
    """The JSON of the race: {"setup": ..., "rows": [...]}, medians, with every round's time beside them."""
    binding = min(map(prediction_of, plans.values()), key=lambda found: found.bound_us)
    best = min((name for name in times if name in KINDS), key=lambda name: times[name].median_s)
    bases_s = {"torch_1f1b": times[TORCH_1F1B].median_s, "torch_best": times[best].median_s}
    rows = []
    for name, found in times.items():
        row = time_row(name, found, bases_s, binding.bound_us / 1e6)
        if name in plans:
            row |= {
                "exposed_s": max(exposed_s(timelines[name], lambda span: True)),
                "predicted_s": prediction_of(plans[name]).step_us / 1e6,
                "bound_s": prediction_of(plans[name]).bound_us / 1e6,
                "peak_bytes": list(timelines[name][-1].peak_bytes),
            }
        rows.append(row)
    return {
        "setup": {
            **asdict(setup),
            **versions(),
            "torch_best": best,
            "bound_s": binding.bound_us / 1e6,
            "binds": binding.binds,
        },
        "rows": rows,
    }
