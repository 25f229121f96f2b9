"""The design's ten lines, verbatim, on two processes; every name of the public face; and what it says."""

from __future__ import annotations

import ast
import json
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.cli.main import COMMANDS
from tests.runtime.launch import REPOSITORY, launch

EXAMPLE = """
import stretto

parallel = stretto.Parallel(pp=2, microbatches=8, schedule="eager-1f1b")

# No devices needed: the model may be on "meta"; loss(model, microbatch) returns a mean loss.
job = stretto.capture(model, batch, loss=lambda model, mb: model(**mb).loss, parallel=parallel)

plan = stretto.plan(job, cluster="local")      # or a cluster file, or stretto.Cluster(...)
print(plan)                                    # predicted step, exposed by axis, bubble, memory, bound, gap
plan.save("plan.json")                         # readable, versioned; equal input gives an equal file
stretto.verify(plan)                           # raises PlanError that lists every fault
timeline = stretto.simulate(plan)              # .step_us, .exposed_us["tp"], .peak_bytes[rank], .save("t.perfetto-trace")

# Under torchrun:
runner = stretto.Runner(plan, model)           # this rank's part
optimizer = torch.optim.AdamW(runner.parameters(), lr=3e-4)
for batch in loader:
    loss = runner.step(batch)                  # gradients are in .grad, as everywhere in PyTorch
    optimizer.step(); optimizer.zero_grad()
print(runner.report())                         # measured against predicted
"""  # noqa: E501 - as it is in the design

BEFORE = """
import os, sys, torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

os.chdir(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=None,
    bos_token_id=0, eos_token_id=0, tie_word_embeddings=True))
ids = torch.randint(0, 61, (16, 9), generator=torch.Generator().manual_seed(1))
batch = {"input_ids": ids, "labels": ids}
loader = [batch] * 8
plain = model(**batch).loss.item()
"""

AFTER = """
import json
told = {"plain": plain, "loss": loss.item(), "step_us": timeline.step_us, "peak": list(timeline.peak_bytes),
    "exposed": timeline.exposed_us["pp"], "names": [n for n, _ in runner.named_parameters()]}
timeline.save(f"t{dist.get_rank()}.perfetto-trace")
open(f"told{dist.get_rank()}.json", "w").write(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Where the example ran on two processes, and what each printed."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "ten_lines.py").write_text(BEFORE + EXAMPLE + AFTER)
    outputs = launch(2, folder / "ten_lines.py", str(folder))
    return folder, outputs


def test_the_example_trains(ran: tuple[Path, list[str]]) -> None:
    folder, _ = ran
    told = [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(2)]
    assert told[0]["loss"] == told[1]["loss"]
    assert told[0]["loss"] < told[0]["plain"] - 0.01, "eight steps of AdamW on one batch lower its loss"
    for rank in told:
        assert rank["step_us"] > 0
        assert len(rank["peak"]) == 2
        assert rank["exposed"] >= 0
    shared = set(told[0]["names"]) & set(told[1]["names"])
    assert shared == {"model.embed_tokens.weight"}, "the tied embedding is on both, under its first name"


def test_what_it_prints(ran: tuple[Path, list[str]]) -> None:
    folder, outputs = ran
    for text in outputs:
        assert "eager-1f1b, 2 stages on 2 ranks, 8 microbatches" in text
        for word in ("predicted", "measured", "exposed", "bubble", "bound", "gap"):
            assert re.search(word, text), word
        assert "Warning" not in text
    plan = stretto.load_plan(folder / "plan.json")
    stretto.verify(plan)
    assert plan.costs.source.endswith("2 ranks at once")
    assert (folder / "t0.perfetto-trace").stat().st_size > 500


def test_the_readme_shows_the_same_code() -> None:
    """Comments apart: the README's second Python block is the design's example, the first makes its model."""
    readme = (REPOSITORY / "README.md").read_text()
    [makes, block] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert ast.dump(ast.parse(block)) == ast.dump(ast.parse(EXAMPLE))
    assert "stretto" not in makes


def test_every_public_name_is_there_and_documented() -> None:
    for name in stretto.__all__:
        found = getattr(stretto, name)
        assert (found.__doc__ or "").strip(), f"stretto.{name} has no docstring"
    assert {
        *("capture", "plan", "simulate", "verify", "Runner", "Parallel", "Cluster"),
        *("GradientClip", "Schedule", "Task", "fill", "register_pass"),
    } <= set(stretto.__all__)
    assert stretto.passes.register is stretto.register_pass


@pytest.mark.parametrize("kind", [stretto.Parallel, stretto.Cluster])
def test_help_shows_fields_on_one_screen(kind: type[Any]) -> None:
    text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    for name, field in kind.model_fields.items():
        default = r"\(required\)" if field.is_required() else f"= {re.escape(repr(field.default))}"
        assert re.search(rf"^ \|  {name} {default} +[A-Z]", text, re.MULTILINE), name
    assert len(text.splitlines()) < 80
    for internal in ("model_", "__pydantic", "Annotated", "FieldInfo"):
        assert internal not in text


def test_importing_it_is_quiet_and_starts_nothing() -> None:
    """`stretto.simulate` loads no writer of traces."""
    code = (
        "import stretto, sys, torch.distributed as d; assert not d.is_initialized(); stretto.simulate; "
        "assert 'perfetto' not in sys.modules; print(stretto.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == stretto.__version__
    assert done.stderr == ""


def test_all_of_it_is_listed_without_being_loaded() -> None:
    code = "import stretto, sys; print(*dir(stretto)); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed, loaded = done.stdout.splitlines()
    assert set(stretto.__all__) <= set(listed.split())
    assert "__version__" in listed.split()
    assert not [name for name in listed.split() if name.startswith("_") and not name.endswith("__")]
    assert loaded == "False"


@pytest.mark.parametrize(
    ("words", "expected"), [("stretto tr", {"train"}), ("stretto tune --fi", {"--fix"}), ("stretto c", None)]
)
def test_a_shell_completes_commands_and_options(words: str, expected: set[str] | None) -> None:
    """As the script of `stretto --show-completion bash` asks."""
    asked = {
        **os.environ,
        "_STRETTO_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    command = [sys.executable, "-m", "stretto"]
    done = subprocess.run(command, env=asked, capture_output=True, text=True, check=False)
    wanted = {name for name in COMMANDS if name.startswith("c")} if expected is None else expected
    assert set(done.stdout.split()) == wanted, done.stderr


TYPED = """
from stretto.config import Parallel
from stretto.price.cluster import Cluster

Parallel(pp=2, microbatches=8, schedule="zb-h1", split=["blocks.4"], recompute="full")
Cluster(peak_tflops={"bfloat16": 989.0}, memory_gbps=3350, link_gbps=50, latency_us=3.0)
Parallel(microbatch=8)  # wrong
Parallel(pp="2")  # wrong
Parallel(overlap="windw")  # wrong
Cluster(peak_tflops=989.0, memory_gbps=3350, link_gbps=50, latency=3.0)  # wrong
Cluster(latency_us=3.0)  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_refuses_wrong_arguments(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "mine.py").write_text(TYPED)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run([*command, "mine.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    wrong = {at for at, line in enumerate(TYPED.splitlines(), start=1) if line.endswith("# wrong")}
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert found == wrong, done.stdout + done.stderr
