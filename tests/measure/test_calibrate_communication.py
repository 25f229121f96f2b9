"""`stretto calibrate` between processes: what it finds of collectives and messages, and going on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto.measure import calibrate
from stretto.measure.time_ops import machine_of
from stretto.price.calibration import Calibration, load_calibration, save_calibration
from tests.price.comm_job import comm_job
from tests.runtime.launch import launch

RANKS = """
import sys
import torch
from stretto.cli.calibrate import calibrate as app
from stretto.measure import calibrate, time_ops

calibrate.PRICED, calibrate.SIZES = ("all_reduce",), (65_536, 4_096)
time_ops.PRODUCTS, time_ops.LINEAR_SIZES = ((64, 64, 64),), ()
time_ops.ELEMENTS, time_ops.ATTENTIONS = (1 << 10,), ()
torch.set_num_threads(1)
app(["--cluster-out", sys.argv[1]], standalone_mode=False)
"""


def nothing(what: str, done: int, of: int) -> None:
    """No one looks."""


@pytest.mark.slow
@pytest.mark.quiet
def test_running_ranks_find_collectives_and_messages(tmp_path: Path) -> None:
    script, out = tmp_path / "ranks.py", tmp_path / "c.json"
    script.write_text(RANKS)
    launch(4, script, str(out))
    found = load_calibration(out)
    assert {(one.kind, one.members, one.stride) for one in found.collectives} == {
        ("all_reduce", 2, 1),
        ("all_reduce", 2, 2),
        ("all_reduce", 4, 1),
    }
    for one in found.collectives:
        assert one.hosts == 1
        assert one.cost.curve.us(65_536) >= one.cost.curve.us(4_096) > 1.0
        assert 0.0 <= one.cost.lost_us(65_536) < 1e6
        assert one.calls.start_us > 0.0
    assert [link.stride for link in found.links] == [1, 2]
    for link in found.links:
        assert link.back is not None
        assert link.link.bytes_per_us > 10.0
        assert link.back.bytes_per_us > 10.0
    # What is there is not measured again.
    launch(4, script, str(out))
    again = load_calibration(out)
    assert (again.collectives, again.links, again.ops) == (found.collectives, found.links, found.ops)


@pytest.mark.quiet
def test_one_process_measures_between_others_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "PRICED", ("all_reduce", "all_to_all"))
    monkeypatch.setattr(calibrate, "SIZES", (65_536,))
    monkeypatch.setattr(calibrate, "LOCAL_GROUPS", (2,))
    monkeypatch.setattr(calibrate, "NOISY_GROUP", -1.0)
    monkeypatch.setattr(calibrate, "NOISY", -1.0)
    cpu = torch.device("cpu")
    outcome = calibrate.Outcome(Calibration(machine_of(cpu)))
    calibrate.calibrate_communication(outcome, [], cpu, nothing)
    found = outcome.calibration
    one, other = found.collectives
    assert (one.kind, one.members, one.stride) == ("all_reduce", 2, 1)
    assert (other.kind, other.members, other.stride) == ("all_to_all", 2, 1)
    assert other.cost.curve.us(65_536) > 1.0
    assert any("all_reduce of 2 ranks, 1 apart: rounds differ" in warning for warning in outcome.warnings)
    (link,) = found.links
    assert link.link.source == "measured, loopback"
    assert any("messages between ranks 1 apart: rounds differ" in warning for warning in outcome.warnings)

    def fail(*given: object, **named: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(calibrate, "measure_between", fail)
    calibrate.calibrate_communication(outcome, [], cpu, nothing)
    assert outcome.calibration.collectives == [one, other]
    save_calibration(found, tmp_path / "c.json")
    (read,) = load_calibration(tmp_path / "c.json").links
    assert read.link.latency_us == pytest.approx(link.link.latency_us, abs=0.01)


def test_a_jobs_own_sizes_come_first() -> None:
    job = comm_job(2, 2, tp=2, rows=64, hidden=128)
    sizes = calibrate._sizes("all_reduce", [job])
    assert sizes.index(64 * 128 * 4) < sizes.index(calibrate.SIZES[0])
    assert set(sizes) > set(calibrate.SIZES)
    assert len(sizes) == len(set(sizes))
    large = comm_job(2, 2, tp=2, rows=2**16, hidden=2**11)
    assert max(calibrate._sizes("all_reduce", [large])) <= calibrate.MOST_BYTES
