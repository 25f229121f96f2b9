"""Progress for people: one live line on a terminal, a plain line now and then elsewhere. Rank 0 shows it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stretto.train.starting import Starting

LIVE_S = 0.2
"""The live line is drawn at most this often: people read no faster, and drawing takes time from training."""


class Progress:
    """Shows steps out of `steps`; `say` prints a line that stays. `shown` False shows nothing.

    starting: what tells of the run until its first step is shown.
    """

    def __init__(
        self,
        steps: int,
        log_every: int,
        shown: bool,
        console: Console | None = None,
        starting: Starting | None = None,
    ) -> None:
        self._steps, self._log_every, self._shown = steps, log_every, shown
        self.starting = starting if starting is not None else Starting(shown, console)
        self._console = self.starting.console
        self._live: Live | None = None
        self._drawn_s = 0.0
        self.unit = "tokens"
        """In what speed is counted."""

    def say(self, line: str) -> None:
        """Print a line above the live one."""
        if self._shown:
            self.starting.say(line)

    def show(self, line: Mapping[str, float], exposed: float | None) -> None:
        """Show a step: on a terminal the live line, else a plain one for the first and every `log_every`
        steps.

        line: as `stretto.train.metrics` writes it. exposed: share of the step, of the last that was gathered.
        """
        if not self._shown:
            return
        first = self.starting.going_on
        self.starting.end()
        step, shown = int(line["step"]), self._line(line, exposed)
        if first:
            self.say(f"first step: {time.time() - self.starting.started_at_s:.1f} s from the start")
        last = step == self._steps
        if not self._console.is_terminal:
            if first or last or step % self._log_every == 0:
                self.say(shown)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        if first or last or time.monotonic() - self._drawn_s >= LIVE_S:
            self._drawn_s = time.monotonic()
            self._live.update(Text(shown, no_wrap=True, overflow="ellipsis"), refresh=True)

    def stop(self) -> None:
        """Leave the live line as it is; what is printed from now on stands below it."""
        self.starting.end()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def let_go(self) -> None:
        """As `Starting.let_go`."""
        self.starting.let_go()
        if self._live is not None:
            self._console.show_cursor(True)

    def _line(self, line: Mapping[str, float], exposed: float | None) -> str:
        wide, step, step_s = len(str(self._steps)), int(line["step"]), line["step_s"]
        parts = [
            f"step {step:>{wide}}/{self._steps}",
            f"loss {line['loss']:.4f}",
            self._speed(line),
        ]
        if "mfu" in line:
            parts.append(f"MFU {100 * line['mfu']:.1f} %")
        if exposed is not None:
            parts.append(f"exposed {100 * exposed:.1f} %")
        parts.append(f"{step_s:.2f} s a step" if step_s >= 1 else f"{step_s * 1e3:.0f} ms a step")
        parts += [f"lr {line['lr']:.2g}", f"grad norm {line['grad_norm']:.2f}"]
        if step < self._steps:
            parts.append(f"{duration((self._steps - step) * step_s)} left")
        return "  ".join(parts)

    def _speed(self, line: Mapping[str, float]) -> str:
        """In all, and by device where there are several."""
        all_of, each = line[f"{self.unit}_per_s"], line.get(f"{self.unit}_per_s_per_device", 0.0)
        return f"{all_of:,.0f} {self.unit}/s" + (f" ({each:,.0f} a device)" if 0 < each < all_of else "")


def duration(seconds: float) -> str:
    """`42 s`, `3:05 min`, `2:10:00 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} h"
