"""Data of every kind: what is predicted of chats, pairs and ids, mixtures by weights, streams; and runs that
go on from a checkpoint with the same rows, bit for bit."""

from __future__ import annotations

import json
import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.saving.pretrained import tokenizer
from tests.train.tiny import GPT, WORDS, steps_of, train, write_settings

from stretto.batch import tree
from stretto.config import load_settings
from stretto.config.data import SourceSettings
from stretto.errors import StrettoError, UsageError
from stretto.files.say import silent
from stretto.models.gpt import IGNORED
from stretto.train import sources
from stretto.train.records import encoder_of
from stretto.train.rows import DocumentRows, Table, shares
from stretto.train.sources import Source, Sources
from stretto.train.stream import RowStream
from stretto.train.task import Task, data_task
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
    write_rows(
        where / "chat.jsonl", [{"messages": chat(*both)} for both in zip(asked, answered, strict=True)]
    )
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
        "tokens": f'''kind = "tokens"\nvocab_size = 300
paths = ["{folder}/a.npy", "{folder}/b.npy", "{folder}/c.bin"]''',
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


def write(
    folder: Path, where: Path, data: str, *, steps: int = 4, run: str = "run", length: int = 32
) -> Path:
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


@pytest.mark.parametrize("first", [2_000_000, 10**13])
def test_a_source_of_one_row_among_many_has_its_turn(first: int) -> None:
    source, visits = shares(np.array([0, 1, first, first + 1, 2 * first + 2]), [first, 1])
    assert source.tolist() == [1, 0, 0, 1, 1]
    assert visits.tolist() == [0, 0, first - 1, 1, 2]


def test_tokens_take_their_own_bytes_while_they_are_made(folder: Path, tmp_path: Path) -> None:
    settings = load_settings(write(folder, tmp_path, kinds(folder)["rows of tokens"]))
    made, size, count = Sources(settings, None, silent, silent), 10_000, 100
    ids, counts = np.arange(size) % 300, np.ones(size, np.uint8)
    tracemalloc.start()
    table, _ = made._tabled(((ids, counts) for _ in range(count)), "data")  # type: ignore[misc]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(table.tokens) == size * count
    assert peak / len(table.tokens) < 8, "two of ids and one of counts, while they are put together twice"


# Runs.


@pytest.mark.parametrize("kind", ["text", "pairs"])
def test_what_is_planned_first_is_what_is_trained_on(folder: Path, tmp_path: Path, kind: str) -> None:
    source = f'[[data.sources]]\nkind = "{kind}"\npaths = ["{folder}/{kind}.jsonl"]'
    path = write(folder, tmp_path, f'tokenizer = "{folder}/tokenizer"\n{source}')
    task = data_task(load_settings(path), source_of(path))
    planned, trained = task.first_batch(4), task.train(0, 4)
    assert isinstance(trained, torch.Tensor) == (kind == "text")
    first, then = ({n: leaf.shape for n, leaf in tree.flatten(one).items()} for one in (planned, trained))
    assert first == then


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


class Counted:
    """A stream of numbers that counts how many were read."""

    def __init__(self, size: int) -> None:
        self.left, self.read = iter(range(size)), 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        self.read += 1
        return next(self.left)


class WithState(Counted):
    """One that has a state, as a `datasets.IterableDataset` has."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.left = iter(range(state["at"], 20))


def one_a_row(read: Any, number: int) -> DocumentRows | None:
    """Rows of the numbers, but for the third block, of which all are held out."""
    ids = np.array([one for _, number in read for one in (number, number + 100)], dtype=np.uint16)
    begins = np.arange(0, len(ids), 2)
    return None if number == 2 else DocumentRows(Table(ids, None, begins, begins + 2), 4, f"0:{number}")


@pytest.mark.parametrize("kind", [Counted, WithState])
def test_a_stream_goes_on_from_its_state_and_from_none(kind: type[Counted]) -> None:
    made: list[Counted] = []

    def begin() -> Counted:
        made.append(kind(20))
        return made[-1]

    def rows(stream: RowStream, begin: int, end: int) -> list[int]:
        return stream.rows(np.arange(begin, end))["input_ids"][:, 0].tolist()  # type: ignore[index]

    stream = RowStream(begin, one_a_row, 6, "data")
    seen = rows(stream, 0, 5) + rows(stream, 5, 17)
    assert sorted(seen[:14]) == [*range(12), 18, 19], "6, 6, none of 6, 2"
    assert seen[:6] != sorted(seen[:6])
    at = json.loads(json.dumps(stream.state))
    assert at["first"] == 14
    later = rows(stream, 17, 25)
    other = RowStream(begin, one_a_row, 6, "data")
    other.restore(at)
    assert rows(other, 17, 25) == later
    assert rows(other, 3, 9) == seen[3:9], "a step back"
    assert rows(RowStream(begin, one_a_row, 6, "data"), 17, 25) == later, "without a state"
    halfway = RowStream(begin, one_a_row, 6, "data")
    rows(halfway, 0, 8)
    behind = RowStream(begin, one_a_row, 6, "data")
    behind.restore(halfway.state)
    assert rows(behind, 8, 12) == seen[8:12]
    assert made[-1].read == (12 if kind is Counted else 6), "what has no state is passed over"


def test_a_stream_that_ends_in_an_error_or_has_nothing() -> None:
    def broken() -> Any:
        yield 1
        raise OSError("the network is down")

    with pytest.raises(StrettoError, match=r"data.stream cannot be read: the network is down; .* resume"):
        RowStream(broken, one_a_row, 6, "data").rows(np.arange(3))
    with pytest.raises(UsageError, match=r"data.stream has no row to train on"):
        RowStream(list, one_a_row, 6, "data").rows(np.arange(3))


def streamed(
    folder: Path, where: Path, patch: pytest.MonkeyPatch, rows: list[dict[str, Any]], lines: str
) -> Source:
    """A stream of these rows, as settings with these lines make it."""
    patch.setattr(sources, "opened", lambda one, key: rows)
    return source_of(write(folder, where, f'stream = "rows"\n{lines}'))


def test_blocks_of_which_all_is_held_out_are_passed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": one} for one in phrases(99)]
    lines = f'tokenizer = "{folder}/tokenizer"\nshuffled_rows = 1'
    made = streamed(folder, tmp_path, monkeypatch, rows, lines).train(np.arange(60))
    assert (made["labels"] != IGNORED).any(1).all()  # type: ignore[call-overload]


@pytest.mark.parametrize("size", [3, 1000])
def test_texts_of_a_stream_are_one_and_rows_with_labels_are_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    lines = f'tokenizer = "{folder}/tokenizer"\nshuffled_rows = {size}'
    rows = [{"text": " ".join(phrases(3, seed))} for seed in range(200)]
    made: Any = streamed(folder, tmp_path, monkeypatch, rows, lines).train(np.arange(32))
    assert (made["input_ids"] == 300).any(), "what begins each text"
    assert (made["labels"] != IGNORED).float().mean() > 0.7
    # In some blocks of three all is predicted.
    ids = [[number, *range(200, 206)] for number in range(200)]
    labels = [one if number % 4 else [IGNORED, *one[1:4], *[IGNORED] * 3] for number, one in enumerate(ids)]
    rows = [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]
    lines = f'kind = "tokens"\nvocab_size = 301\nshuffled_rows = {size}'
    made = streamed(folder, tmp_path / "ids", monkeypatch, rows, lines).train(np.arange(90))
    assert (made["input_ids"][:, 0] < 200).all(), "a row each"
    assert not made["input_ids"][:, 7:].any()


def test_each_stream_goes_on_from_its_own_place(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {name: [{"text": one} for one in phrases(99, seed)] for seed, name in enumerate("abc")}
    monkeypatch.setattr(sources, "opened", lambda one, key: rows[one.stream])

    def task(*names: str) -> Task:
        each = "".join(f'[[data.sources]]\nstream = "{name}"\nshuffled_rows = 9\n' for name in names)
        path = write(folder, tmp_path, f'tokenizer = "{folder}/tokenizer"\n{each}')
        return data_task(load_settings(path), source_of(path))

    first = task("a", "b")
    for step in range(4):
        first.train(step, 8)
    assert first.state is not None
    places = json.loads(json.dumps(first.state()))
    swapped = task("b", "a")
    assert swapped.restore is not None
    assert swapped.state is not None
    swapped.restore(places)
    assert swapped.state()["streams"] == places["streams"]
    assert len({json.dumps(place) for place in places["streams"].values()}) == 2
    restored, anew = swapped.train(4, 8), task("b", "a").train(4, 8)
    assert all(torch.equal(restored[name], anew[name]) for name in anew)
    more = task("c", "a", "b").restore
    assert more is not None
    with pytest.raises(UsageError, match=r"data.sources\[0\].stream is another than those of the checkpoint"):
        more(places)


def test_a_changed_file_is_noticed_and_equal_rows_are_on_one_side(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": a, "completion": "yes"} for a in phrases(100)] * 2
    pairs = write_rows(tmp_path / "pairs.jsonl", rows)
    data = f'tokenizer = "{folder}/tokenizer"\nkind = "pairs"\npaths = ["{pairs}"]'
    path = write(tmp_path, tmp_path, data)
    source = source_of(path)

    def side(rows_of: Any, count: int) -> set[tuple[int, ...]]:
        return set(map(tuple, rows_of(np.arange(count))["input_ids"].tolist()))

    train_rows, held_out = side(source.train, 400), side(source.held_out, 400)
    assert not train_rows & held_out
    assert 2 < len(held_out) < 30 < len(train_rows)
    assert source_of(path).digest == source.digest
    train(path, "training.steps=2")
    write_rows(pairs, [{"prompt": "no", "completion": "yes"}, *rows])
    assert source_of(path).digest != source.digest


def test_what_has_changed_since_a_checkpoint_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(folder, tmp_path, kinds(folder)["pairs"], steps=2)
    train(path)
    train(path, "training.steps=3")
    assert "has changed" not in capsys.readouterr().out
    train(path, "training.steps=4", f"data.paths=[{folder}/pairs.jsonl, {folder}/pairs.jsonl]", "data.seed=3")
    assert "has changed" not in capsys.readouterr().out
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": a, "completion": a} for a in phrases(50, 1)])
    train(path, "training.steps=5", f"data.paths=[{other}]")
    assert "note: the data has changed since step 4: rows go on by their number" in capsys.readouterr().out


# What is refused.


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('kind = "chats"', "did you mean 'chat'?"),
        ('kind = "chat"\ntokenizer = "t"', "data.paths is empty: name files of chat"),
        ('kind = "chat"\npaths = ["x"]', "learned of a single source of plain text alone: name a folder"),
        ('stream = "json"\npaths = ["x"]', "learned of a single source of plain text alone"),
        ('split = "test"', "data.split is of a stream: drop it"),
        ('prompt_field = "q"', "data.prompt_field is of kind = 'pairs', and data.kind = 'text': drop it"),
        ('tokenizer = "t"\nvocab_size = 300', "data.tokenizer = 't' brings its own: drop it"),
        ('paths = ["x"]\n[[data.sources]]\n', "data.paths is of one source, and data.sources has several"),
        ("[[data.sources]]\nweight = 0.0", "data.sources[0].weight = 0.0: input should be greater"),
        ('[[data.sources]]\nkind = "tokens"', "data.sources[0].paths is empty: name files of tokens"),
    ],
)
def test_settings_that_do_not_fit(folder: Path, tmp_path: Path, data: str, words: str) -> None:
    with pytest.raises(UsageError) as told:
        load_settings(write(folder, tmp_path, data))
    assert words in str(told.value)


NO_TEXT = "there is no text in the field 'completion' (there is: 'prompt'); set data.prompt_field and"
CHATS: dict[str, tuple[Any, str]] = {
    "no chat": ({"text": "x"}, "rows.jsonl:3: a chat has `messages`"),
    "no role": ({"messages": [{"content": "x"}]}, "rows.jsonl:3: a chat has `messages`"),
    "an answer first": ({"messages": chat("a", "b")[1:]}, "rows.jsonl:3: the chat begins with an answer"),
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_that_are_none(folder: Path, tmp_path: Path, name: str) -> None:
    row, words = CHATS[name]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": chat("a", "b")}] * 2 + [row])
    with pytest.raises(UsageError) as told:
        source_of(
            write(folder, tmp_path, f'kind = "chat"\ntokenizer = "{folder}/tokenizer"\npaths = ["{rows}"]')
        )
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the tokenizer has no chat template: take a folder whose tokenizer has one"),
        (FORGETFUL, "chat.jsonl:1: message 2 is an answer that cannot be found"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "chat.jsonl:1: the tokenizer's chat template refuses it",
        ),
    ],
)
def test_templates_that_do_not_do(tmp_path: Path, template: str | None, words: str) -> None:
    rows = write_rows(tmp_path / "chat.jsonl", [{"messages": [*chat("a", "b"), *chat("c", "d")]}] * 3)
    own = write_tokenizer(tmp_path / "tokenizer", template)
    data = f'kind = "chat"\ntokenizer = "{own}"\npaths = ["{rows}"]'
    with pytest.raises(UsageError) as told:
        source_of(write(tmp_path, tmp_path, data))
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"ids": [1]}, "input_ids is a list of integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "rows.jsonl:2: input_ids is a list of integers"),
        ({"input_ids": [1, 2], "labels": [2, 3]}, "rows.jsonl:2: labels has 2 where input_ids has 1"),
        ({"input_ids": [1, 300]}, "there are ids from 1 to 300, and 300 tokens: name the tokenizer"),
    ],
)
def test_ids_that_are_none(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2]}, row])
    with pytest.raises(UsageError) as told:
        source_of(write(tmp_path, tmp_path, f'kind = "tokens"\nvocab_size = 300\npaths = ["{rows}"]'))
    assert words in str(told.value)


def test_files_that_are_none(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "square.npy", np.zeros((3, 3)))
    np.save(tmp_path / "short.npy", np.zeros(40, np.uint16))
    np.save(tmp_path / "other.npy", np.full(900, 300))
    (tmp_path / "no.npy").write_bytes(b"none")
    (tmp_path / "chat.txt").write_text("hello")
    tokens, chats = 'kind = "tokens"\nvocab_size = 300', f'kind = "chat"\ntokenizer = "{folder}/tokenizer"'
    for lines, name, words in (
        (tokens, "square.npy", "has float64 of shape [3, 3]: give integers in one dim"),
        (tokens, "short.npy", "no file has 33 ids to train on, and as many to keep out"),
        (tokens, "no.npy", "cannot be read as ids"),
        (f"{tokens}\ndocument_masks = true", "short.npy", "have no documents"),
        (chats, "chat.txt", "has no rows of chat: give .jsonl or .parquet"),
    ):
        with pytest.raises(UsageError) as told:
            source_of(write(folder, tmp_path, f'{lines}\npaths = ["{tmp_path}/{name}"]'))
        assert words in str(told.value)
    other = source_of(write(folder, tmp_path, f'{tokens}\npaths = ["{tmp_path}/other.npy"]'))
    with pytest.raises(UsageError, match="there are ids from 300 to 300"):
        other.train(np.arange(1))
    missing = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "a"}])
    data = f'kind = "pairs"\ntokenizer = "{folder}/tokenizer"\npaths = ["{missing}"]'
    with pytest.raises(UsageError) as told:
        source_of(write(folder, tmp_path, data))
    assert NO_TEXT in str(told.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"data.stream needs datasets: pip install 'stretto\[datasets\]'"):
        source_of(write(folder, tmp_path, kinds(folder)["stream"]))


def test_rows_of_a_parquet_are_those_of_a_jsonl(folder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("chat", "pairs"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        data = kinds(folder)[name]
        one, other = (
            source_of(write(folder, tmp_path, given))
            for given in (data, data.replace(f"{folder}/{name}.jsonl", f"{tmp_path}/{name}.parquet"))
        )
        assert one.digest == other.digest
        for left, right in zip(
            one.train(np.arange(9)).items(), other.train(np.arange(9)).items(), strict=True
        ):
            assert left[0] == right[0]
            assert torch.equal(left[1], right[1])


def test_a_stream_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    data = kinds(folder)["stream"].replace("text.jsonl", "txet.jsonl")
    with pytest.raises(UsageError, match=r"data.stream = 'json': datasets cannot open it: "):
        source_of(write(folder, tmp_path, data))
