"""A signal ends a run wherever it is handled: also inside a destructor, which cannot raise."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from stretto.train.interrupt import Interrupted, Interrupts


class Dying:
    def __init__(self, signum: int) -> None:
        self.signum = signum

    def __del__(self) -> None:
        signal.raise_signal(self.signum)
        time.sleep(0)  # where Python handles it


def interrupted_in_a_destructor(signum: int) -> None:
    dying = Dying(signum)
    del dying
    until_s = time.monotonic() + 60  # however busy the machine is
    while time.monotonic() < until_s:
        time.sleep(0.001)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_destructor(signum: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signum)
    stuck: list[Interrupted] = []
    with Interrupts(stuck.append) as interrupts:
        with pytest.raises(Interrupted) as caught:
            interrupted_in_a_destructor(signum)
        interrupts.ending()
    assert caught.value.status == 128 + signum
    assert interrupts.received is caught.value
    assert not stuck
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signum) is before


def test_other_exceptions_of_destructors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        def __del__(self) -> None:
            raise KeyError("its own")

    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: told.append(found.exc_type))
    with Interrupts(lambda _: None):
        fails = Fails()
        del fails
    assert told == [KeyError]
