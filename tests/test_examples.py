"""The picture of the README is drawn as it says; the other examples have tests beside what they show."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from tests.runtime.launch import REPOSITORY, launch


@pytest.mark.slow
def test_the_picture_of_the_readme(tmp_path: Path) -> None:
    out = tmp_path / "overlap.svg"
    made = subprocess.run(
        [sys.executable, "examples/overlap_picture.py", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr
    assert f"wrote {out}" in made.stdout
    drawn = out.read_text()
    assert "1F1B, every message waited for at once" in drawn
    assert "Stretto: ZB-H2, messages under computation" in drawn


@pytest.mark.slow  # `tests/tensor` trains such models on threads and on processes
def test_two_meshes_train() -> None:
    outputs = launch(4, REPOSITORY / "examples" / "two_meshes.py")
    losses = [float(line.split()[-1]) for line in outputs[2].splitlines() if line.startswith("step ")]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert not any("step" in outputs[rank] for rank in (0, 1, 3))


@pytest.mark.slow  # `tests/saving` reads every layout's under every other, on threads
def test_saved_under_one_layout_and_loaded_under_others(tmp_path: Path) -> None:
    def losses(place: Path, *layout: str) -> list[float]:
        ranks = math.prod(int(word.split("=")[1]) for word in layout)
        out = launch(ranks, REPOSITORY / "examples" / "save_and_load.py", str(place), *layout)[0]
        return [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step ")]

    straight = [loss for _ in range(4) for loss in losses(tmp_path / "one", "pp=1")]
    layouts = (["tp=2"], ["pp=2"], ["pp=2", "tp=2"], ["dp=2"])
    found = [loss for words in layouts for loss in losses(tmp_path / "many", *words)]
    assert found == pytest.approx(straight, rel=1e-4)
    plain = GPT(GPTConfig(64, layers=2, hidden=32, heads=4, context=16, tie_embeddings=True), seed=1)
    plain.load_state_dict(torch.load(tmp_path / "many.pt"))
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))
    assert float(next_token_loss(plain, tokens)) < straight[-1]
