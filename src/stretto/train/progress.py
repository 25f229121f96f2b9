"""Progress for users: phases until the first step, then steps. Rank 0 shows it.

On a terminal it is one live line, which rich draws again now and then. Elsewhere a thread prints a line every
`EVERY_S` while a phase lasts, since no screen should be silent for long, and a step is a line now and then.
Loads nothing but what prints, so that it can show that PyTorch is being loaded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stretto.train.failure import enter_phase

EVERY_S = 1.25
"""Seconds between two lines of a phase. A library that is being loaded may keep the thread from it for a
moment."""
DRAWN_PER_S = 4
"""How often a live line is drawn: users read no faster, and drawing takes time from training."""
LEAST_NEEDED = (" (", "grad norm", "lr ", "a step", "exposed", "MFU")
"""What a live line leaves out where the terminal is narrow, in this order: what is in brackets, and parts
with these words."""
STARTED = "STRETTO_STARTED_AT"
"""Environment variable: when the command was started by which ranks were, in seconds of the clock."""


class Progress:
    """Shows phases until the first step, and then steps; `say` prints a line that stays. `shown` False shows
    nothing. As a context it ends what is live.

    steps, log_every, unit: how many steps there are, after how many a line is printed where there is no
    terminal, in what speed is counted; anyone who shows steps sets them before.
    """

    def __init__(self, shown: bool = True, console: Console | None = None) -> None:
        self.console = console if console is not None else Console(soft_wrap=True)
        self.steps = self.log_every = 1
        self.unit = "tokens"
        self._shown = shown
        self._phase = self._detail = ""
        self._step: list[str] = []
        self._begun_s = time.monotonic()
        self._first_step = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        started = os.environ.get(STARTED, "")
        self.started_at_s = float(started) if started.replace(".", "", 1).isdigit() else time.time()
        """When the command was started, in seconds of the clock."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def say(self, line: str) -> None:
        """Print a line above the live one."""
        if self._shown:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """End the phases, and leave a live line of steps as it is; what is printed now comes below it."""
        self._first_step.set()
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def let_go(self) -> None:
        """Give the terminal its cursor back, from any thread, where the process ends without `stop`."""
        if self._live is not None:
            self.console.show_cursor(True)

    # Phases.

    def begin(self, phase: str) -> None:
        """A phase begins, and with it the one before ends."""
        enter_phase(phase)
        if not self._shown or self._first_step.is_set():
            return
        self._phase, self._detail, self._begun_s = phase, "", time.monotonic()
        if not self.console.is_terminal:
            self.say(f"  {phase}")
        if self._thread is None:
            self._begin_live(transient=True)
            self._thread = threading.Thread(target=self._repeat, name="phases", daemon=True)
            self._thread.start()

    def detail(self, line: str) -> None:
        """What the phase is at; shown with it."""
        self._detail = line

    def _repeat(self) -> None:
        shown = self._begun_s
        while not self._first_step.wait(EVERY_S / 5):
            if self._live is None and time.monotonic() - max(shown, self._begun_s) >= EVERY_S:
                shown = time.monotonic()
                self.say(f"  {self._line()}")

    def _line(self) -> str:
        if self._step:
            return _fitting(self._step, self.console.width)
        took_s = time.monotonic() - self._begun_s
        line = self._phase + (f", {took_s:.0f} s" if took_s >= 1.0 else "")
        return f"{line}: {self._detail}" if self._detail else line

    # Steps.

    def show(self, line: Mapping[str, float], exposed: float | None) -> None:
        """Show a step: on a terminal the live line, else a plain one for the first and every `log_every`
        steps.

        line: as `stretto.train.results` writes it. exposed: share of the step, of the last that was gathered.
        """
        if not self._shown:
            return
        first = self._thread is not None and not self._first_step.is_set()
        if not self._first_step.is_set():
            self.stop()
        if first:
            self.say(f"first step: {time.time() - self.started_at_s:.1f} s from the start")
        step, self._step = int(line["step"]), self._step_parts(line, exposed)
        if not self.console.is_terminal:
            if first or step == self.steps or step % self.log_every == 0:
                self.say("  ".join(self._step))
        elif self._live is None:
            self._begin_live(transient=False)

    def _step_parts(self, line: Mapping[str, float], exposed: float | None) -> list[str]:
        wide, step, step_s = len(str(self.steps)), int(line["step"]), line["step_s"]
        all_of, each = line[f"{self.unit}_per_s"], line.get(f"{self.unit}_per_s_per_device", 0.0)
        parts = [
            f"step {step:>{wide}}/{self.steps}",
            f"loss {line['loss']:.4f}",
            f"{all_of:,.0f} {self.unit}/s" + (f" ({each:,.0f} a device)" if 0 < each < all_of else ""),
        ]
        if "mfu" in line:
            parts.append(f"MFU {100 * line['mfu']:.1f} %")
        if exposed is not None:
            parts.append(f"exposed {100 * exposed:.1f} %")
        parts.append(f"{step_s:.2f} s a step" if step_s >= 1 else f"{step_s * 1e3:.0f} ms a step")
        parts += [f"lr {line['lr']:.2g}", f"grad norm {line['grad_norm']:.2f}"]
        if step < self.steps:
            parts.append(f"{duration((self.steps - step) * step_s)} left")
        return parts

    def _begin_live(self, transient: bool) -> None:
        if self.console.is_terminal:
            self._live = Live(
                console=self.console,
                refresh_per_second=DRAWN_PER_S,
                transient=transient,
                get_renderable=lambda: Text(self._line(), no_wrap=True, overflow="ellipsis"),
            )
            self._live.start(refresh=True)


def _fitting(parts: list[str], width: int) -> str:
    """A line of them; where it would be wider, of those that are needed most."""
    for word in LEAST_NEEDED:
        if len("  ".join(parts)) <= width:
            break
        if word == " (":
            parts = [part.partition(word)[0] for part in parts]
        parts = [part for part in parts if word not in part]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """`42 s`, `3:05 min`, `2:10:00 h`."""
    full = round(seconds)
    if full < 60:
        return f"{full} s"
    if full < 3600:
        return f"{full // 60}:{full % 60:02d} min"
    return f"{full // 3600}:{full // 60 % 60:02d}:{full % 60:02d} h"
