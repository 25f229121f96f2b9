"""Measured against predicted, as plain text: what `print(runner.report())` shows on every rank, and a
rehearsal of the pipeline rank that ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stretto.ir.compared import against, beside_bound, signed
from stretto.ir.costs import Prediction
from stretto.ir.metrics import Observed
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.simulating.engine import accounts_of

MS, MIB = (1000.0, "ms"), (2.0**20, "MiB")
LINES = 8
"""Pairs of ranks that a report names."""


def line(name: str, predicted: float | None, measured: float | None, unit: tuple[float, str] = MS) -> str:
    """One row of the table: both values, in microseconds or bytes, and the second against the first."""
    size, word = unit
    guess, took = ("-" if one is None else f"{one / size:.1f} {word}" for one in (predicted, measured))
    off = signed(against(measured, predicted), "") if predicted and measured else ""
    return f"  {name:24}{guess:>14}{took:>14}{off:>10}".rstrip()


def rank_lines(
    predicted: Prediction | None, measured: Timeline, pp_rank: int, prefix: str = ""
) -> Iterator[str]:
    """A pipeline rank's accounts of its compute lane, and its peak of memory."""

    def accounts(of: Prediction) -> dict[str, float]:
        exposed = {f"exposed {axis}": us[pp_rank] for axis, us in of.exposed_axis_us.items()}
        more = {"bubble": of.bubble_us[pp_rank], "peak memory": of.peak_bytes[pp_rank]}
        return {**exposed, "compute": of.compute_us[pp_rank], **more}

    guess, took = accounts(predicted) if predicted else {}, accounts(accounts_of(measured))
    exposed = sorted(name for name in {*guess, *took} if name.startswith("exposed"))
    for name in ("compute", *exposed, "bubble", "peak memory"):
        unit = MIB if name == "peak memory" else MS
        yield line(prefix + name, guess.get(name, 0.0) if guess else None, took.get(name, 0.0), unit)


def stall_lines(measured: Timeline) -> Iterator[str]:
    """Who waits for whom, by the time that it takes, the longest few."""
    for stall in sorted(measured.stalls, key=lambda one: -one.us)[:LINES]:
        yield f"  rank {stall.rank} waits for rank {stall.on}, {stall.axis}: {stall.us / 1000.0:.1f} ms"


def metric_line(one: Observed) -> str:
    """A metric: one number, or of several the sum, and the shares of the greatest and the least."""
    name = "  " + f"{one.module} {one.name}".strip()
    total = sum(one.mean)
    if len(one.mean) == 1:
        return f"{name}: {total:.4g} ({one.least[0]:.4g} to {one.most[0]:.4g} in {one.steps} steps)"
    if not total or min(one.mean) < 0:
        return f"{name}: {min(one.mean):.4g} to {max(one.mean):.4g} (mean of {one.steps} steps)"
    least, most = (at(range(len(one.mean)), key=one.mean.__getitem__) for at in (min, max))
    shares = (f"{100 * one.mean[at] / total:.1f} % ([{at}])" for at in (least, most))
    return f"{name}: {total:.4g}, of it {' to '.join(shares)} (mean of {one.steps} steps)"


@dataclass(frozen=True, slots=True)
class Report:
    """The last measured step beside the plan's prediction. `str()` is a table, with who waits for whom, and
    what the model lets see. measured: None where there is none; `why` is the reason."""

    plan: Plan
    measured: Timeline | None
    observed: tuple[Observed, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        predicted, measured = self.plan.prediction, self.measured
        who = f"{self.plan.job.name}, {self.plan.schedule.family} on {self.plan.where}"
        if measured is None:
            return "\n".join([str(self.plan), f"not measured: {self.why}", *map(metric_line, self.observed)])
        head = f"{who}: predicted, measured"
        lines = [head, line("step", predicted.step_us if predicted else None, measured.step_us)]
        for pp_rank in range(self.plan.ranks):
            lines += rank_lines(predicted, measured, pp_rank, f"{measured.who(pp_rank)} ")
        more = [*stall_lines(measured), *map(metric_line, self.observed)]
        if predicted is None:
            return "\n".join(lines + more)
        hidden = measured.hidden
        for axis in sorted(predicted.comm_axis_us):
            guess_share, share = predicted.hidden(axis), hidden.get(axis)
            if guess_share is not None and share is not None:
                lines.append(
                    f"  {f'{axis} communication':24}{100 * guess_share:12.0f} %{100 * share:12.0f} %   hidden"
                )
        gap = beside_bound(measured.step_us, predicted.bound_us)
        lines.append(f"  gap of the measured step to the lower bound: {gap}; what binds: {predicted.binds}")
        return "\n".join(lines + more)
