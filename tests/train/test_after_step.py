"""What a task does after each step: routers' biases follow their experts' loads, also over a resumption."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tests.train.tiny import steps_of, train, write_settings

from stretto.saving import digests

MOE = """
kind = "moe"
layers = 2
hidden = 32
heads = 2
context = 16
experts = 4
dense_first = 1
router = "sigmoid"
bias_rate = 0.01
aux_weight = 0.0
"""
RATE = "lr_schedule.kind=constant"
"""Else the rate follows from the number of steps."""
NAME = "blocks.1.mlp.router.bias"


def test_biases_move_once_a_step_and_are_resumed(tmp_path: Path) -> None:
    through = train(write_settings(tmp_path, steps=4, every=2, run="through", table=MOE), RATE)
    bias = dict(through.runner.named_buffers())[NAME]
    assert bias.count_nonzero()
    moves = bias / 0.01
    torch.testing.assert_close(moves, moves.round())
    assert int(moves.abs().max()) <= 4
    lines = steps_of(tmp_path / "through")
    assert [{*line["metrics"]} for line in lines.values()] == [{"violation.1"}] * 4
    assert all(line["metrics"]["violation.1"] >= 0 for line in lines.values())

    half = write_settings(tmp_path, steps=2, every=2, run="half", table=MOE)
    train(half, RATE)
    # A checkpoint from before there was a setting goes on with its default.
    place = tmp_path / "half" / "checkpoints" / "step-000002"
    state = place / "state.json"
    document = json.loads(state.read_text())
    del document["settings"]["model"]["groups"], document["settings"]["optimizer"]["name"]
    state.write_text(json.dumps(document))
    names = json.loads((place / digests.NAME).read_text())["files"]
    (place / digests.NAME).write_bytes(digests.sealed({name: (place / name).read_bytes() for name in names}))
    resumed = train(half, RATE, "training.steps=4")
    assert torch.equal(dict(resumed.runner.named_buffers())[NAME], bias)
