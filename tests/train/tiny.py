"""A tiny run for tests: a little text, a settings file, and the command as a process."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clusters import cores
from tests.forks import Fork, run_forks

import stretto
from stretto.config import load_settings
from stretto.ir.program import Job
from stretto.simulating import predict
from stretto.train.failure import named_rank
from stretto.train.trainer import Trainer
from stretto.train.world import World

TIMEOUT_S = 240.0

WORDS = (
    "the quick brown fox jumps over a lazy dog while seven wizards brew potions of amber beneath old stars"
)

GPT = """
kind = "gpt"
layers = 2
hidden = 32
heads = 2
context = 16
dropout = 0.1
"""
LLAMA = """
kind = "huggingface"
architecture = "LlamaForCausalLM"

[model.config]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
tie_word_embeddings = true
"""

SETTINGS = """
[model]
{table}
{model}

[data]
paths = ["{text}"]
cache_dir = "{cache}"
sequence_length = 16
vocab_size = 300
held_out_fraction = 0.1

[parallel]
{layout}

[optimizer]
lr = 3e-3

[training]
steps = {steps}
global_batch = 4
eval_every = 0
eval_batches = 2
log_every = 5
sample_tokens = 8
threads_per_rank = 1

[checkpoint]
every_steps = {every}
keep = 9

[output]
run_dir = "{run}"
trace_steps = 2
"""


def described(job: Job, cluster: str, op_us: float = 1e-3, **_: object) -> stretto.Plan:
    """As `stretto.plan`, for a machine that no one measures, whose ops take `op_us` each."""
    assert cluster == "local"
    made = stretto.plan(job, cores(), order="list")
    made = replace(made, costs=replace(made.costs, op_us=dict.fromkeys(made.costs.op_us, op_us)))
    return replace(made, prediction=predict(made))


def write_text(folder: Path) -> Path:
    """Some documents of a few words, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = WORDS.split()
    for number in range(20):
        lines = [" ".join(draw.choice(words) for _ in range(9)) for _ in range(20)]
        (folder / f"{number}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def write_settings(
    folder: Path,
    *,
    pp: int = 1,
    steps: int = 10,
    every: int = 5,
    run: str = "run",
    table: str = GPT,
    model: str = "",
    layout: str = "",
) -> Path:
    """A settings file in `folder`, whose run goes to `folder/run`; the text is made beside it. table, model:
    of the model, and more of it. layout: in place of that of `pp`."""
    text = folder / "text"
    if not text.exists():
        write_text(text)
    path = folder / f"{run}.toml"
    values = {"text": text, "cache": folder / "cache", "run": folder / run, "table": table, "model": model}
    values["layout"] = layout or f"pp = {pp}\nmicrobatches = 2"
    path.write_text(SETTINGS.format(steps=steps, every=every, **values), encoding="utf-8")
    return path


def environment(**added: str) -> dict[str, str]:
    """The environment of a process that is no rank yet, with one thread."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1", **added}


def start(*arguments: str | Path, **added: str) -> subprocess.Popen[str]:
    """`stretto ...` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "stretto", *map(str, arguments)],
        env=environment(**added),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_together(*commands: tuple[Sequence[str | Path], dict[str, str]]) -> list[tuple[int, str, str]]:
    """`stretto ...` with what its environment has more, several side by side to their ends, as forks: status,
    output, errors of each."""
    with TemporaryDirectory() as folder:
        files = [(Path(folder) / f"{at}.out", Path(folder) / f"{at}.err") for at in range(len(commands))]
        ended = run_forks(
            [
                Fork("stretto", tuple(map(str, arguments)), added, str(out), str(err))
                for (arguments, added), (out, err) in zip(commands, files, strict=True)
            ],
            TIMEOUT_S,
        )
        told = [(out.read_text(), err.read_text()) for out, err in files]
    assert None not in ended.statuses, f"not at its end after {TIMEOUT_S} s: {told}"
    return [(int(status or 0), *said) for status, said in zip(ended.statuses, told, strict=True)]


def run_ranks(*commands: Sequence[str | Path], **added: str) -> list[tuple[int, str, str]]:
    """`stretto ...`, one command a rank, without our launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(len(commands)), "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **added}
    return run_together(*((command, world | {"RANK": str(rank)}) for rank, command in enumerate(commands)))


def run(*arguments: str | Path, **added: str) -> tuple[int, str, str]:
    """`stretto ...` to its end: status, output, errors."""
    (ended,) = run_together((arguments, added))
    return ended


def train(path: Path, *changes: str) -> Trainer:
    """A run of a single rank, in this process, to its end."""
    trainer = Trainer(load_settings(path, changes), World())
    trainer.run()
    return trainer


def steps_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl that are of steps."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line for line in lines if "loss" in line}


def ranks_of(config: Path) -> dict[int, int]:
    """rank -> process id, of our launcher's ranks that are training with this settings file."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = named_rank(folder)
        if rank is not None and str(config).encode() in command:
            found[rank] = int(folder.name)
    return found
