"""The picture of the README is drawn as it says; the other examples have tests beside what they show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.launch import REPOSITORY, launch


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
