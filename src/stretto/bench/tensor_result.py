"""What a tensor race is asked (`Setup`), and its figures: medians of step times, and what was hidden.

May touch plans and timelines, and nothing that runs.

*Exposed* is the time in which a place's compute lane waits for tensor-parallel collectives. `off` waits for
each at once, so what it exposes is all the time that collectives take. *Hidden* is the share of that which
another mode does not expose.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stretto.bench.kept import prediction_of
from stretto.bench.race import Times
from stretto.bench.work import AXIS, GPTWork, PlaceWork, work_of
from stretto.ir.plan import Plan
from stretto.ir.program import OverlapMode
from stretto.ir.timeline import Timeline

TORCH = "torch"
MODES: tuple[OverlapMode, ...] = ("off", "local", "window")


@dataclass(frozen=True, slots=True)
class Setup(GPTWork):
    """One race."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """The blocks with which stages after the first begin: equal numbers, the last stage has the fewest,
        since it has the output head."""
        each = -(-self.layers // self.pp)
        return tuple(each * stage for stage in range(1, self.pp))

    def __str__(self) -> str:
        return f"hidden {self.hidden}, {self.layout}, {self.rate}"


def make_result(
    setup: Setup,
    planned: Mapping[str, Plan],
    plans: Mapping[str, Plan],
    times: Mapping[str, Times],
    timelines: Mapping[str, Sequence[Timeline]],
) -> dict[str, Any]:
    """The JSON of the race: {"setup": ..., "rows": [...]}, medians, with every round's time beside them.

    planned: the plans by mode, as they were made. plans: with costs measured again after the race; all but
    `planned_s` is from these.
    """
    job, costs, schedule = plans["off"].job, plans["off"].costs, plans["off"].schedule
    places = range(schedule.ranks)
    binding = min((prediction_of(plan) for plan in plans.values()), key=lambda found: found.bound_us)
    bound_s = binding.bound_us / 1e6
    exposed = {mode: [_exposed_s(lines, place) for place in places] for mode, lines in timelines.items()}
    rows = []
    for name, found in times.items():
        row: dict[str, Any] = {
            "system": name,
            "step_s": found.median_s,
            "speedup_vs_off": times["off"].median_s / found.median_s,
            "speedup_vs_torch": times[TORCH].median_s / found.median_s,
            "ratio_to_bound": found.median_s / bound_s,
            "rounds_s": list(found.rounds),
        }
        if name in plans:
            predicted, lines = prediction_of(plans[name]), timelines[name]
            row |= {
                "overlap": plans[name].overlap,
                "overlap_why": plans[name].overlap_why,
                "planned_s": prediction_of(planned[name]).step_us / 1e6,
                "predicted_s": predicted.step_us / 1e6,
                "predicted_over_measured": predicted.step_us / 1e6 / found.median_s,
                "exposed_s": exposed[name],
                "hidden": [
                    1.0 - mine / off if off else None
                    for mine, off in zip(exposed[name], exposed["off"], strict=True)
                ],
                "peak_bytes": list(lines[-1].peak_bytes),
            }
        rows.append(row)
    work = [work_of(job, costs, schedule.stages_of(place)) for place in places]
    return {
        "setup": {
            **asdict(setup),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "bound_s": bound_s,
            "binds": binding.binds,
            "microbatch_work": [asdict(each) for each in work],
            "communication_over_compute": max(_ratio(each) for each in work),
            "costs": costs.source,
        },
        "rows": rows,
    }


def _exposed_s(lines: Sequence[Timeline], place: int) -> float:
    """The median over steps."""
    zeros = [0.0] * (place + 1)
    return statistics.median(line.exposed_axis_us().get(AXIS, zeros)[place] for line in lines) / 1e6


def _ratio(work: PlaceWork) -> float:
    return work.collective_us / work.compute_us if work.compute_us else 0.0
