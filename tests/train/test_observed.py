"""A run of a mixture of experts logs the loads of its experts, and refuses a buffer that is too small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.train.tiny import run, write_settings

from stretto.report.files import OBSERVED
from stretto.report.load import loads_of
from stretto.report.rundir import load_run

MIXTURE = ("model.kind=moe", "model.experts=4", "model.expert_ratio=1.0", "model.capacity_factor=0")
ROWS = 4 * 16 * 2
"""Of a step and layer: sequences, tokens, choices."""


@pytest.mark.slow  # `tests/report` has the tables, `tests/parallelize` what is in them
def test_a_run_shows_loads_and_does_not_end_with_an_evaluation(tmp_path: Path) -> None:
    config = write_settings(tmp_path, steps=12, every=0)
    changes = (*MIXTURE, "parallel.dp=2", "parallel.ep=2", "parallel.ep_buffer=2.0", "training.eval_every=5")
    status, out, err = run("train", config, *changes, "parallel.microbatches=1")
    assert status == 0, err
    for words in ("Load by expert, steps 11 to 12", "blocks.0.mlp.experts", "Who waits for whom", "rank 1"):
        assert words in out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = [line for line in lines if "observed" in line]
    assert [(line["step"], "loss" in line) for line in seen] == [
        *((5, True), (5, False), (10, True), (10, False), (12, True), (12, False))
    ]
    for line in seen:
        for names in line["observed"].values():
            assert sum(names["rows"]) == pytest.approx(ROWS, rel=1e-4)
            assert ("dropped" in names) is ("loss" not in line)
    observed = OBSERVED.load(tmp_path / "run" / "observed.json")
    assert (observed.first, observed.last) == (11, 12)
    assert [load.steps for load in loads_of(observed.all)] == [12, 12]
    assert [load.steps for load in loads_of(observed.evaluation)] == [2, 2]
    assert all(1.0 <= (load.buffer or 0.0) <= 2.0 for load in loads_of(observed.all))
    assert "Who waits for whom" in (tmp_path / "run" / "report.html").read_text()
    assert load_run(tmp_path / "run").observed == observed


@pytest.mark.slow
def test_a_buffer_that_is_too_small_ends_the_run_with_what_would_do(tmp_path: Path) -> None:
    config = write_settings(tmp_path, steps=20, every=5)
    changes = (*MIXTURE, "parallel.dp=2", "parallel.ep=2", "parallel.ep_buffer=1.0")
    status, _, err = run("train", config, *changes)
    assert status == 1
    assert err.count("\n") == 1
    assert "or give ep_overflow = 'drop'" in err
    would_do = err[err.index("give ep_buffer = ") + len("give ") :].split(" or more")[0].replace(" ", "")
    assert 1.0 < float(would_do.partition("=")[2]) <= 2.0
    assert run("train", config, *changes, "parallel.ep_overflow=drop")[::2] == (0, "")
