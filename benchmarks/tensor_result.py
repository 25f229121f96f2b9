"""What a tensor race is asked (`Setup`), and its figures: medians of step times, and what was hidden.

Exposed and hidden (`benchmarks.rows`) are tensor-parallel collectives; `off` waits for each at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.kept import prediction_of
from benchmarks.race import Times
from benchmarks.rows import exposed_s, hidden, time_row, versions
from benchmarks.work import AXIS, GPTWork, work_of
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
    bases_s = {"off": times["off"].median_s, "torch": times[TORCH].median_s}
    exposed = {mode: exposed_s(lines, lambda span: span.axis == AXIS) for mode, lines in timelines.items()}
    rows = []
    for name, found in times.items():
        row = time_row(name, found, bases_s, bound_s)
        if name in plans:
            predicted = prediction_of(plans[name])
            row |= {
                "overlap": plans[name].overlap,
                "overlap_why": plans[name].overlap_why,
                "planned_s": prediction_of(planned[name]).step_us / 1e6,
                "predicted_s": predicted.step_us / 1e6,
                "measured_over_predicted": found.median_s / (predicted.step_us / 1e6),
                "exposed_s": exposed[name],
                "hidden": hidden(exposed[name], exposed["off"]),
                "peak_bytes": list(timelines[name][-1].peak_bytes),
            }
        rows.append(row)
    work = [work_of(job, costs, schedule.stages_of(place)) for place in places]
    return {
        "setup": {
            **asdict(setup),
            **versions(),
            "bound_s": bound_s,
            "binds": binding.binds,
            "microbatch_work": [asdict(each) for each in work],
            "communication_over_compute": max(each.ratio for each in work),
            "costs": costs.source,
        },
        "rows": rows,
    }
