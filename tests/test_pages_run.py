"""Examples that pages show do what the pages say: fine-tuning, coming from other libraries, several nodes."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from tests.runtime.launch import REPOSITORY, launch
from tests.train.tiny import LLAMA, environment, run, steps_of, write_settings

transformers = pytest.importorskip("transformers")

EXAMPLES = REPOSITORY / "examples"
PAIRS = [{"n": n, "answer": f"Return {n} of a and b.", "prompt": f"def f{n}(a, b):\n"} for n in range(80)]
"""Keys in any order, and others beside them."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with its tokenizer, and answers.jsonl beside it."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "answers.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    path = write_settings(folder, steps=1, run="llama", table=LLAMA)
    assert run("train", path)[0] == 0
    status, _, err = run("export", folder / "llama", "-o", folder / "source")
    assert status == 0, err
    return folder / "source"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("pp=2",), ("tp=2",)])
def test_a_loop_fine_tunes_a_checkpoint_and_writes_one(
    checkpoint: Path, tmp_path: Path, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}")
    data, target = checkpoint.parent / "answers.jsonl", tmp_path / "tuned"
    said = launch(2, EXAMPLES / "finetune.py", str(checkpoint), str(data), str(target), *layout)[0]
    losses = losses_of(said)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(f) for f in (checkpoint, target))
    changed = [n for n, p in after.named_parameters() if not torch.equal(p, before.get_parameter(n))]
    assert len(changed) == len(list(after.parameters()))
    assert after.lm_head.weight is after.model.embed_tokens.weight
    assert transformers.AutoTokenizer.from_pretrained(target).vocab_size == 300


@pytest.mark.slow
def test_settings_train_on_from_a_checkpoint_and_are_exported(checkpoint: Path, tmp_path: Path) -> None:
    changes = [f"model.pretrained={checkpoint}", f"output.run_dir={tmp_path / 'run'}", "training.steps=12"]
    changes += [f"data.paths=['{REPOSITORY / 'README.md'}']", "training.eval_every=0"]
    status, out, err = run("train", EXAMPLES / "pretrained.toml", *changes)
    assert status == 0, err
    assert f"started from the weights of {checkpoint}" in out
    losses = [line["loss"] for line in steps_of(tmp_path / "run").values()]
    assert losses[-1] < losses[0]
    status, _, err = run("export", tmp_path / "run", "-o", tmp_path / "tuned")
    assert status == 0, err
    said = python(EXAMPLES / "perplexity.py", tmp_path / "tuned", REPOSITORY / "README.md")
    assert "perplexity" in said


@pytest.mark.slow
def test_a_task_fine_tunes_a_checkpoint_and_is_exported(checkpoint: Path, tmp_path: Path) -> None:
    data = checkpoint.parent / "answers.jsonl"
    config = f'{{ source = "{checkpoint}", data = "{data}", length = 24 }}'
    changes = [f"task.config={config}", f"output.run_dir={tmp_path / 'run'}", "training.steps=12"]
    changes += [f"task.file={EXAMPLES / 'finetune_task.py'}", "training.eval_every=0"]
    status, _, err = run("train", EXAMPLES / "finetune.toml", *changes)
    assert status == 0, err
    losses = [line["loss"] for line in steps_of(tmp_path / "run").values()]
    assert losses[-1] < losses[0]
    status, _, err = run("export", tmp_path / "run", "-o", tmp_path / "tuned")
    assert status == 0, err
    assert not (tmp_path / "tuned" / "tokenizer.json").exists()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    before = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)
    python(EXAMPLES / "perplexity.py", tmp_path / "tuned", REPOSITORY / "README.md", status=1)  # no tokenizer
    transformers.AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "tuned")
    said = python(EXAMPLES / "perplexity.py", tmp_path / "tuned", REPOSITORY / "README.md")
    found = re.search(r"loss ([\d.]+) nats a token, perplexity ([\d.]+), ([\d.]+) bits a byte", said)
    assert found is not None
    assert float(found[2]) == pytest.approx(2.718281828 ** float(found[1]), rel=1e-3)


@pytest.mark.slow
def test_the_script_before_and_the_one_after_have_the_same_losses(tmp_path: Path) -> None:
    before = losses_of(launch(2, EXAMPLES / "coming_from" / "fsdp.py")[0])
    assert len(before) == 4
    text = (EXAMPLES / "coming_from" / "after.py").read_text()
    for layout in ("dp=2", "pp=2, microbatches=4", "tp=2"):
        script = tmp_path / "after.py"
        script.write_text(text.replace("Parallel(dp=2)", f"Parallel({layout})"))
        assert losses_of(launch(2, script)[0]) == pytest.approx(before, rel=1e-4), layout


def losses_of(said: str) -> list[float]:
    return [float(line.split()[-1]) for line in said.splitlines() if line.startswith("step ")]


def python(*words: str | Path, status: int = 0) -> str:
    """A program's output."""
    made = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=environment(), timeout=240
    )
    assert made.returncode == status, made.stderr
    return made.stdout


SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit
for node in 0 1; do SLURM_NODEID=$node "$@" & done
for job in $(jobs -p); do wait "$job" || exit 1; done
"""


@pytest.mark.slow
def test_the_batch_script_starts_a_torchrun_on_each_node(tmp_path: Path) -> None:
    """With substitutes: `srun` starts both nodes on this machine, `scontrol` names it."""
    path = write_settings(tmp_path, pp=2, steps=2, every=0)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    torchrun = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, text in (
        ("srun", SRUN),
        ("scontrol", "#!/bin/bash\necho 127.0.0.1\n"),
        ("torchrun", torchrun),
    ):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "train.sbatch"
    script.write_text((EXAMPLES / "slurm" / "train.sbatch").read_text().replace("29500", str(port)))
    told = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "NETWORK": "lo", "PROCESSES": "1"}
    made = subprocess.run(
        ["bash", str(script), str(path), "output.trace_steps=0"],
        env=environment(PATH=f"{bin_folder}:{os.environ['PATH']}", **told),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("held-out loss") == 1
    assert len(steps_of(tmp_path / "run")) == 2


@pytest.mark.slow
def test_the_picture_of_the_readme(tmp_path: Path) -> None:
    out = tmp_path / "overlap.svg"
    assert f"wrote {out}" in python(EXAMPLES / "overlap_picture.py", out)
    drawn = out.read_text()
    assert "1F1B, every message waited for at once" in drawn
    assert "Stretto: ZB-H2, messages under computation" in drawn


@pytest.mark.slow  # `tests/tensor` trains such models on threads and on processes
def test_two_meshes_train() -> None:
    outputs = launch(4, EXAMPLES / "two_meshes.py")
    losses = losses_of(outputs[2])
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert not any("step" in outputs[rank] for rank in (0, 1, 3))


@pytest.mark.slow  # `tests/saving` reads every layout's under every other, on threads
def test_saved_under_one_layout_and_loaded_under_others(tmp_path: Path) -> None:
    def losses(place: Path, *layout: str) -> list[float]:
        ranks = math.prod(int(word.split("=")[1]) for word in layout)
        return losses_of(launch(ranks, EXAMPLES / "save_and_load.py", str(place), *layout)[0])

    straight = [loss for _ in range(4) for loss in losses(tmp_path / "one", "pp=1")]
    layouts = (["tp=2"], ["pp=2"], ["pp=2", "tp=2"], ["dp=2"])
    found = [loss for words in layouts for loss in losses(tmp_path / "many", *words)]
    assert found == pytest.approx(straight, rel=1e-4)
    plain = GPT(
        GPTConfig(vocab_size=64, layers=2, hidden=32, heads=4, context=16, tie_embeddings=True), seed=1
    )
    plain.load_state_dict(torch.load(tmp_path / "many.pt"))
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))
    assert float(next_token_loss(plain, tokens)) < straight[-1]
