"""How documents become rows: kept apart in windows, or a row each in buckets; and runs over them."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cells import slow
from tests.clusters import cores
from tests.runtime.equality import SMALL, Result, assert_equal, from_transformers, gpt, run_sharded
from tests.train.tiny import train, write_settings
from torch import Tensor, nn

import stretto
from stretto.config import load_settings
from stretto.errors import UsageError
from stretto.models.build import huggingface_sum
from stretto.models.gpt import IGNORED, cross_entropy, next_token_sum
from stretto.train.rows import Buckets, apart, table_of

END = 0
DOCUMENTS = [5, 1, 9, 3, 30, 12, 2, 7, 4, 4, 6, 21]
"""Tokens of each, its end included."""


def text(sizes: list[int] = DOCUMENTS) -> np.ndarray[Any, Any]:
    made, number = [], 1
    for size in sizes:
        made += [*range(number, number + size - 1), END]
        number += size - 1
    return np.array(made, dtype=np.uint16)


def test_windows_apart() -> None:
    made = apart(torch.tensor([[5, 6, END, 7, END, 8, 9]]), END)
    assert made["input_ids"].tolist() == [[5, 6, 0, 7, 0, 8]]
    assert made["labels"].tolist() == [[6, 0, IGNORED, 0, IGNORED, 9]]
    assert made["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]


def of_documents(model: nn.Module, batch: dict[str, Tensor], kind: str) -> Tensor:
    """The loss of each document by itself, as the plain model computes it: the sum over all."""
    total = torch.zeros((), dtype=torch.float64)
    leaves = (batch[name] for name in ("input_ids", "labels", "position_ids"))
    for ids, labels, at in zip(*leaves, strict=True):
        begins = [*torch.flatten(torch.nonzero(at == 0)).tolist(), len(at)]
        for begin, end in itertools.pairwise(begins):
            one = ids[None, begin:end]
            logits = model(one) if kind == "gpt" else model(input_ids=one, use_cache=False).logits
            total = total + cross_entropy(logits, labels[None, begin:end], "sum")
    return total


MODELS = {
    "gpt": lambda: gpt(True, layers=2),
    "gpt rotary": lambda: gpt(False, layers=2, positions="rotary"),
    "llama": lambda: from_transformers(
        "LlamaForCausalLM", **{**SMALL, "num_hidden_layers": 2}, tie_word_embeddings=False
    ),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt", {"pp": 2}),
        slow("gpt", {"cp": 2}),
        slow("gpt rotary", {"tp": 2, "dp": 2}),
        ("llama", {"pp": 2}),
        slow("llama", {"cp": 2}),
    ],
    ids=str,
)
def test_documents_in_a_row_are_as_if_each_were_alone(name: str, layout: dict[str, Any]) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 6, (4, 13))  # about two documents a row
    batch = apart(tokens, END)
    assert (batch["position_ids"] == 0).sum() > 6
    model = MODELS[name]().double().eval()
    loss = huggingface_sum if name == "llama" else next_token_sum
    job = stretto.capture(model, batch, loss, stretto.Parallel(microbatches=2, **layout))
    found = run_sharded(stretto.plan(job, cluster=cores(), order="list"), model, batch)
    own = copy.deepcopy(model)
    value = of_documents(own, batch, name.split()[0]) / (batch["labels"] != IGNORED).sum()
    value.backward()
    assert_equal(found, Result(value.detach(), {n: p.grad for n, p in own.named_parameters()}), 1e-10)


@pytest.mark.parametrize("global_batch", [1, 2, 3, 8])
@pytest.mark.parametrize("multiple", [1, 2])
def test_buckets_have_every_token_once(global_batch: int, multiple: int) -> None:
    tokens, lengths = text(), (4, 8, 16)
    buckets = Buckets(table_of(tokens, END), lengths, 3, multiple)
    steps = buckets.batches(global_batch)
    # 30 is 29 predicted: 16 and 13; 21 is 16 and 4; one token predicts nothing.
    assert buckets.rows == (6, 3, 4)
    epochs = []
    for epoch in range(2):
        predicted: list[tuple[int, int]] = []
        sizes = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            batch = buckets.batch(step, global_batch)
            assert isinstance(batch, dict)
            assert batch["input_ids"].shape == batch["labels"].shape
            rows, length = batch["input_ids"].shape
            assert length in lengths
            assert rows % multiple == 0
            assert rows <= -(-global_batch // multiple) * multiple
            kept = batch["labels"] != IGNORED
            assert kept[:, :1].any()
            longest = int(kept.sum(-1).max())
            assert longest > max([0, *(one for one in lengths if one < length)])
            predicted += zip(batch["input_ids"][kept].tolist(), batch["labels"][kept].tolist(), strict=True)
            sizes.append((rows, length))
        assert sorted(predicted) == sorted(
            pair for pair in zip(tokens.tolist(), tokens.tolist()[1:], strict=False) if pair[0] != END
        )
        epochs.append(predicted)
    assert global_batch == 8 or epochs[0] != epochs[1], "in another order"
    again = Buckets(table_of(tokens, END), lengths, 3, multiple).batch(1, global_batch)
    first = buckets.batch(1, global_batch)
    assert isinstance(again, dict)
    assert isinstance(first, dict)
    assert all(torch.equal(again[name], first[name]) for name in first)


def test_text_without_a_row() -> None:
    with pytest.raises(UsageError, match="no document of the text has two tokens"):
        Buckets(table_of(np.array([END, END]), END), (4,), 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents of several lengths, one a line."""
    where = tmp_path_factory.mktemp("runs")
    write_settings(where, steps=2, every=0, run="first")
    words = "the quick brown fox jumps over a lazy dog while seven wizards brew".split()  # noqa: SIM905
    lines = [" ".join(words[(at + k) % len(words)] for k in range(1 + at * 7 % 11)) for at in range(300)]
    (where / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return where


def lines_of(trainer: Any) -> list[dict[str, Any]]:
    found = (trainer.settings.run_dir / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, found) if "loss" in line]


@pytest.mark.slow
def test_a_run_over_buckets_learns_and_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_text = (
        f'data.paths=["{folder}/lines.jsonl"]',
        "data.bucket_lengths=[4, 8]",
        "model.dropout=0",
        'lr_schedule.kind="constant"',
        "lr_schedule.warmup_steps=0",
    )
    whole = train(write_settings(folder, steps=8, every=0, run="whole"), *of_text)
    assert "planned batches of input_ids [" in capsys.readouterr().out
    shapes = {plan.job.batch[0][1].shape[1] for plan in whole.runner.plans}
    assert len(shapes) > 1
    losses = [line["loss"] for line in lines_of(whole)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    train(write_settings(folder, steps=4, every=4, run="parts"), *of_text)
    parts = train(write_settings(folder, steps=8, every=4, run="parts"), *of_text)
    assert [line["loss"] for line in lines_of(parts)] == losses


def test_a_run_with_documents_apart(folder: Path) -> None:
    of_text = (f'data.paths=["{folder}/lines.jsonl"]', "data.document_masks=true", "model.dropout=0")
    trainer = train(write_settings(folder, steps=6, every=0, run="apart"), *of_text)
    assert [name for name, _ in trainer.runner.plan.job.batch] == ["input_ids", "labels", "position_ids"]
    lines = lines_of(trainer)
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["data.bucket_lengths=[8, 4]"],
            "data.bucket_lengths = [8, 4] must ascend, up to data.sequence_length",
        ),
        (["data.bucket_lengths=[400]"], "data.bucket_lengths = [400] must ascend, up to"),
        (["data.bucket_lengths=[4]", "data.document_masks=true"], "each has a row of its own: take one out"),
        (["data.bucket_lengths=[6]", "parallel.cp=2"], "data.bucket_lengths = 6 must be a multiple of twice"),
    ],
)
def test_settings_that_do_not_fit(folder: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(UsageError) as told:
        load_settings(write_settings(folder, steps=2, every=0, run="wrong"), overrides)
    assert words in str(told.value)


OWN = """
import torch
import stretto

def task(config, seed):
    def batch(step, rows):
        rows = rows if step % 3 < 2 else 4  # every third is the last of an epoch
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))
        return {"x": x, "y": x.sum(-1)}

    def model():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(model, mb):
        error = (model(mb["x"])[:, 0] - mb["y"]).abs()
        worst = error.sort().values[len(error) // 2 :]
        return error.mean(), {"worst half": worst.mean(), "rows": (len(error), "sum")}

    def held_out(step, rows):
        return batch(0, rows)

    return stretto.Task(model=model, loss=loss, train=batch, held_out=held_out, digest="")
"""


def test_a_task_s_smaller_last_batch_is_kept_and_its_metrics_are_written(folder: Path) -> None:
    (folder / "own.py").write_text(OWN)
    (folder / "own.toml").write_text(
        f'[task]\nfile = "{folder}/own.py"\n[training]\nsteps = 6\nglobal_batch = 8\n'
        f'[output]\nrun_dir = "{folder}/own"\n[parallel]\nmicrobatches = 2\n'
    )
    trainer = train(folder / "own.toml")
    lines = lines_of(trainer)
    assert [line["metrics"]["rows"] for line in lines] == [8.0, 8.0, 4.0, 8.0, 8.0, 4.0]
    assert all(0 < line["loss"] < line["metrics"]["worst half"] for line in lines)
    assert [plan.job.microbatches for plan in trainer.runner.plans] == [2, 2]
