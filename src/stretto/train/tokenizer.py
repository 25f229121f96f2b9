"""The tokenizer: a byte-level byte-pair encoding (Sennrich et al., 2016; bytes as in GPT-2).

Learned from the text that is trained on, by the `tokenizers` library. Every text can be encoded and is
decoded exactly. Text is encoded in the same way by the tokenizer of a pretrained model. It touches no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
"""The token that stands after each document; its id is 0."""
SAMPLE_CHARS = 6_000_000
"""How much text merges are learned from. Measured on the 31 MB of the standard library, with 4,096 tokens:
learned from all of it instead, they make 0.7 % fewer tokens of it, and take five times as long to learn."""
SAMPLE_BLOCK_CHARS = 16_384
"""A sample is made of blocks of this size, spread evenly over the text."""
PIECE_CHARS = 131_072
"""Long documents are encoded in pieces of about this size, cut at a line's end, for threads to share."""
GROUP_CHARS = 4_000_000
"""Pieces are encoded in groups of about this size: enough for every thread, and little memory."""


def sample(texts: Iterable[str], total_chars: int) -> Iterator[str]:
    """Blocks that are spread evenly over `texts` and hold about SAMPLE_CHARS of their `total_chars`."""
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
    # A text that happens to hold END_OF_TEXT's own letters is text like any other. Not kept by `to_str`.
    tokenizer.encode_special_tokens = True
    return tokenizer


def count(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs for its tokens, whose numbers may have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type that holds every token id."""
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


def encode(
    tokenizer: Tokenizer, texts: Iterable[str], begin: Sequence[int] = (), end: int | None = None
) -> Iterator[tuple[int, npt.NDArray[np.unsignedinteger]]]:
    """Token ids of whole documents, in groups, each with `begin` before it and `end` (END_OF_TEXT) behind.

    Yields the number of characters and the ids of a group, on all cores (`RAYON_NUM_THREADS` limits them).
    Where a long document is cut into pieces, a tokenizer that looks further than a line makes a few other
    tokens.
    """
    dtype = token_dtype(count(tokenizer))
    before = np.array(begin, dtype=dtype)
    behind = np.array([tokenizer.token_to_id(END_OF_TEXT) if end is None else end], dtype=dtype)
    group: list[str] = []
    starts: set[int] = set()
    ends: set[int] = set()
    chars = 0

    def flush() -> tuple[int, npt.NDArray[np.unsignedinteger]]:
        parts: list[npt.NDArray[np.unsignedinteger]] = []
        for number, encoding in enumerate(tokenizer.encode_batch_fast(group, add_special_tokens=False)):
            if number in starts:
                parts.append(before)
            parts.append(np.array(encoding.ids, dtype=dtype))
            if number in ends:
                parts.append(behind)
        return chars, np.concatenate(parts)

    for text in texts:
        starts.add(len(group))
        for piece in pieces(text):
            group.append(piece)
            chars += len(piece)
            if chars >= GROUP_CHARS:
                # The end of this document is not known yet: its last piece stays for the next group.
                group, last = group[:-1], group[-1]
                chars -= len(last)
                if group:
                    yield flush()
                starts = {0} if len(group) in starts else set()
                group, ends, chars = [last], set(), len(last)
        ends.add(len(group) - 1)
    if group:
        yield flush()
