"""What takes long says so every two seconds, whatever it is inside of."""

from __future__ import annotations

import threading
import time

from stretto.train.waiting import TELL_S, Waiting


def test_lines_come_while_the_work_says_nothing() -> None:
    lines: list[str] = []
    three = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            three.set()

    with Waiting(say, "planning", 0.01) as waiting:
        waiting.now("variant 1 of 12")
        assert three.wait(60)
    assert all(line.startswith("planning") for line in lines)
    assert lines[-1].startswith("planning: variant 1 of 12 (")
    told = len(lines)
    time.sleep(0.05)
    assert len(lines) == told, "nothing comes once it is over"
    assert TELL_S <= 2.0


def test_what_is_done_sooner_needs_no_line() -> None:
    lines: list[str] = []
    with Waiting(lines.append, "planning"):
        pass
    assert lines == []
