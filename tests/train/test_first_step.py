"""From the command to the first step: how long it takes, and that it is never silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tests.train.tiny import run_ranks, write_settings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt_text.toml"
LLAMA = """
[model]
kind = "huggingface"
architecture = "LlamaForCausalLM"

[model.config]
hidden_size = 256
intermediate_size = 768
num_hidden_layers = 4
num_attention_heads = 4

[data]
sequence_length = 128
vocab_size = 4096

[parallel]
pp = 2
microbatches = 8
"""

FROM_NOTHING_S, FROM_KEPT_S, WITH_TRANSFORMERS_S = 30.0, 10.0, 25.0
"""On two cores that do nothing else."""
SILENT_S = 2.0

REUSED = ("costs: ", "plan: ")

Lines = list[tuple[float, str]]


def until(config: Path, folder: Path, start: str, *more: str) -> tuple[Lines, str, int]:
    """(seconds since the command began, line), up to one that begins so. The run is then interrupted: what it
    prints after that, and the exit status. folder: has the run and what is kept."""
    kept = {name: value for name, value in os.environ.items() if name != "STRETTO_REUSE"}
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", "train", str(config), f"output.run_dir={folder / 'run'}", *more],
        env={**kept, "XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    lines: Lines = []
    try:
        for line in process.stdout:
            lines.append((time.monotonic() - began_s, line.rstrip("\n")))
            if line.startswith(start):
                process.send_signal(signal.SIGINT)
                break
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert lines[-1][1].startswith(start), "\n".join(line for _, line in lines)
    return lines, rest, process.returncode


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.parametrize(
    ("settings", "most_s"),
    [("", (FROM_NOTHING_S, FROM_KEPT_S)), (LLAMA, (None, WITH_TRANSFORMERS_S))],
    ids=["gpt", "transformers"],
)
def test_the_first_step_comes_soon_and_is_not_silent(
    settings: str, most_s: tuple[float | None, float], tmp_path: Path
) -> None:
    config = EXAMPLE
    if settings:
        config = tmp_path / "settings.toml"
        config.write_text(settings, encoding="utf-8")
    for most in most_s:
        lines, _, _ = until(config, tmp_path, "first step: ", "--no-resume")
        said = "\n".join(f"{at_s:6.1f} {line}" for at_s, line in lines)
        assert most is None or lines[-1][0] <= most, said
        assert max(after - before for (before, _), (after, _) in pairwise([(0.0, ""), *lines])) <= SILENT_S, (
            said
        )


LOOK = """
    import sys
    from stretto.config import load_settings
    from stretto.train.launch import _check, refuse_early
    from stretto.train.progress import Progress

    settings = load_settings(*sys.argv[1:2], sys.argv[2:])
    refuse_early(settings)
    _check(settings, Progress(False))
    compilers = ("torch._dynamo", "torch._inductor", "torch.onnx")
    print(sorted(name for name in sys.modules if name.startswith(compilers)))
"""


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_the_launcher_loads_no_compiler(axis: str, tmp_path: Path) -> None:
    config = write_settings(tmp_path, pp=1, model="vocab_size = 302")
    looked = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOOK), str(config), f"parallel.{axis}=2"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (looked.stdout, looked.stderr) == ("[]\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_run_takes_costs_and_plan_of_the_first(ranks: int, tmp_path: Path) -> None:
    command = ["train", write_settings(tmp_path, pp=ranks, steps=1), "--no-resume"]
    runs = []
    for more in ([], [], ["--fresh"]):
        (status, out, err), *_ = run_ranks(
            *[[*command, *more]] * ranks, STRETTO_REUSE="", XDG_CACHE_HOME=str(tmp_path / "cache")
        )
        assert status == 0, err
        runs.append(out.splitlines())
    reused = [[line.partition(":")[0] for line in lines if line.startswith(REUSED)] for lines in runs]
    assert reused == [[], ["costs", "plan"], []]
    predicted = [next(line for line in lines if "predicted step" in line) for lines in runs[:2]]
    assert predicted[0] == predicted[1]
    assert "  the first step" in runs[0]


@pytest.mark.slow
def test_an_interrupt_before_the_first_step_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    config = write_settings(tmp_path, steps=3)
    # Planning for an hour: however late the signal comes, the first step is not made.
    lines, rest, status = until(config, tmp_path, "  planning", "parallel.tp=2", "planning.search_s=3600")
    said = "\n".join(line for _, line in lines)
    phases = ("loading PyTorch", "starting 2 ranks", "capturing the model", "planning")
    assert all(f"\n  {phase}" in f"\n{said}" for phase in phases), said
    assert status == 128 + signal.SIGINT, rest
    ended = [line for line in rest.splitlines() if not line.startswith("  ")]
    assert ended == ["stretto: interrupted at step 0; there is no checkpoint yet"], rest
