"""Runs whose ranks keep rows of parameters, killed at named places, go on to the same bits; what they leave
is read under other layouts.

All is in float64 (`tests.train.killed`).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.runtime.launch import launch
from tests.train.tiny import GPT, steps_of, write_settings

EVERY = 3
SHALLOW = GPT.replace("layers = 2", "layers = 1")
KINDS = ("step", "loss", "grad_norm", "lr")
Lines = dict[int, list[float]]


def lines_of(run: Path) -> Lines:
    return {step: [line[kind] for kind in KINDS] for step, line in steps_of(run).items()}


def held_out(run: Path) -> float:
    return float(json.loads((run / "summary.json").read_text())["held_out_loss"])


def trained(config: Path, ranks: int, place: str = "nowhere", after: int = 0, victim: int = -1) -> None:
    """By so many ranks, of which one may be killed. The others have to end by themselves,
    and say why."""
    statuses = (0,) if victim < 0 else (1, -signal.SIGKILL)
    said = launch(
        ranks,
        "tests.train.killed",
        *(place, str(after), str(victim), "train", str(config)),
        statuses=statuses,
    )
    others = [text for rank, text in enumerate(said) if victim not in (-1, rank)]
    assert all("was lost" in text for text in others), (place, others)


def run_of(folder: Path, name: str, layout: str, steps: int, more: str = "", table: str = GPT) -> Path:
    table += "vocab_size = 302\n"
    path = write_settings(folder, run=name, steps=steps, every=EVERY, layout=layout, table=table)
    path.write_text(path.read_text().replace("keep = 9", f"keep = 9\n{more}"))
    return path


def assert_goes_on(
    folder: Path, layout: str, ranks: int, steps: int, places: Sequence[tuple[str, int, int]]
) -> None:
    """A run that is killed at one place after another, each time until it is resumed, beside one that is not.

    places: (place, step, rank).
    """
    straight, killed = (run_of(folder, name, layout, steps) for name in ("straight", "killed"))
    trained(straight, ranks)
    expected = lines_of(folder / "straight")
    assert sorted(expected) == list(range(1, steps + 1))
    for place, after, victim in places:
        trained(killed, ranks, place, after, victim)
        found = lines_of(folder / "killed")
        # What a save does beside steps may come after the last of them.
        assert after <= len(found) <= steps, place
        assert found == {step: line for step, line in expected.items() if step in found}, place
    trained(killed, ranks)
    assert lines_of(folder / "killed") == expected
    assert held_out(folder / "killed") == held_out(folder / "straight")


def test_killed_inside_a_step_it_does_the_steps_behind_its_checkpoint_again_to_the_bit(
    tmp_path: Path,
) -> None:
    config = run_of(tmp_path, "killed", "dp = 2\nzero = 3\nmicrobatches = 2", EVERY + 2, table=SHALLOW)
    trained(config, 2, "scatter", EVERY + 1, victim=1)
    before = lines_of(tmp_path / "killed")
    assert sorted(before) == [1, 2, 3, 4]
    trained(config, 2)
    after = lines_of(tmp_path / "killed")
    assert sorted(after) == [1, 2, 3, 4, 5]
    assert after == before | {5: after[5]}


IN_A_STEP, IN_A_CHECKPOINT = EVERY + 1, 2 * EVERY
PLACES = [
    ("gather", IN_A_STEP, 1),
    ("scatter", IN_A_STEP, 1),
    ("update", IN_A_STEP, 1),
    ("update done", IN_A_STEP, 0),
    ("tensors", IN_A_CHECKPOINT, 1),
    ("tensors done", IN_A_CHECKPOINT, 1),
    ("rename", IN_A_CHECKPOINT, 0),
    ("rename done", IN_A_CHECKPOINT, 0),
    ("marker done", IN_A_CHECKPOINT, 0),
]
"""(place, after which step, the rank that is killed); rank 0 alone renames and marks."""
FEW = [place for place in PLACES if place[0] in ("scatter", "update done", "tensors")]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("layout", "ranks", "places"),
    [
        ("dp = 4\ndp_shard = 2\nzero = 3\nmicrobatches = 1", 4, PLACES),
        ("pp = 2\ndp = 2\nzero = 3\nmicrobatches = 2", 4, FEW),
        ("dp = 2\nzero = 1\nmicrobatches = 2", 2, FEW),
        ('dp = 2\nzero = 1\nowners = ["*"]\nmicrobatches = 2', 2, FEW),
    ],
    ids=["groups", "pipeline", "zero 1", "owners"],
)
def test_killed_at_any_place_it_goes_on_to_the_same_bits(
    tmp_path: Path, layout: str, ranks: int, places: Sequence[tuple[str, int, int]]
) -> None:
    assert_goes_on(tmp_path, layout, ranks, 3 * EVERY, places)


OTHERS = {
    "one process": (1, "microbatches = 4"),
    "copies": (2, "dp = 2\nmicrobatches = 2"),
    "zero 1 of two": (2, "dp = 2\nzero = 1\nmicrobatches = 2"),
    "zero 3 of four": (4, "dp = 4\nzero = 3\nmicrobatches = 1"),
    "owners": (2, 'dp = 2\nzero = 1\nowners = ["blocks.*"]\nmicrobatches = 2'),
    "tp": (2, "tp = 2\nsequence_parallel = true\nmicrobatches = 4"),
    "tp and zero 3": (4, "tp = 2\ndp = 2\nzero = 3\nmicrobatches = 2"),
    "pp and zero 1": (4, "pp = 2\ndp = 2\nzero = 1\nmicrobatches = 2"),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_rows_leave_is_read_under_other_layouts(tmp_path: Path) -> None:
    """And what other layouts leave is read into rows: the last goes on from what the first has left."""
    table, rows = GPT.replace("dropout = 0.1", ""), "dp = 4\ndp_shard = 2\nzero = 3\nmicrobatches = 1"

    def read_from(name: str) -> str:
        return f'resume = "{tmp_path / name}/checkpoints/step-{EVERY:06d}"'

    trained(run_of(tmp_path, "rows", rows, 2 * EVERY, table=table), 4)
    expected = lines_of(tmp_path / "rows")
    for name, (ranks, layout) in OTHERS.items():
        trained(run_of(tmp_path, name, layout, 2 * EVERY, read_from("rows"), table), ranks)
        found = lines_of(tmp_path / name)
        assert sorted(found) == [4, 5, 6], name
        for step, line in found.items():
            assert line == pytest.approx(expected[step], rel=1e-9), name
    trained(run_of(tmp_path, "straight", "microbatches = 4", 2 * EVERY, table=table), 1)
    trained(run_of(tmp_path, "rows again", rows, 2 * EVERY, read_from("straight"), table), 4)
    for step, line in lines_of(tmp_path / "rows again").items():
        assert line == pytest.approx(expected[step], rel=1e-9)
