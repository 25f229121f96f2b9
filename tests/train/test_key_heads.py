"""A run whose ranks share heads of keys: checkpoints and exports hold each head once, any layout reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runtime.launch import launch
from tests.train.layouts import described
from tests.train.test_layouts import HALF, STEPS, TOLERANCE, alone, check_export, losses, resume, write
from torch.distributed.checkpoint.filesystem import FileSystemReader

from stretto.train import trainer

LLAMA = """
kind = "huggingface"
architecture = "LlamaForCausalLM"

[model.config]
vocab_size = 302
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = {heads}
tie_word_embeddings = true

"""

pytestmark = pytest.mark.slow
"""Runs of several processes; what each rank writes and holds is tested on threads (`tests/parallelize`)."""

KEYS = "model.model.layers.0.self_attn.k_proj"


def write_llama(folder: Path, run: str, *, heads: int, layout: str = "", steps: int = STEPS) -> None:
    write(folder, run, layout=layout, steps=steps)
    path = folder / f"{run}.toml"
    text = path.read_text()
    begin, end = text.index("kind ="), text.index("[data]")
    path.write_text(text[:begin] + LLAMA.format(heads=heads).lstrip() + text[end:])


@pytest.fixture(autouse=True)
def described_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the processes that are launched, nobody measures this machine."""
    monkeypatch.setattr(trainer, "make_plan", described)


def stored(checkpoint: Path, name: str) -> list[tuple[int, ...]]:
    """The places of a stored tensor that were written."""
    found = FileSystemReader(checkpoint).read_metadata().state_dict_metadata[name]
    return sorted(tuple(chunk.offsets) for chunk in found.chunks)  # type: ignore[union-attr]


def test_two_processes_share_a_head(tmp_path: Path) -> None:
    write_llama(tmp_path, "one", heads=1, steps=HALF)
    write_llama(tmp_path, "tp", heads=1, steps=HALF, layout="tp = 2\nmicrobatches = 2")
    alone(tmp_path, "one")
    (told, _) = launch(2, "tests.train.layouts", str(tmp_path), "tp")
    assert "tp copies" in told  # what ranks share had the same bits, with its optimizer state
    assert len(losses(tmp_path, "one")) == HALF
    for key in ("loss", "grad_norm"):
        assert losses(tmp_path, "tp", key) == pytest.approx(losses(tmp_path, "one", key), rel=TOLERANCE)
    checkpoint = tmp_path / "tp" / "checkpoints" / f"step-{HALF:06d}"
    for part in (f"{KEYS}.weight", f"optimizer.{KEYS[6:]}.weight.exp_avg"):
        assert stored(checkpoint, part) == [(0, 0)]
    check_export(tmp_path, "one", "tp")


def test_any_layout_goes_on_from_a_run_with_shared_heads(tmp_path: Path) -> None:
    layouts = {
        "four": "tp = 4\nmicrobatches = 2",
        "four-sequence": "tp = 4\nsequence_parallel = true\nmicrobatches = 2",
        "pp-tp": "pp = 2\ntp = 2\nmicrobatches = 2",
        "two": "tp = 2\nmicrobatches = 2",
    }
    write_llama(tmp_path, "one", heads=2)
    alone(tmp_path, "one")
    for run, layout in layouts.items():
        write_llama(tmp_path, run, heads=2, layout=layout)
    resume(tmp_path, "pp-tp", "four")
    resume(tmp_path, "two", "four")
    launch(4, "tests.train.layouts", str(tmp_path), "four", "four-sequence", "pp-tp")
    launch(2, "tests.train.layouts", str(tmp_path), "two")
    write_llama(tmp_path, "one-of-four", heads=2)
    resume(tmp_path, "one-of-four", "four")
    alone(tmp_path, "one-of-four")
    write_llama(tmp_path, "four-of-two", heads=2, layout=layouts["four"])
    resume(tmp_path, "four-of-two", "one")
    launch(4, "tests.train.layouts", str(tmp_path), "four-of-two")
    expected = losses(tmp_path, "one")
    assert len(expected) == STEPS
    for run in ("four", "four-sequence"):
        for key in ("loss", "grad_norm"):
            assert losses(tmp_path, run, key) == pytest.approx(losses(tmp_path, "one", key), rel=TOLERANCE)
    rest = {step: loss for step, loss in expected.items() if step > HALF}
    for run in ("pp-tp", "two", "one-of-four", "four-of-two"):
        assert losses(tmp_path, run) == pytest.approx(rest, rel=TOLERANCE)
    checkpoint = tmp_path / "four" / "checkpoints" / f"step-{HALF:06d}"
    assert stored(checkpoint, f"{KEYS}.weight") == [(0, 0), (8, 0)]
    check_export(tmp_path, "one", "four")
    held = [
        json.loads((tmp_path / run / "summary.json").read_text())["held_out_loss"] for run in ("one", "four")
    ]
    assert held[1] == pytest.approx(held[0], rel=TOLERANCE)
