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
        for rank in range(self.plan.ranks):
            for name, predicted, kind in (
                ("compute", found.compute_us, SpanKind.COMPUTE),
                ("exposed pp", found.exposed_us, SpanKind.EXPOSED),
                ("bubble", found.bubble_us, SpanKind.BUBBLE),
            ):
                rows.append((f"rank {rank} {name}", predicted[rank], measured.total_us(kind, rank)))
        lines = [head]
        for name, predicted_us, measured_us in rows:
            error = f"{100 * (predicted_us / measured_us - 1):+6.1f} %" if measured_us > 0 else ""
            lines.append(f"  {name:20}{predicted_us / 1000:10.1f} ms{measured_us / 1000:10.1f} ms  {error}")
        for rank, (guess, peak) in enumerate(zip(found.peak_bytes, measured.peak_bytes, strict=True)):
            error = f"{100 * (guess / peak - 1):+6.1f} %" if peak else ""
            name = f"rank {rank} peak memory"
            lines.append(f"  {name:20}{guess / 2**20:9.1f} MiB{peak / 2**20:9.1f} MiB {error}")
        above = 100 * (measured.step_us / found.bound_us - 1) if found.bound_us else 0.0
        lines.append(f"  measured step is {above:.1f} % above the lower bound: {found.binds}")
        return "\n".join(lines)
