"""Training under every layout gives what one process gives, and goes on from any other layout's checkpoints.

Two processes train all runs of two ranks, one after the other; a test then looks at what they left.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.launch import launch
from tests.train.test_export import LLAMA
from tests.train.tiny import steps_of, write_settings

from stretto.config import load_settings
from stretto.models.build import build_model
from stretto.train.export import export
from stretto.train.trainer import Trainer
from stretto.train.whole import load_whole
from stretto.train.world import World

STEPS, HALF = 8, 4
TOLERANCE = 1e-5
"""Relative, of losses in float32 over these steps: sums are grouped otherwise."""

SPREAD = "tp = 2\nsequence_parallel = true\nmicrobatches = 2"

pytestmark = pytest.mark.slow
"""Five short runs of several processes; continuous integration trains over tp in its main job."""


def write(
    folder: Path, run: str, *, layout: str = "", model: str = "", dropout: float = 0.0, **rest: Any
) -> None:
    """Settings of a run with an even vocabulary and the layout's lines in [parallel]."""
    path = write_settings(folder, run=run, model=f"vocab_size = 302\n{model}", **{"steps": STEPS, **rest})
    text = path.read_text().replace("dropout = 0.1", f"dropout = {dropout}")
    text = text.replace("pp = 1\nmicrobatches = 2", layout or "microbatches = 2")
    path.write_text(text.replace("every_steps = 5", f"every_steps = {HALF}"))


def resume(folder: Path, run: str, source: str) -> None:
    """Let a run begin at another one's checkpoint of half the steps."""
    path = folder / f"{run}.toml"
    made = folder / source / "checkpoints" / f"step-{HALF:06d}"
    path.write_text(path.read_text().replace("keep = 9", f'keep = 9\nresume = "{made}"'))


def alone(folder: Path, run: str) -> None:
    Trainer(load_settings(folder / f"{run}.toml"), World()).run()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, done."""
    folder = tmp_path_factory.mktemp("layouts")
    write(folder, "one", model="tie_embeddings = true")
    alone(folder, "one")
    write(folder, "tp", layout=SPREAD, model="tie_embeddings = true")
    write(folder, "drop", layout="tp = 2\nmicrobatches = 2", dropout=0.1)
    write(folder, "drop-resumed", layout="tp = 2\nmicrobatches = 2", dropout=0.1)
    resume(folder, "drop-resumed", "drop")
    write(folder, "dp", layout="dp = 2\nmicrobatches = 1", model="tie_embeddings = true")
    resume(folder, "dp", "tp")
    write(folder, "pp", layout="pp = 2\nmicrobatches = 2", model="tie_embeddings = true")
    resume(folder, "pp", "tp")
    write(
        folder,
        "nothing-on-one",
        layout='pp = 2\nmicrobatches = 2\nsplit = "embedding,layer*2,loss|"',
        model="tie_embeddings = true",
    )
    resume(folder, "nothing-on-one", "tp")
    write(folder, "tp-of-one", layout="tp = 2\nmicrobatches = 2", model="tie_embeddings = true")
    resume(folder, "tp-of-one", "one")
    runs = ("tp", "drop", "drop-resumed", "dp", "pp", "nothing-on-one", "tp-of-one")
    out = launch(2, "tests.train.layouts", str(folder), *runs)
    (folder / "out.json").write_text(json.dumps(out))
    return folder


def losses(folder: Path, run: str, key: str = "loss") -> dict[int, float]:
    return {step: line[key] for step, line in steps_of(folder / run).items()}


def test_all_steps_are_those_of_one_process(folder: Path) -> None:
    for key in ("loss", "grad_norm", "lr"):
        expected = losses(folder, "one", key)
        assert len(expected) == STEPS
        assert losses(folder, "tp", key) == pytest.approx(expected, rel=TOLERANCE)
    held = [json.loads((folder / run / "summary.json").read_text())["held_out_loss"] for run in ("one", "tp")]
    assert held[1] == pytest.approx(held[0], rel=TOLERANCE)


def test_what_ranks_hold_alike_stays_alike_bit_for_bit(folder: Path) -> None:
    (first, _) = json.loads((folder / "out.json").read_text())
    compared = {line.split()[0]: int(line.split()[2]) for line in first.splitlines() if " copies " in line}
    norms = 2 * 2 * 2 + 2  # of two layers, gain and bias, and the last
    assert compared["tp"] == compared["drop"] == norms
    assert compared["dp"] > norms  # everything
    assert compared["pp"] == 1  # the tied embedding
    assert compared["nothing-on-one"] == 0


def test_resuming_under_the_same_layout_changes_no_bit(folder: Path) -> None:
    assert "resumed from" in (folder / "out.json").read_text()
    for key in ("loss", "grad_norm"):
        expected = losses(folder, "drop", key)
        found = losses(folder, "drop-resumed", key)
        assert found == {step: value for step, value in expected.items() if step > HALF}
    one, two = (
        load_whole(folder / run / "checkpoints" / f"step-{STEPS:06d}")[0] for run in ("drop", "drop-resumed")
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("run", ["dp", "pp", "nothing-on-one", "tp-of-one", "one"])
def test_any_layout_goes_on_from_any_other(folder: Path, run: str) -> None:
    if run == "one":
        write(folder, "one-of-tp", model="tie_embeddings = true")
        resume(folder, "one-of-tp", "tp")
        alone(folder, "one-of-tp")
        run = "one-of-tp"
    expected = {step: loss for step, loss in losses(folder, "one").items() if step > HALF}
    assert losses(folder, run) == pytest.approx(expected, rel=TOLERANCE)


def check_export(folder: Path, one: str, spread: str) -> None:
    """What was learned is compared, not where it began: Adam moves a weight by about its rate each step."""
    found = {}
    for run in (one, spread):
        export(folder / run, folder / f"{run}-out")
        found[run] = load_file(folder / f"{run}-out" / "model.safetensors")
    assert found[one].keys() == found[spread].keys()
    settings = load_settings(folder / f"{one}.toml")
    start = build_model(settings.model, 302, settings.training.seed).state_dict()
    for name, tensor in found[one].items():
        moved = tensor - start[name]
        assert float(moved.norm()) > 1e-3 * float(tensor.norm())
        assert float((found[spread][name] - tensor).norm()) < 1e-4 * float(moved.norm()), name


def test_an_exported_model_has_the_weights_of_one_process(folder: Path) -> None:
    check_export(folder, "one", "tp")


@pytest.mark.slow
def test_a_llama_is_spread_and_exported(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("llama-one", "llama-tp"):
        write(folder, name, layout=SPREAD if name == "llama-tp" else "", steps=4)
        path = folder / f"{name}.toml"
        text = path.read_text()
        begin, end = text.index("kind ="), text.index("[data]")
        path.write_text(text[:begin] + LLAMA.lstrip() + "vocab_size = 302\n\n" + text[end:])
    alone(folder, "llama-one")
    launch(2, "tests.train.layouts", str(folder), "llama-tp")
    assert losses(folder, "llama-tp") == pytest.approx(losses(folder, "llama-one"), rel=TOLERANCE)
    check_export(folder, "llama-one", "llama-tp")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama-tp-out")
    trained = load_whole(folder / "llama-tp" / "checkpoints" / "step-000004")[0]
    tokens = torch.arange(16)[None]
    assert torch.equal(model(tokens).logits, trained(tokens).logits)
