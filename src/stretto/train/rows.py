"""How documents become rows of batches: windows of all of them, kept apart if asked, or a document a row.

A batch is what `gpt.inputs_and_targets` and `positions_of` read. It follows from the seed and the step.

    windows            tokens (B, S + 1) of the text as one stream
    document masks     input_ids, labels, position_ids, (B, S) each: positions begin again with each document,
                       and what follows a document's end is no label of it
    buckets            input_ids, labels (B, L): a document a row, filled up to the bucket's length
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.config import DataSettings
from stretto.errors import UsageError
from stretto.models.gpt import IGNORED
from stretto.train.data import TokenDataset, Tokens, permute

Rows = Tensor | dict[str, Tensor]


def apart(tokens: Tensor, end: int) -> dict[str, Tensor]:
    """Windows (B, S + 1) whose documents are kept apart. end: the token behind each document."""
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    last = ids == end
    begins = torch.zeros_like(last)
    begins[:, 1:] = last[:, :-1]
    at = torch.arange(ids.shape[1]).expand_as(ids)
    begun = torch.where(begins, at, 0).cummax(dim=-1).values
    return {
        "input_ids": ids,
        "labels": labels.masked_fill(last, IGNORED),
        "position_ids": at - begun,
    }


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of the stream, with their documents apart where there is an `end`."""

    tokens: TokenDataset
    end: int | None

    def batch(self, step: int, global_batch: int) -> Rows:
        """As `TokenDataset.batch`."""
        tokens = self.tokens.batch(step, global_batch)
        return tokens if self.end is None else apart(tokens, self.end)


class Buckets:
    """A document a row, in buckets of documents that are about as long. One longer than the longest bucket is
    cut in rows that follow each other, each token but the first predicted in exactly one.

    In an epoch every row is visited once: the rows of a bucket in an order that the seed decides, cut into
    batches, and the batches of all buckets in another. The last batch of a bucket has the rows that are left.
    """

    def __init__(
        self, tokens: Tokens, end: int, lengths: Sequence[int], seed: int, multiple: int = 1
    ) -> None:
        """lengths: of buckets, ascending. multiple: of rows in a smaller batch, which is filled up with rows
        without labels. Raises UsageError for text without a document of two tokens."""
        self._tokens, self._lengths, self._seed, self._multiple = tokens, tuple(lengths), seed, multiple
        ends = np.flatnonzero(tokens == end).astype(np.int64) + 1
        if not len(ends) or ends[-1] < len(tokens):
            ends = np.append(ends, len(tokens))
        begins = np.concatenate([[0], ends[:-1]])
        starts, sizes = _rows(begins, ends - begins - 1, self._lengths[-1])
        if not len(sizes):
            raise UsageError("data.paths: no document of the text has two tokens, of which one is predicted")
        bucket = np.searchsorted(self._lengths, sizes)
        self._of = [np.flatnonzero(bucket == at) for at in range(len(self._lengths))]
        self._starts, self._sizes = starts, sizes

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows each bucket has."""
        return tuple(map(len, self._of))

    def batches(self, global_batch: int) -> int:
        """How many steps an epoch has."""
        return sum(-(-count // global_batch) for count in self.rows)

    def batch(self, step: int, global_batch: int) -> Rows:
        """The rows of a step, int64 (B, L) each; B is `global_batch`, or fewer in a bucket's last."""
        counts = [-(-count // global_batch) for count in self.rows]
        epoch, visit = divmod(step, sum(counts))
        place = int(permute(np.array([visit]), sum(counts), f"{self._seed}:{epoch}")[0])
        firsts = [0, *accumulate(counts)]
        bucket = next(at for at in range(len(counts)) if place < firsts[at + 1])
        first = (place - firsts[bucket]) * global_batch
        of = self._of[bucket]
        visits = np.arange(first, min(first + global_batch, len(of)), dtype=np.int64)
        rows = of[permute(visits, len(of), f"{self._seed}:{epoch}:{bucket}")]
        full = -(-len(rows) // self._multiple) * self._multiple
        ids = torch.zeros(full, self._lengths[bucket], dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED)
        for at, row in enumerate(rows):
            start, size = int(self._starts[row]), int(self._sizes[row])
            taken = torch.from_numpy(self._tokens[start : start + size + 1].astype(np.int64))
            ids[at, :size], labels[at, :size] = taken[:-1], taken[1:]
        return {"input_ids": ids, "labels": labels}


def example_of(settings: DataSettings) -> Callable[[int], Rows]:
    """global_batch -> a batch of the largest shape, on "meta"."""

    def example(rows: int) -> Rows:
        def leaf(columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=torch.int64, device="meta")

        names = ["input_ids", "labels", *(["position_ids"] if settings.document_masks else [])]
        if not settings.bucket_lengths and not settings.document_masks:
            return leaf(settings.sequence_length + 1)
        return {name: leaf(settings.sequence_length) for name in names}

    return example


Numbers = npt.NDArray[np.int64]


def _rows(begins: Numbers, sizes: Numbers, longest: int) -> tuple[Numbers, Numbers]:
    """Where rows begin, and how many tokens of each are predicted. sizes: of documents."""
    pieces = -(-sizes // longest)  # none of a document of one token
    document = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = begins[document] + number * longest
    return starts, np.minimum(longest, sizes[document] - number * longest)
