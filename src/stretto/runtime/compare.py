"""Predicted against measured, as plain text: what `print(runner.report())` shows on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.ir.plan import Plan
from stretto.ir.timeline import SpanKind, Timeline


@dataclass(frozen=True, slots=True)
class Report:
    """The last measured step beside the plan's prediction. `str()` is a table."""

    plan: Plan
    measured: Timeline

    def __str__(self) -> str:
        found = self.plan.prediction
        measured = self.measured
        family, ranks = self.plan.schedule.family, self.plan.ranks
        head = f"{self.plan.job.name}, {family} on {ranks} ranks: predicted, measured"
        if found is None:
            return f"{head}\n  step {measured.step_us / 1000:.1f} ms; the plan carries no prediction"
        rows = [("step", found.step_us, measured.step_us)]
        exposed = measured.exposed_axis_us()
        for rank in range(self.plan.ranks):
            rows.append(
                (
                    f"rank {rank} compute",
                    found.compute_us[rank],
                    measured.total_us(SpanKind.COMPUTE, rank),
                )
            )
            for axis in sorted({*found.exposed_axis_us, *exposed}):
                guess = found.exposed_axis_us[axis][rank] if axis in found.exposed_axis_us else 0.0
                took = exposed[axis][rank] if axis in exposed else 0.0
                rows.append((f"rank {rank} exposed {axis}", guess, took))
            rows.append(
                (f"rank {rank} bubble", found.bubble_us[rank], measured.total_us(SpanKind.BUBBLE, rank))
            )
        lines = [head]
        for name, predicted_us, measured_us in rows:
            error = f"{100 * (predicted_us / measured_us - 1):+6.1f} %" if measured_us > 0 else ""
            lines.append(f"  {name:20}{predicted_us / 1000:10.1f} ms{measured_us / 1000:10.1f} ms  {error}")
        for rank, (guess, peak) in enumerate(zip(found.peak_bytes, measured.peak_bytes, strict=True)):
            error = f"{100 * (guess / peak - 1):+6.1f} %" if peak else ""
            name = f"rank {rank} peak memory"
            lines.append(f"  {name:20}{guess / 2**20:9.1f} MiB{peak / 2**20:9.1f} MiB {error}")
        hidden = measured.hidden
        for axis in sorted(found.comm_axis_us):
            guess_share, share = found.hidden(axis), hidden.get(axis)
            if guess_share is not None and share is not None:
                lines.append(
                    f"  {f'{axis} communication':20}{100 * guess_share:8.0f} % {100 * share:10.0f} %   hidden"
                )
        above = 100 * (measured.step_us / found.bound_us - 1) if found.bound_us else 0.0
        lines.append(f"  measured step is {above:.1f} % above the lower bound: {found.binds}")
        return "\n".join(lines)
