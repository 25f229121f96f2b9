"""Rows of .jsonl and .parquet, and what they are as tokens: texts, chats, pairs, and ids made before.

Of a chat the answers are predicted: what the template marks ({% generation %}), or, where it marks nothing,
from behind the prompt for an answer to the next message. Of a pair the completion is, and the end behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stretto.config.data import SourceSettings
from stretto.errors import UsageError
from stretto.files.parse import parse_json
from stretto.models.gpt import IGNORED
from stretto.train.encode import GivenTokenizer

Record = tuple[str, Any]
"""Where a row is, for messages, and the row."""
Document = tuple[Sequence[int], Sequence[int]]
"""The ids of a row, and for each 1 where it is predicted."""
Encoder = Callable[[Sequence[Record]], list[Document]]
"""Some rows -> their documents, made by all threads. Raises UsageError that names the row."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What in a template says where answers are, as `transformers` looks for it."""
SHARE_GPT = {"human": "user", "gpt": "assistant"}
"""Roles in `conversations` -> in `messages`."""
CHAT = (
    'has `messages`: [{"role": "user", "content": ""}], or `conversations`: [{"from": "human", "value": ""}]'
)


def json_rows(path: Path) -> Iterator[Record]:
    """The lines of a .jsonl that are not empty. Raises UsageError, with the line, for what is no JSON."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        row = parse_json(line)
                    except ValueError as error:
                        why = error.msg if isinstance(error, json.JSONDecodeError) else error
                        raise UsageError(f"{path}:{number}: is not JSON: {why}") from None
                    yield f"{path}:{number}", row
    except UnicodeDecodeError as error:
        raise UsageError(f"data.paths: {path} is not UTF-8 text ({error.reason})") from None


def parquet_rows(path: Path, columns: Sequence[str], is_text: bool) -> Iterator[Record]:
    """The rows of a .parquet, with those of `columns` that there are. is_text: they are of text. Raises
    UsageError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{path}: reading .parquet needs pyarrow: pip install 'stretto[parquet]'") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            kinds = (pyarrow.types.is_string, pyarrow.types.is_large_string)
            schema = list(table.schema_arrow)
            texts = {one.name for one in schema if not is_text or any(kind(one.type) for kind in kinds)}
            known = [name for name in columns if name in texts]
            if not known:
                there = ", ".join(f"{one.name} ({one.type})" for one in schema)
                of, do = ("of text ", "; set data.text_field") if is_text else ("", "")
                raise UsageError(f"{path}: there is no column {of}{columns[0]!r} (there is: {there}){do}")
            batches = table.iter_batches(batch_size=1024, columns=known)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))
    except pyarrow.ArrowException as error:
        raise UsageError(f"data.paths: {path} cannot be read as parquet: {error}") from None


def records_in(paths: Sequence[Path], source: SourceSettings, key: str) -> Iterator[Record]:
    """The rows of all files. Raises UsageError for a file that has none."""
    for path in paths:
        if path.suffix.lower() == ".jsonl":
            yield from json_rows(path)
        elif path.suffix.lower() == ".parquet":
            yield from parquet_rows(path, columns_of(source), is_text=False)
        else:
            raise UsageError(f"{key}.paths: {path} has no rows of {source.kind}: give .jsonl or .parquet")


def texts_in(record: Record, names: Sequence[str], setting: str) -> list[str]:
    """The texts in some fields of a row. setting: which names them. Raises UsageError where one has none."""
    where, row = record
    found = [row.get(name) if isinstance(row, dict) else None for name in names]
    for name, one in zip(names, found):
        if not isinstance(one, str):
            there = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
            raise UsageError(
                f"{where}: there is no text in the field {name!r} (there is: {there}); set {setting}"
            )
    # JSON can spell half a surrogate pair, which is no character.
    return [str(one).encode("utf-8", "replace").decode("utf-8") for one in found]


def columns_of(source: SourceSettings) -> list[str]:
    """The fields of rows that a kind of source reads."""
    return {
        "text": [source.text_field],
        "chat": ["messages", "conversations"],
        "pairs": [source.prompt_field, source.completion_field],
        "tokens": ["input_ids", "labels", "attention_mask"],
    }[source.kind]


def encoder_of(source: SourceSettings, given: GivenTokenizer | None, key: str) -> Encoder:
    """How rows become documents. key: of the source. Raises UsageError for chats without a template."""
    if given is None or source.kind == "tokens":
        return lambda rows: [_made_before(*row) for row in rows]
    if source.kind == "chat":
        return _chats(given, key)
    columns = columns_of(source)
    setting = f"{key}.{'text_field' if source.kind == 'text' else 'prompt_field and completion_field'}"

    def encode(rows: Sequence[Record]) -> list[Document]:
        texts = [text for row in rows for text in texts_in(row, columns, setting)]
        ids = [one.ids for one in given.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        prompts = ids[::2] if len(columns) == 2 else [[]] * len(ids)
        sides = zip(prompts, ids[len(columns) - 1 :: len(columns)])
        made = [([*given.begin, *prompt], [*rest, given.end]) for prompt, rest in sides]
        return [(prompt + rest, [0] * len(prompt) + [1] * len(rest)) for prompt, rest in made]

    return encode


def _made_before(where: str, row: Any) -> Document:
    names = ("input_ids", "labels", "attention_mask")
    found: list[Any] = [row.get(name) if isinstance(row, dict) else None for name in names]
    ids, labels, seen = found
    for one in (ids, *(one for one in (labels, seen) if one is not None)):
        if not isinstance(one, list) or len(one) != len(ids) or any(type(n) is not int for n in one):
            raise UsageError(
                f"{where}: input_ids is a list of integers; labels and attention_mask, if any, as long ones"
            )
    both = zip(ids, ids if labels is None else labels, [1] * len(ids) if seen is None else seen)
    kept = [(one, label) for one, label, is_seen in both if is_seen]
    if wrong := [(one, label) for one, label in kept if label not in (one, IGNORED)]:
        raise UsageError(
            f"{where}: labels has {wrong[0][1]} where input_ids has {wrong[0][0]}: give the same id "
            f"where it is predicted, and {IGNORED} where it is not (labels are not shifted)"
        )
    return [one for one, _ in kept], [int(label != IGNORED) for _, label in kept]


# Chats.


def _chats(given: GivenTokenizer, key: str) -> Encoder:
    tokenizer = given.of_transformers
    if getattr(tokenizer, "chat_template", None) is None:
        raise UsageError(
            f"{key}.kind = 'chat': the tokenizer has no chat template: take a folder whose tokenizer has one "
            "(chat_template.jinja, or chat_template in tokenizer_config.json)"
        )
    is_marked = MARKS.search(tokenizer.get_chat_template()) is not None

    def encode(rows: Sequence[Record]) -> list[Document]:
        chats = [_messages(*row) for row in rows]
        try:
            if is_marked:
                both = tokenizer.apply_chat_template(
                    chats, return_assistant_tokens_mask=True, return_dict=True
                )
                return [*zip(both["input_ids"], both["assistant_masks"])]
            made = [_answers(tokenizer, row[0], chat) for row, chat in zip(rows, chats)]
            found = given.tokenizer.encode_batch([text for text, _ in made], add_special_tokens=False)
            return [(one.ids, _counts(one.offsets, spans)) for one, (_, spans) in zip(found, made)]
        except UsageError:
            raise
        except Exception as error:  # of the template: whatever it raises for what it does not take
            if len(rows) == 1:
                raise UsageError(f"{rows[0][0]}: the tokenizer's chat template refuses it: {error}") from None
            return [encode([row])[0] for row in rows]  # one of them is refused, by its place

    return encode


def _messages(where: str, row: Any) -> list[dict[str, Any]]:
    found = (row.get("messages") or row.get("conversations")) if isinstance(row, dict) else None
    found = [one if isinstance(one, dict) else {} for one in found] if isinstance(found, list) else []
    chat = [
        {"role": SHARE_GPT.get(one["from"], one["from"]), "content": one.get("value")}
        if "from" in one
        else one
        for one in found
    ]
    if not chat or not all(isinstance(one.get("role"), str) for one in chat):
        raise UsageError(f"{where}: a chat {CHAT}")
    return chat


def _answers(tokenizer: Any, where: str, chat: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """The text of a chat, and where in it the answers are."""

    def text_of(messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))

    full, spans = text_of(chat), []
    for at, message in enumerate(chat):
        if message["role"] == "assistant":
            if not at:
                raise UsageError(f"{where}: the chat begins with an answer: put a message before it")
            before, upto = text_of(chat[:at], prompt=True), text_of(chat[: at + 1])
            if not upto.startswith(before) or not full.startswith(upto):
                raise UsageError(
                    f"{where}: message {at + 1} is an answer that cannot be found: the text of the "
                    "messages up to it does not begin the text of all. Mark answers in the chat template "
                    "({% generation %} ... {% endgeneration %})"
                )
            spans.append((len(before), len(upto)))
    return full, spans


def _counts(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token from the first to the last of which a character is in a span."""
    counts = [0] * len(offsets)
    for begin, end in spans:
        within = [at for at, (first, last) in enumerate(offsets) if last > begin and first < end]
        if within:
            counts[within[0] : within[-1] + 1] = [1] * (within[-1] + 1 - within[0])
    return counts
