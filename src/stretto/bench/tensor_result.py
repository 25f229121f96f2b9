"""What a tensor race is asked (`Setup`), and its figures: medians of step times, and the accounts of overlap.

May touch plans and timelines, and nothing that runs.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stretto.bench.hidden import (
    AXIS,
    Hidden,
    Work,
    account,
    backward_actions,
    exposed_by_name,
    exposed_us,
    steady_actions,
    work_of,
)
from stretto.bench.race import Times
from stretto.ir.action import Action, Schedule
from stretto.ir.costs import Costs, Prediction
from stretto.ir.plan import Plan
from stretto.ir.program import Job, OverlapMode
from stretto.ir.timeline import SpanKind, Timeline

TORCH = "torch"
MODES: tuple[OverlapMode, ...] = ("off", "local", "window")

NAMED = 8
"""Collectives that a row names: those that stay exposed longest."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One race. Shapes are those of the whole model and of one microbatch. rate: as the lab takes it."""

    rate: str = "unlimited"
    hidden: int = 1024
    heads: int = 16
    layers: int = 3
    vocab: int = 4096
    sequence: int = 256
    microbatch: int = 2
    microbatches: int = 8
    pp: int = 1
    tp: int = 2
    sequence_parallel: bool = False
    rounds: int = 5
    threads_per_rank: int = 1
    dtype: str = "float32"

    @property
    def world(self) -> int:
        return self.pp * self.tp

    @property
    def cuts(self) -> tuple[int, ...]:
        """The blocks with which stages after the first begin: equal numbers, the last stage has the fewest,
        since it has the output head."""
        each = -(-self.layers // self.pp)
        return tuple(each * stage for stage in range(1, self.pp))

    def __str__(self) -> str:
        sp = " sp" if self.sequence_parallel else ""
        return f"hidden {self.hidden}, pp={self.pp} tp={self.tp}{sp}, {self.rate}"


def make_result(
    setup: Setup,
    planned: Mapping[str, Plan],
    plans: Mapping[str, Plan],
    times: Mapping[str, Times],
    timelines: Mapping[str, Sequence[Timeline]],
) -> dict[str, Any]:
    """The JSON of the race: {"setup": ..., "rows": [...]}, medians, with every round's time beside them.

    planned: the plans by mode, as they were made. plans: with what ops took during the race; all but
    `planned_s` is from these.
    """
    job, costs = plans["off"].job, plans["off"].costs
    steady = plans["window"].schedule
    places = range(steady.ranks)
    bound_s = min(_prediction(p).bound_us for p in plans.values()) / 1e6
    accounts = [_account(job, costs, plans, timelines, place) for place in places]
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
            predicted = _prediction(plans[name])
            lines = timelines[name]
            schedule = plans[name].schedule
            exposed = [
                statistics.median(exposed_us(line, place, schedule) for line in lines) for place in places
            ]
            kinds = {
                kind: [statistics.median(line.total_us(kind, place) for line in lines) for place in places]
                for kind in (SpanKind.COMPUTE, SpanKind.BUBBLE)
            }
            row |= {
                "overlap": plans[name].overlap,
                "overlap_why": plans[name].overlap_why,
                "planned_s": _prediction(planned[name]).step_us / 1e6,
                "predicted_s": predicted.step_us / 1e6,
                "predicted_over_measured": predicted.step_us / 1e6 / found.median_s,
                "exposed_s": [us / 1e6 for us in exposed],
                "exposed_predicted_s": [us / 1e6 for us in predicted.exposed_axis_us.get(AXIS, ())],
                "compute_s": [us / 1e6 for us in kinds[SpanKind.COMPUTE]],
                "compute_predicted_s": [us / 1e6 for us in predicted.compute_us],
                "bubble_s": [us / 1e6 for us in kinds[SpanKind.BUBBLE]],
                "bubble_predicted_s": [us / 1e6 for us in predicted.bubble_us],
                "hidden": [accounts[place][name].hidden for place in places],
                "hidden_of_w": [accounts[place][name].of_covered for place in places],
                "accounts": [asdict(accounts[place][name]) for place in places],
                "peak_bytes": list(lines[-1].peak_bytes),
                "steady_waits_ms": [
                    _named(lines, place, schedule, steady_actions(steady, place)) for place in places
                ],
            }
        rows.append(row)
    work = [work_of(job, costs, steady.stages_of(place)) for place in places]
    binding = min((_prediction(p) for p in plans.values()), key=lambda found: found.bound_us)
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


def _prediction(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


def _ratio(work: Work) -> float:
    return work.collective_us / work.compute_us if work.compute_us else 0.0


def _account(
    job: Job,
    costs: Costs,
    plans: Mapping[str, Plan],
    timelines: Mapping[str, Sequence[Timeline]],
    place: int,
) -> dict[str, Hidden]:
    schedule = plans["window"].schedule
    steady, backward = steady_actions(schedule, place), backward_actions(schedule, place)
    exposed = {
        mode: (
            statistics.median(exposed_us(line, place, plans[mode].schedule, steady) for line in lines),
            statistics.median(exposed_us(line, place, plans[mode].schedule, backward) for line in lines),
        )
        for mode, lines in timelines.items()
    }
    return account(exposed, job, costs, schedule, place)


def _named(
    lines: Sequence[Timeline], place: int, schedule: Schedule, actions: Collection[Action]
) -> dict[str, float]:
    """The collectives that a place waited for longest in these actions, in milliseconds a step (medians)."""
    by_round = [exposed_by_name(line, place, schedule, actions) for line in lines]
    names = {name for found in by_round for name in found}
    medians = {
        name: statistics.median(found.get(name, 0.0) for found in by_round) / 1e3 for name in sorted(names)
    }
    longest = sorted(medians.items(), key=lambda item: -item[1])[:NAMED]
    return dict(longest)
