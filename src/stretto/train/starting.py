"""What a run does before its first step, and what planning does, told meanwhile: no screen should be silent
for long.

A thread tells a phase that takes longer again and again: on a terminal in one live line, elsewhere by a line
every `EVERY_S`. Loads nothing but what prints, so that it can tell of PyTorch being loaded.
"""

from __future__ import annotations

import os
import threading
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stretto.train.launched import tell_phase

EVERY_S = 1.5
"""Seconds between two lines. A library that is being loaded may keep the thread from it for a moment."""

DRAWN_S = 0.5
"""Between two drawings of the live line."""

STARTED = "STRETTO_STARTED_AT"
"""Environment variable: when the command was started by which ranks were, in seconds of the clock."""


class Starting:
    """Tells phases until `end`, at the latest until it is left as a context. shown: False tells nothing."""

    def __init__(self, shown: bool = True, console: Console | None = None) -> None:
        self.console = console if console is not None else Console(soft_wrap=True)
        self._shown = shown
        self._phase = self._detail = ""
        self._begun_s = self._said_s = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        told = os.environ.get(STARTED, "")
        self._started_at_s = float(told) if told.replace(".", "", 1).isdigit() else time.time()

    def __enter__(self) -> Starting:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def started_at_s(self) -> float:
        """When the command was started, in seconds of the clock."""
        return self._started_at_s

    @property
    def going_on(self) -> bool:
        """Whether a phase was told and none was the last."""
        return self._thread is not None and not self._over.is_set()

    def begin(self, phase: str) -> None:
        """A phase begins, and with it the one before ends."""
        tell_phase(phase)
        if not self._shown or self._over.is_set():
            return
        with self._lock:
            self._phase, self._detail, self._begun_s = phase, "", time.monotonic()
            if self._thread is None:
                if self.console.is_terminal:
                    self._live = Live(console=self.console, auto_refresh=False, transient=True)
                    self._live.start()
                self._thread = threading.Thread(target=self._tell, name="starting", daemon=True)
                self._thread.start()
            self._show()

    def detail(self, line: str) -> None:
        """What the phase is at; told with it."""
        self._detail = line

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._shown:
            with self._lock:
                self._print(line)

    def end(self) -> None:
        """The phases are over; lines are still said."""
        self._over.set()
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def let_go(self) -> None:
        """Give the terminal its cursor back, from any thread, where the process ends without `end`."""
        if self._live is not None:
            self.console.show_cursor(True)

    def _tell(self) -> None:
        while not self._over.wait(DRAWN_S / 2):
            now_s = time.monotonic()
            with self._lock:
                due_s = DRAWN_S if self._live is not None else EVERY_S - DRAWN_S / 2
                if now_s - self._said_s >= due_s and not self._over.is_set():
                    self._show()

    def _show(self) -> None:
        took_s = time.monotonic() - self._begun_s
        line = self._phase + (f", {took_s:.0f} s" if took_s >= 1.0 else "")
        line += f": {self._detail}" if self._detail else ""
        if self._live is not None:
            self._said_s = time.monotonic()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._print(f"  {line}")

    def _print(self, line: str) -> None:
        self._said_s = time.monotonic()
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
