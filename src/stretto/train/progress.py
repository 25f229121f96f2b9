"""Progress for people: one live line on a terminal, a plain line now and then elsewhere. Rank 0 shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

LIVE_S = 0.2
"""The live line is drawn at most this often: people read no faster, and drawing takes time from training."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What there is to show of a step. exposed: share of the step, of the last step that was gathered."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    step_s: float
    exposed: float | None


class Progress:
    """Shows steps out of `steps`; `say` prints a line that stays. `shown` False shows nothing."""

    def __init__(self, steps: int, log_every: int, shown: bool, console: Console | None = None) -> None:
        self._steps, self._log_every, self._shown = steps, log_every, shown
        self._console = console if console is not None else Console(soft_wrap=True)
        self._live: Live | None = None
        self._drawn_s = 0.0

    def say(self, line: str) -> None:
        """Print a line above the live one."""
        if self._shown:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, report: StepReport) -> None:
        """Show a step: on a terminal the live line, else a plain one every `log_every` steps."""
        if not self._shown:
            return
        last = report.step == self._steps
        if not self._console.is_terminal:
            if last or report.step % self._log_every == 0:
                self.say(self._line(report))
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        if last or time.monotonic() - self._drawn_s >= LIVE_S:
            self._drawn_s = time.monotonic()
            self._live.update(Text(self._line(report), no_wrap=True, overflow="ellipsis"), refresh=True)

    def stop(self) -> None:
        """Leave the live line as it is; what is printed from now on stands below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, report: StepReport) -> str:
        wide = len(str(self._steps))
        parts = [
            f"step {report.step:>{wide}}/{self._steps}",
            f"loss {report.loss:.4f}",
            f"{report.tokens_per_s:,.0f} tokens/s",
        ]
        if report.exposed is not None:
            parts.append(f"exposed {100 * report.exposed:.1f} %")
        parts.append(
            f"{report.step_s:.2f} s a step" if report.step_s >= 1 else f"{report.step_s * 1e3:.0f} ms a step"
        )
        parts.append(f"lr {report.lr:.2g}")
        parts.append(f"grad norm {report.grad_norm:.2f}")
        left_s = (self._steps - report.step) * report.step_s
        if report.step < self._steps:
            parts.append(f"{duration(left_s)} left")
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """`42 s`, `3:05 min`, `2:10:00 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} h"
