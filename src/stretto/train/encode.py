"""Documents become token ids.

    1. A document is cut into pieces at ends of lines, and pieces make groups.
    2. Where a tokenizer first splits text into words by GPT-2's expression, and this machine has few cores,
       words are found here: every ASCII part of a piece by the same expression, for ASCII.
    3. Each word (or part, or piece) is encoded by the `tokenizers` library when it is first seen; its ids are
       looked up from then on.

The ids are those that the library gives for the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from stretto.files.parse import parse_json
from stretto.processor.control_groups import usable_cores

PIECE_CHARS = 131_072
"""Long documents are encoded in pieces of about this size, cut at a line's end, for threads to share."""
GROUP_CHARS = 4_000_000
"""Pieces are encoded in groups of about this size: enough for every thread, and little memory."""
KNOWN_CHARS = 16_000_000
"""Words are forgotten when they have so many characters. Assumed: with their ids some 200 MB."""
FEW_CORES = 8
"""Up to so many, one thread that looks words up is not slower than all that encode each of them again.
Measured on the 31 MB of the standard library: 12 times less processor time for what is looked up."""

WORD = re.compile(
    r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^ \t-\rA-Za-z0-9]+|[ \t-\r]+(?![^ \t-\r])|[ \t-\r]+"
)
"""GPT-2's expression (Radford et al., 2019, encoder.py) on text that is ASCII."""
LINE_END = re.compile(r"(?<=[!-~])(?=\n)")
"""Where no word goes on: none has white space behind another character."""
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
"""What a tokenizer's file says of that expression."""

_BEGIN, _END = 0, 1
"""Rows of what is before a document and behind it."""


@dataclass(frozen=True, slots=True)
class GivenTokenizer:
    """begin: tokens before each document, as the tokenizer itself puts there. end: the token behind it. A
    tokenizer that is learned has no such tokens before, and its first behind."""

    tokenizer: Tokenizer
    begin: tuple[int, ...] = ()
    end: int = 0
    of_transformers: Any = field(default=None, compare=False)
    """As that library loads it, with the template of a chat; None for one that `stretto export` wrote."""


def count(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs for its tokens, whose numbers may have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type that fits every token id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of about PIECE_CHARS, cut after a line's end where there is one."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = cut if cut > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def words(piece: str) -> list[str]:
    """What a tokenizer that `splits_words` encodes one by one; of lines that are not ASCII, each as it is."""
    if piece.isascii():
        return WORD.findall(piece)
    found: list[str] = []
    for part in LINE_END.split(piece):
        found += WORD.findall(part) if part.isascii() else [part]
    return found


def splits_words(tokenizer: Tokenizer) -> bool:
    """Whether it encodes each word by itself, and words are those of GPT-2's expression: as one that was
    learned here does."""
    written = parse_json(tokenizer.to_str())
    splits, model = written["pre_tokenizer"] or {}, written["model"]
    return (
        BYTE_LEVEL.items() <= splits.items()
        and written["normalizer"] is None
        and model["type"] == "BPE"
        and not model.get("dropout")
        and tokenizer.encode_special_tokens
        and all(added["special"] for added in written["added_tokens"])
    )


class _Rows(dict[str, int]):
    """Text -> its row among those of which ids are known. new: those that are not encoded yet."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, text: str) -> int:
        self.new.append(text)
        row = self[text] = len(self) + _END + 1
        return row


class _Known:
    """The ids of texts by row: of row r, `_ids[_starts[r] : _starts[r] + _lengths[r]]`."""

    def __init__(self, tokenizer: Tokenizer, begin: Sequence[int], end: int) -> None:
        self.rows = _Rows()
        self.chars = 0
        self._tokenizer = tokenizer
        self._ids = np.array([*begin, end], token_dtype(count(tokenizer)))
        self._starts, self._lengths = np.array([0, len(begin)]), np.array([len(begin), 1])

    def ids_of(self, rows: list[int]) -> npt.NDArray[np.unsignedinteger]:
        """The ids of the rows, one behind another."""
        new, self.rows.new = self.rows.new, []
        self.chars += sum(map(len, new))
        made = [one.ids for one in self._tokenizer.encode_batch_fast(new, add_special_tokens=False)]
        lengths = np.fromiter(map(len, made), np.int64, len(made))
        flat = np.fromiter((id for ids in made for id in ids), self._ids.dtype, int(lengths.sum()))
        starts = len(self._ids) + np.cumsum(lengths) - lengths
        self._ids = np.concatenate([self._ids, flat])
        self._starts, self._lengths = (
            np.concatenate(both) for both in ((self._starts, starts), (self._lengths, lengths))
        )
        chosen = np.array(rows, np.int64)
        long = self._lengths[chosen]
        first = self._starts[chosen] - np.cumsum(long) + long
        found: npt.NDArray[np.unsignedinteger] = self._ids[np.repeat(first, long) + np.arange(long.sum())]
        return found


def encode(
    tokenizer: Tokenizer, texts: Iterable[str], begin: Sequence[int], end: int
) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """Token ids of full documents, in groups, each with `begin` before it and `end` behind. Where a long
    document is cut, a tokenizer that looks further than a line makes a few other tokens. The library works on
    all cores (`RAYON_NUM_THREADS` limits them)."""
    looks_up = len(usable_cores()) <= FEW_CORES and splits_words(tokenizer)
    known, rows, chars = _Known(tokenizer, begin, end), list[int](), 0
    for text in texts:
        rows.append(_BEGIN)
        for piece in pieces(text):
            rows += map(known.rows.__getitem__, words(piece) if looks_up else [piece])
            chars += len(piece)
            if chars >= GROUP_CHARS:
                yield known.ids_of(rows)
                rows, chars = [], 0
                if known.chars >= KNOWN_CHARS:
                    known = _Known(tokenizer, begin, end)
        rows.append(_END)
    if rows:
        yield known.ids_of(rows)
