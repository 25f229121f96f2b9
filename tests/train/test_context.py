"""A run whose ranks share the sequence learns as the plain run does: losses, evaluation and all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.train.tiny import GPT, run, run_ranks, steps_of, write_settings


def held_out(folder: Path) -> list[Any]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


@pytest.mark.slow
def test_losses_are_those_of_one_rank(tmp_path: Path) -> None:
    still = GPT.replace("dropout = 0.1", "dropout = 0.0")
    plain = write_settings(tmp_path, run="plain", steps=6, every=3, table=still)
    status, _, err = run("train", plain)
    assert (status, err) == (0, "")
    for kind in ("ring", "gathered"):
        shared = write_settings(
            tmp_path,
            run=kind,
            steps=6,
            every=3,
            table=still,
            layout=f'cp = 2\ncp_kind = "{kind}"\nmicrobatches = 2',
        )
        for status, _, err in run_ranks(*[["train", shared]] * 2):
            assert (status, err) == (0, "")
        want, found = steps_of(tmp_path / "plain"), steps_of(tmp_path / kind)
        assert [one["loss"] for one in found.values()] == pytest.approx(
            [one["loss"] for one in want.values()], rel=1e-5
        )
        assert held_out(tmp_path / kind) == pytest.approx(held_out(tmp_path / "plain"), rel=1e-5)


@pytest.mark.slow
def test_an_evaluation_without_dropout_may_send_otherwise(tmp_path: Path) -> None:
    """On processors, attention with dropout is plain products."""
    settings = write_settings(tmp_path, steps=4, every=2, layout="cp = 2\nmicrobatches = 2")
    for status, _, err in run_ranks(*[["train", settings]] * 2):
        assert (status, err) == (0, "")
