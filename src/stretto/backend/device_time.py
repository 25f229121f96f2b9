"""Time on an accelerator: events, waits for what was queued, and work that lasts a given time.

That work leaves the device free for other work. It is a running sum down the rows of a tensor of two columns:
one block of two threads, which runs as long as there are rows, and leaves all other multiprocessors and
nearly all memory bandwidth alone. How many rows a microsecond has is measured first. Public names of PyTorch
only.
"""

from __future__ import annotations

import torch

LONG_ROWS = 2**18
"""Rows of the longest single kernel. Assumed: tens of milliseconds, from 4 MiB."""

SHORT_ROWS = 2**12
"""Rows of the shorter of the two kernels by which the rate is measured."""


class DeviceDelay:
    """Makes streams of `device` busy. Lanes, each with a name, have memory of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ones = torch.ones(LONG_ROWS, 2, device=device)
        self._sums: dict[str, torch.Tensor] = {}
        took: dict[int, float] = {}
        # The second time each is what counts.
        for rows in (SHORT_ROWS, LONG_ROWS, SHORT_ROWS, LONG_ROWS):
            start, end = mark(torch.cuda.current_stream(device)), self._sum(rows, "")
            end.synchronize()
            took[rows] = 1000.0 * start.elapsed_time(end)
        self._rows_per_us = (LONG_ROWS - SHORT_ROWS) / max(took[LONG_ROWS] - took[SHORT_ROWS], 1.0)
        self._least_us = max(0.0, took[SHORT_ROWS] - SHORT_ROWS / self._rows_per_us)

    def spend(self, us: float, lane: str = "") -> None:
        """Queue so many microseconds of work on the current stream."""
        while us > self._least_us:
            rows = max(1, min(int((us - self._least_us) * self._rows_per_us), LONG_ROWS))
            self._sum(rows, lane)
            us -= self._least_us + rows / self._rows_per_us

    def _sum(self, rows: int, lane: str) -> torch.cuda.Event:
        if lane not in self._sums:
            self._sums[lane] = torch.empty_like(self._ones)
        torch.cumsum(self._ones[:rows], 0, out=self._sums[lane][:rows])
        return mark(torch.cuda.current_stream(self._device))


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event with a time, behind what is queued on the stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def synchronise(device: torch.device) -> None:
    """Nothing on a CPU, whose ops have ended when their calls have."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
