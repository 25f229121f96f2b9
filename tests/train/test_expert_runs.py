"""Runs of mixtures of experts as users have them: under any number of ranks that share the experts, ended in
the middle, with a disk or a buffer that is too small, and read by others afterwards.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.runtime.launch import launch
from tests.train.layouts import described
from tests.train.test_cli_train import small_disk as small_disk
from tests.train.test_kill import ended, until_checkpoint
from tests.train.test_layouts import HALF, STEPS, TOLERANCE, alone, check_export, losses, resume, write
from tests.train.tiny import ranks_of, run, start, steps_of, write_settings

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.models.build import huggingface_sum
from stretto.train import trainer
from stretto.train.export import export
from stretto.train.whole import load_whole

pytestmark = pytest.mark.slow
"""Runs of several processes; what experts compute is tested on threads (`tests/parallelize`)."""

DROPLESS = "experts = 4\nexpert_ratio = 1.0\ncapacity_factor = 0.0"
MIXTRAL = """
kind = "huggingface"
architecture = "MixtralForCausalLM"

[model.config]
vocab_size = 302
hidden_size = 32
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
num_local_experts = 4
experts_implementation = "batched_mm"

"""
EP = "dp = 2\nep = 2\nep_buffer = 2.0\nmicrobatches = 2"
RUN = ("model.kind=moe", "model.experts=4", "model.expert_ratio=1.0", "parallel.dp=2", "parallel.ep=2")


@pytest.fixture
def described_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the processes that are launched, nobody measures this machine."""
    monkeypatch.setattr(trainer, "make_plan", described)


def write_mixture(folder: Path, run: str, layout: str, source: str | None = None) -> None:
    """Four pieces of a row in every layout, since routers' losses are of a piece."""
    write(folder, run, layout=layout, model=DROPLESS)
    path = folder / f"{run}.toml"
    path.write_text(path.read_text().replace('kind = "gpt"', 'kind = "moe"'))
    if source is not None:
        resume(folder, run, source)


def test_any_number_of_ranks_goes_on_from_any_other(tmp_path: Path, described_machine: None) -> None:
    write_mixture(tmp_path, "one", "microbatches = 4")
    alone(tmp_path, "one")
    write_mixture(tmp_path, "two", EP)
    write_mixture(tmp_path, "two-of-one", EP, "one")
    write_mixture(tmp_path, "dp-of-two", "dp = 2\nmicrobatches = 2", "two")
    launch(2, "tests.train.layouts", str(tmp_path), "two", "two-of-one", "dp-of-two")
    four = "dp = 4\nep_buffer = 4.0\nmicrobatches = 1"
    write_mixture(tmp_path, "four-of-two", f"ep = 4\n{four}", "two")
    write_mixture(tmp_path, "pairs-of-two", f"ep = 2\n{four}", "two")
    write_mixture(tmp_path, "tp-of-two", f"tp = 2\nsequence_parallel = true\nampipe_degree = 2\n{EP}", "two")
    told, *_ = launch(4, "tests.train.layouts", str(tmp_path), "four-of-two", "pairs-of-two", "tp-of-two")
    copies = {line.split()[0]: int(line.split()[2]) for line in told.splitlines() if " copies " in line}
    # With all four ranks sharing experts, each is held once; with pairs, twice.
    assert copies["pairs-of-two"] > copies["four-of-two"] > 0
    write_mixture(tmp_path, "one-of-two", "microbatches = 4", "two")
    alone(tmp_path, "one-of-two")

    expected = losses(tmp_path, "one")
    assert len(expected) == STEPS
    for key in ("loss", "grad_norm"):
        assert losses(tmp_path, "two", key) == pytest.approx(losses(tmp_path, "one", key), rel=TOLERANCE)
    rest = {step: loss for step, loss in expected.items() if step > HALF}
    for went_on in ("two-of-one", "dp-of-two", "four-of-two", "pairs-of-two", "tp-of-two", "one-of-two"):
        assert losses(tmp_path, went_on) == pytest.approx(rest, rel=TOLERANCE), went_on
    check_export(tmp_path, "one", "two")


def test_a_mixtral_is_shared_exported_and_shared_again(tmp_path: Path, described_machine: None) -> None:
    transformers = pytest.importorskip("transformers")
    for name, layout in (("one", "microbatches = 4"), ("two", EP)):
        write(tmp_path, name, layout=layout, steps=HALF)
        path = tmp_path / f"{name}.toml"
        text = path.read_text()
        begin, end = text.index("kind ="), text.index("[data]")
        path.write_text(text[:begin] + MIXTRAL.lstrip() + text[end:])
    alone(tmp_path, "one")
    launch(2, "tests.train.layouts", str(tmp_path), "two")
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), rel=TOLERANCE)
    made = tmp_path / "two-out"
    export(tmp_path / "two", made)
    model = transformers.AutoModelForCausalLM.from_pretrained(made, experts_implementation="batched_mm")
    one, two = (load_whole(tmp_path / run / "checkpoints" / f"step-{HALF:06d}")[0] for run in ("one", "two"))
    tokens = torch.arange(16)[None]
    assert torch.equal(model(tokens).logits, two(tokens).logits)
    assert torch.allclose(model(tokens).logits, one(tokens).logits, rtol=1e-3, atol=1e-4)
    batch = {"input_ids": tokens.repeat(2, 1), "labels": tokens.repeat(2, 1)}
    job = capture(model, batch, huggingface_sum, Parallel(dp=2, ep=2))
    assert {shard.axis for parameter in job.parameters for shard in parameter.shards} == {"ep"}


def test_what_ends_a_run_is_told_in_a_line_and_it_goes_on(tmp_path: Path) -> None:
    for name, signum, rank in (("interrupted", signal.SIGINT, None), ("killed", signal.SIGKILL, 1)):
        config = write_settings(tmp_path, steps=10**6, every=10, run=name)
        process = start("train", config, *RUN)
        found = until_checkpoint(config, process)
        if rank is None:
            process.send_signal(signum)
        else:
            os.kill(found[rank], signum)
        _, err = ended(config, process, 30)
        assert process.returncode == (130 if rank is None else 1)
        assert err.count("\n") == 1
        assert err.startswith("stretto: " + ("interrupted at" if rank is None else "rank 1 was lost after"))
        before = steps_of(tmp_path / name)
        status, out, err = run("train", config, *RUN, "--resume", "--steps", str(len(before) + 5))
        assert (status, err) == (0, "")
        assert "resumed from" in out
        assert sorted(steps_of(tmp_path / name)) == list(range(1, len(before) + 6))


def test_a_disk_that_fills_up_leaves_the_last_checkpoint_whole(tmp_path: Path, small_disk: Path) -> None:
    config = write_settings(tmp_path, steps=200, every=5)
    status, _, err = run("train", config, *RUN, f"checkpoint.dir={small_disk}")
    assert status == 1
    assert err.count("\n") == 1
    assert "could not be written: the disk is full; free some space, or set checkpoint.dir" in err
    assert ranks_of(config) == {}
    left = sorted(path.name for path in small_disk.iterdir() if path.is_dir())
    assert left
    assert not any(name.endswith(".tmp") for name in left)


def test_a_buffer_that_is_too_small_ends_the_run_with_what_would_do(tmp_path: Path) -> None:
    config = write_settings(tmp_path, steps=20, every=5)
    changes = (*RUN, "model.capacity_factor=0", "parallel.ep_buffer=1.0")
    status, _, err = run("train", config, *changes)
    assert status == 1
    assert err.count("\n") == 1
    assert "the most over all layers and ranks of this step" in err
    assert "or give ep_overflow = 'drop'" in err
    assert ranks_of(config) == {}
    would_do = err[err.index("give ep_buffer = ") + len("give ") :].split(" or more")[0].replace(" ", "")
    assert 1.0 < float(would_do.partition("=")[2]) <= 2.0
    assert run("train", config, *changes, "parallel.ep_overflow=drop")[::2] == (0, "")
