"""Data of every kind: what is predicted of chats, pairs and ids, mixtures by weights, streams; and runs that go
on from a checkpoint with the same rows, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.saving.pretrained import tokenizer
from tests.train.tiny import GPT, WORDS, steps_of, train, write_settings

from stretto.config import load_settings
from stretto.config.data import SourceSettings
from stretto.errors import StrettoError, UsageError
from stretto.files.say import silent
from stretto.models.gpt import IGNORED
from stretto.train.records import encoder_of
from stretto.train.rows import DocumentRows, Table, shares
from stretto.train.sources import Source, Sources
from stretto.train.stream import Stream
from stretto.train.task import task_of
from stretto.train.text import given_tokenizer

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</>"
    "{% endgeneration %}{% else %}{{ m.content }}</>{% endif %}{{ '\n' }}{% endfor %}"
)
FORGETFUL = "{% for m in messages[-2:] %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    made: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="<|endoftext|>")
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def phrases(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS.split(), k=draw.randint(1, 3))) for _ in range(count)]


def chat(asked: str, answered: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and files of every kind."""
    where = tmp_path_factory.mktemp("sources")
    write_tokenizer(where / "tokenizer")
    texts = phrases(400)
    asked, answered = texts[:200], texts[200:]
    write_rows(where / "chat.jsonl", [{"messages": chat(*both)} for both in zip(asked, answered, strict=True)])
    write_rows(
        where / "pairs.jsonl",
        [{"prompt": a + ": ", "completion": b} for a, b in zip(asked, answered, strict=True)],
    )
    draw = np.random.default_rng(0)
    for name, size in (("a", 700), ("b", 400)):
        np.save(where / f"{name}.npy", draw.integers(0, 300, size, dtype=np.uint16))
    draw.integers(0, 300, 500, dtype=np.uint16).tofile(where / "c.bin")
    rows = [{"input_ids": draw.integers(0, 300, draw.integers(2, 40)).tolist()} for _ in range(60)]
    write_rows(where / "ids.jsonl", rows)
    write_rows(where / "text.jsonl", [{"text": f"{a} {b}"} for a, b in zip(asked, answered, strict=True)])
    return where


def kinds(folder: Path) -> dict[str, str]:
    """The lines of `[data]` of each kind."""
    own = f'tokenizer = "{folder}/tokenizer"\n'
    return {
        "chat": f'{own}kind = "chat"\npaths = ["{folder}/chat.jsonl"]',
        "packed chat": f'{own}kind = "chat"\npaths = ["{folder}/chat.jsonl"]\ndocument_masks = true',
        "chat in buckets": f'{own}kind = "chat"\npaths = ["{folder}/chat.jsonl"]\nbucket_lengths = [16]',
        "pairs": f'{own}kind = "pairs"\npaths = ["{folder}/pairs.jsonl"]',
        "tokens": f'kind = "tokens"\nvocab_size = 300\npaths = ["{folder}/a.npy", "{folder}/b.npy", "{folder}/c.bin"]',
        "rows of tokens": f'kind = "tokens"\nvocab_size = 300\npaths = ["{folder}/ids.jsonl"]',
        "3:1": f"""{own}
[[data.sources]]
paths = ["{folder}/text.jsonl"]
weight = 3
[[data.sources]]
kind = "pairs"
paths = ["{folder}/pairs.jsonl"]""",
        "stream": f'{own}kind = "text"\nstream = "json"\npaths = ["{folder}/text.jsonl"]\nshuffled_rows = 16',
        "stream of chats and pairs": f"""{own}bucket_lengths = [16]
[[data.sources]]
kind = "chat"
stream = "json"
shuffled_rows = 7
paths = ["{folder}/chat.jsonl"]
[[data.sources]]
kind = "pairs"
paths = ["{folder}/pairs.jsonl"]""",
    }


def write(folder: Path, where: Path, data: str, *, steps: int = 4, run: str = "run", length: int = 32) -> Path:
    """A settings file with these lines of `[data]`."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "text").mkdir(exist_ok=True)
    path = write_settings(where, steps=steps, every=2, run=run, table=GPT.replace("16", str(length)))
    text = path.read_text()
    begin, end = text.index("[data]"), text.index("[parallel]")
    own = f'cache_dir = "{folder}/cache"\nsequence_length = {length}\nheld_out_fraction = 0.1\n'
    path.write_text(f"{text[:begin]}[data]\n{own}{data}\n\n{text[end:]}")
    return path


def source_of(path: Path) -> Source:
    settings = load_settings(path)
    given = given_tokenizer(settings.model, settings.data.tokenizer)
    return Sources(settings, given, silent, silent).all()


# What is predicted.


def predicted(folder: Path, kind: str, row: dict[str, Any], template: str = CHATML) -> tuple[str, list[str]]:
    """The text of a row, and what of it is predicted, piece by piece."""
    settings = load_settings(write(folder, folder / "one", kinds(folder)["chat"]))
    own = write_tokenizer(folder / f"tokenizer-{abs(hash(template))}", template)
    given = given_tokenizer(settings.model, str(own))
    assert given is not None
    ((ids, counts),) = encoder_of(SourceSettings(kind=kind), given, "data")([("row 1", row)])
    pieces: list[list[int]] = []
    for at, (one, is_predicted) in enumerate(zip(ids, counts, strict=True)):
        if is_predicted:
            if not pieces or not counts[at - 1]:
                pieces.append([])
            pieces[-1].append(one)
    decoded = [given.tokenizer.decode(one, skip_special_tokens=False) for one in (ids, *pieces)]
    return decoded[0], decoded[1:]


def test_of_a_chat_the_answers_are_predicted(folder: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, *chat("the fox?", "lazy  é\n"), *chat("no", "yes")]
    text = "<system>be brief</>\n<user>the fox?</>\n<assistant>lazy  é\n</>\n<user>no</>\n<assistant>yes</>\n"
    by_beginnings = predicted(folder, "chat", {"messages": messages})
    assert by_beginnings == (text, ["lazy  é\n</>\n", "yes</>\n"])
    marked = predicted(folder, "chat", {"messages": messages}, MARKED)
    assert marked == (text, ["lazy  é\n</>", "yes</>"])
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = [{"from": names[one["role"]], "value": one["content"]} for one in messages]
    assert predicted(folder, "chat", {"conversations": shared}) == by_beginnings


def test_of_a_pair_the_completion_and_the_end_are_predicted(folder: Path) -> None:
    found = predicted(folder, "pairs", {"prompt": "the fox ", "completion": "jumps"})
    assert found == ("<s>the fox jumps<|endoftext|>", ["jumps<|endoftext|>"])


def test_ids_with_labels_and_masks() -> None:
    encode = encoder_of(SourceSettings(kind="tokens"), None, "data")
    row = {"input_ids": [5, 6, 7, 8], "labels": [IGNORED, IGNORED, 7, 8], "attention_mask": [0, 1, 1, 1]}
    assert encode([("", row)]) == [([6, 7, 8], [0, 1, 1])]
    assert encode([("", {"input_ids": [5, 6]})]) == [([5, 6], [1, 1])]


def test_rows_have_the_labels_of_their_documents() -> None:
    tokens = np.arange(1, 13, dtype=np.uint16)
    counts = np.array([0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1], dtype=np.uint8)
    ends = np.array([3, 5, 8, 12])  # of the third nothing is predicted, the last is cut
    table = Table(tokens, counts, np.array([0, 3, 5, 8]), ends)

    def rows(how: Any) -> set[tuple[tuple[int, ...], ...]]:
        made = DocumentRows(table, 5, 0, how)
        batch = made.rows(np.arange(len(made.sizes)))
        return {tuple(tuple(leaf[row].tolist()) for leaf in batch.values()) for row in range(len(made.sizes))}

    no = IGNORED
    assert rows("each") == {
        ((1, 2, 0, 0, 0), (2, 3, no, no, no)),
        ((4, 0, 0, 0, 0), (5, no, no, no, no)),
        ((9, 10, 11, 0, 0), (10, 11, 12, no, no)),
    }
    assert rows("packed") == {
        ((1, 2, 3, 4, 0), (2, 3, no, 5, no), (0, 1, 2, 0, 1)),
        ((9, 10, 11, 0, 0), (10, 11, 12, no, no), (0, 1, 2, 3, 4)),
    }
    assert rows("joined") == {
        ((1, 2, 3, 4, 5), (2, 3, no, 5, no)),
        ((6, 7, 8, 9, 10), (no, no, 9, 10, 11)),
        ((11, 0, 0, 0, 0), (12, no, no, no, no)),
    }


@pytest.mark.parametrize("weights", [(3, 1), (1, 3), (0.5, 0.3, 0.2), (1, 1, 1, 7), (0.001, 1000)])
def test_every_stretch_of_rows_has_its_shares(weights: tuple[float, ...]) -> None:
    numbers = np.arange(3000)
    source, visits = shares(numbers, weights)
    for at, weight in enumerate(weights):
        assert visits[source == at].tolist() == list(range((source == at).sum())), "each visit once, in order"
        for begin, end in ((0, 3000), (123, 1123), (17, 47)):
            due = (end - begin) * weight / sum(weights)
            assert abs((source[begin:end] == at).sum() - due) < len(weights)
    alone = np.array([2999, 5, 70])
    assert np.array_equal(np.stack(shares(alone, weights)), np.stack((source, visits))[:, alone])
    if weights == (3, 1):
        assert [(source[begin : begin + 4] == 0).sum() for begin in range(40)] == [3] * 40


# Runs.


@pytest.mark.parametrize(
    "kind",
    [
        "chat",
        "pairs",
        "tokens",
        "3:1",
        "stream",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("packed chat", "chat in buckets", "rows of tokens", "stream of chats and pairs")
        ),
    ],
)
def test_a_run_goes_on_with_the_same_rows_bit_for_bit(folder: Path, tmp_path: Path, kind: str) -> None:
    if "stream" in kind:
        pytest.importorskip("datasets")
    data = kinds(folder)[kind]
    same_rate = 'lr_schedule.kind="constant"'
    whole = train(write(folder, tmp_path, data, run="whole"), same_rate)
    train(write(folder, tmp_path, data, run="parts", steps=2), same_rate)
    parts = train(write(folder, tmp_path, data, run="parts"), same_rate)
    assert whole.step == parts.step == 4
    for name, value in whole.runner.state_dict().items():
        assert torch.equal(value, parts.runner.state_dict()[name]), name
    losses, again = (steps_of(tmp_path / run) for run in ("whole", "parts"))
    assert [losses[step]["loss"] for step in range(1, 5)] == [again[step]["loss"] for step in range(1, 5)]
