"""Text: which files have it, the documents in them, in an order that is always the same, and their tokens.

Reads files (UTF-8 text, .jsonl, .parquet) and never writes one. A document is a file of text, a line of
a .jsonl, or a row of a .parquet. A tokenizer that is learned from them is a byte-level byte-pair encoding
(Sennrich et al., 2016; bytes as in GPT-2), by the `tokenizers` library: every text can be encoded and is
decoded exactly. One that is given comes from the files beside a pretrained model's weights.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stretto.config import HuggingFaceSettings, Model
from stretto.config.pretrained import transformers_for
from stretto.errors import UsageError, near_path
from stretto.files.say import Say
from stretto.models.weight_files import weights_folder
from stretto.train.checkpoint_files import TOKENIZER
from stretto.train.encode import GivenTokenizer, count
from stretto.train.records import json_rows, parquet_rows, texts_in

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
"""Folders of compiled or of installed code: the same text would come in or not by what is installed."""
END_OF_TEXT = "<|endoftext|>"
"""The token after each document; its id is 0."""
SAMPLE_CHARS = 6_000_000
"""How much text merges are learned from. Measured on the 31 MB of the standard library, with 4,096 tokens:
learned from all of it instead, they make 0.7 % fewer tokens of it, and take five times as long to learn."""
SAMPLE_BLOCK_CHARS = 16_384
"""A sample is made of blocks of this size, taken evenly from the text."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of text. `named`: the user named this very file, so it must be readable."""

    path: Path
    bytes: int
    mtime_ns: int
    named: bool


def standard_library() -> Path:
    """The folder of the running interpreter's own library."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(paths: Sequence[str]) -> list[TextFile]:
    """The files in `paths` (files and folders; none means the standard library's .py files).

    Folders are walked in sorted order, without hidden files. Raises UsageError for a path that does not
    exist, and when there is no file at all.
    """
    if not paths:
        own = [_entry(path, named=False) for path in _walk(standard_library(), ".py")]
        if not own:
            raise UsageError(f"data.paths is empty, and {standard_library()} has no .py file; name some text")
        return own
    files: dict[Path, TextFile] = {}
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            for file in _walk(path):
                files.setdefault(file.resolve(), _entry(file, named=False))
        elif path.is_file():
            files[path.resolve()] = _entry(path, named=True)
        else:
            raise UsageError(
                f"data.paths: {name} does not exist (seen from {Path.cwd()}); "
                f"{near_path(path, '{} ')}name a file or a folder"
            )
    if not files:
        raise UsageError(f"data.paths: there is no file in {', '.join(paths)}")
    return list(files.values())


def _walk(folder: Path, suffix: str = "") -> list[Path]:
    found: list[Path] = []
    for where, folders, names in os.walk(folder):  # into no folder that is skipped
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        here = Path(where)
        found += [here / name for name in names if name.endswith(suffix) and not name.startswith(".")]
    return sorted(filter(Path.is_file, found), key=lambda path: path.relative_to(folder).parts)


def _entry(path: Path, named: bool) -> TextFile:
    status = path.stat()
    return TextFile(path, status.st_size, status.st_mtime_ns, named)


def documents(files: Sequence[TextFile], text_field: str, say: Say) -> Iterator[str]:
    """Every document that is not empty, in the files' order.

    In a folder, a file that is not UTF-8 text is left out, and one line counts them. Raises
    UsageError, with file and line, for a file that was named and cannot be read, and for a .jsonl or
    .parquet without the text field.
    """
    left_out: list[TextFile] = []
    for file in files:
        suffix = file.path.suffix.lower()
        try:
            if suffix == ".jsonl":
                texts = (texts_in(row, [text_field], "data.text_field")[0] for row in json_rows(file.path))
                yield from filter(None, texts)
            elif suffix == ".parquet":
                rows = parquet_rows(file.path, [text_field], is_text=True)
                yield from (row[text_field] for _, row in rows if row[text_field])
            elif (text := _plain(file)) is None:
                left_out.append(file)
            elif text:
                yield text
        except OSError as error:
            raise UsageError(f"data.paths: {file.path} cannot be read: {error.strerror or error}") from None
    if left_out:
        say(f"left out {len(left_out)} of {len(files)} files that are not UTF-8 text, as {left_out[0].path}")


def _plain(file: TextFile) -> str | None:
    try:
        content = file.path.read_bytes()
        if b"\0" not in content:
            return content.decode("utf-8-sig")
        where = f"a zero byte at byte {content.index(0)}"
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is not UTF-8"
    if file.named:
        raise UsageError(f"data.paths: {file.path} is not UTF-8 text ({where}); convert it to UTF-8")
    return None


# Tokens.


def sample(texts: Iterable[str], total_chars: int) -> Iterator[str]:
    """Blocks that are taken evenly from `texts`, with about SAMPLE_CHARS of their `total_chars`."""
    share = min(1.0, SAMPLE_CHARS / max(1, total_chars))
    due = 1.0  # The first block is always taken: there is no tokenizer of nothing.
    for text in texts:
        for start in range(0, len(text), SAMPLE_BLOCK_CHARS):
            block = text[start : start + SAMPLE_BLOCK_CHARS]
            if due >= 1.0:
                yield block
                due -= 1.0
            due += share


def learn(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a tokenizer of at most `vocab_size` tokens; little text gives fewer.

    The same texts in the same order give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _plain_text_only(tokenizer)


def parse(text: str) -> Tokenizer:
    """The tokenizer whose `to_str()` is `text`."""
    return _plain_text_only(Tokenizer.from_str(text))


def _plain_text_only(tokenizer: Tokenizer) -> Tokenizer:
    # A text that happens to have END_OF_TEXT's own letters is text like any other. Not kept by `to_str`.
    tokenizer.encode_special_tokens = True
    return tokenizer


def given_tokenizer(model: Model, named: str | None = None) -> GivenTokenizer | None:
    """The tokenizer of `model.pretrained`, or the one that `data.tokenizer` has named; None without both.

    Raises UsageError where there is none, where it has no token for the end of a text, and where it has more
    tokens than the model has rows.
    """
    rows: Any = model.config.get("vocab_size") if isinstance(model, HuggingFaceSettings) else model.vocab_size
    if named is not None:
        what, own = f"data.tokenizer = {named!r}", Path(named).expanduser()
        is_own = (own / TOKENIZER).is_file() and not (own / "tokenizer_config.json").is_file()
        return _own(named, what) if is_own else _of_transformers(named, what)
    if model.pretrained is None:
        return None
    what = f"model.pretrained = {model.pretrained!r}"
    if isinstance(model, HuggingFaceSettings):
        given = _of_transformers(model.pretrained, what)
    else:
        given = _own(model.pretrained, what)
    if not isinstance(rows, int):
        raise UsageError(
            f"{what}: the settings lack the model's vocab_size: let stretto.config.load_settings read them, "
            "which adds what is in the folder"
        )
    tokens = count(given.tokenizer)
    if tokens > rows:
        raise UsageError(
            f"{what}: its tokenizer has {tokens} tokens, and its model has an embedding of {rows}: the "
            "folder has the tokenizer of another model"
        )
    return given


def _own(source: str, what: str) -> GivenTokenizer:
    """That of what `stretto export` wrote."""
    path = weights_folder(source) / TOKENIZER
    try:
        tokenizer = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{what} has no {TOKENIZER}: export the run on text again, or copy its tokenizer there"
        ) from None
    except Exception as error:  # of the library, which has no class of its own for them
        raise UsageError(f"{path} cannot be read: {error}") from None
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise UsageError(f"{path} has no token {END_OF_TEXT}: it is of another model")
    return GivenTokenizer(tokenizer, (), end)


def _of_transformers(source: str, what: str) -> GivenTokenizer:
    """The tokenizer that `AutoTokenizer` finds, as it is: texts that have its special tokens have them."""
    auto: Any = transformers_for(what).AutoTokenizer
    try:
        loaded = auto.from_pretrained(source, trust_remote_code=False)
        tokenizer = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    except Exception as error:  # whatever files of others make of it
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"{what}: transformers finds no fast tokenizer: {lines[0]}; put the tokenizer's files beside the "
            "weights (tokenizer.save_pretrained)"
        ) from None
    if loaded.eos_token_id is None:
        raise UsageError(
            f"{what}: its tokenizer has no eos_token, which ends each document: set it, and "
            "tokenizer.save_pretrained"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    full, bare = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
    starts = [at for at in range(len(full)) if full[at : at + len(bare)] == bare]
    begin = tuple(full[: starts[0]]) if starts else ()
    return GivenTokenizer(tokenizer, begin, int(loaded.eos_token_id), loaded)
