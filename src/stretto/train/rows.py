"""How documents become rows of batches: windows of all of them, kept apart if asked, or a document a row.

A batch is what `gpt.inputs_and_targets` and `positions_of` read. It follows from the seed and the numbers of
its visits, which follow from the step.

    windows            tokens (B, S + 1) of the text as one stream
    document masks     input_ids, labels, position_ids, (B, S) each: positions begin again with each document,
                       and what follows a document's end is no label of it
    document rows      input_ids, labels (B, L): a document a row, filled up; or several that fit, with masks
    buckets            the same, the rows of a step filled up to the length of one bucket
    mixed              rows of several of these, by weights
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.config import DataSettings, TrainSettings
from stretto.errors import UsageError
from stretto.models.gpt import IGNORED
from stretto.train.data import TokenDataset, Tokens, order_of, permute

Rows = Tensor | dict[str, Tensor]
Numbers = npt.NDArray[np.int64]
RowsOf = Callable[[Numbers], Rows]
"""Numbers of visits, which ascend -> their rows."""


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

    def rows(self, visits: Numbers) -> Rows:
        """As `TokenDataset.rows`."""
        tokens = self.tokens.rows(visits)
        return tokens if self.end is None else apart(tokens, self.end)


@dataclass(frozen=True, slots=True)
class Table:
    """Documents: ids, which of them are predicted (None: all), and where in them each begins and ends."""

    tokens: Tokens
    counts: npt.NDArray[np.uint8] | None
    begins: Numbers
    ends: Numbers

    def only(self, chosen: npt.NDArray[np.bool_]) -> Table:
        """The same with some of the documents."""
        return replace(self, begins=self.begins[chosen], ends=self.ends[chosen])


def table_of(tokens: Tokens, end: int) -> Table:
    """The documents of a text. end: the token behind each."""
    ends = np.flatnonzero(tokens == end).astype(np.int64) + 1
    if not len(ends) or ends[-1] < len(tokens):
        ends = np.append(ends, len(tokens))
    return Table(tokens, None, np.concatenate([[0], ends[:-1]]), ends)


Together = Literal["each", "packed", "joined"]


class DocumentRows:
    """Rows of documents, filled up to a length. One that is longer is cut in rows that follow each other,
    each token but the first predicted in exactly one. Rows of which no token is predicted are left out."""

    def __init__(
        self,
        table: Table,
        length: int,
        seed: int | str,
        how: Together = "each",
        what: str = "data.paths",
    ) -> None:
        """how: each document has a row; or as many full ones as fit have one, apart by positions; or all are
        one. Raises UsageError, which begins with `what`, where nothing is predicted."""
        self._table, self._length, self._seed, self._packed = table, length, seed, how == "packed"
        begins, ends = table.begins, table.ends
        if how == "joined" and len(begins):
            apart = np.flatnonzero(begins[1:] != ends[:-1])
            begins, ends = begins[[0, *(apart + 1)]], ends[[*apart, -1]]
        elif how == "packed":
            rows: list[list[int]] = []
            for begin, end in zip(begins.tolist(), ends.tolist()):
                if rows and rows[-1][1] == begin and end - rows[-1][0] - 1 <= length:
                    rows[-1][1] = end
                else:
                    rows.append([begin, end])
            begins, ends = np.array(rows, dtype=np.int64).reshape(-1, 2).T
        starts, sizes = _rows(begins, ends - begins - 1, length)
        if (counts := table.counts) is not None:
            kept = [bool(counts[at + 1 : at + size + 1].any()) for at, size in zip(starts, sizes)]
            starts, sizes = starts[kept], sizes[kept]
        if not len(sizes):
            raise UsageError(f"{what}: no document of the text has two tokens, of which one is predicted")
        self._starts, self.sizes = starts, sizes

    def rows(self, visits: Numbers) -> dict[str, Tensor]:
        """The rows of visits 0, 1, 2, ..., of one epoch after another."""
        return self.filled(order_of(visits, len(self.sizes), self._seed), len(visits), self._length)

    def filled(self, chosen: Numbers, count: int, length: int) -> dict[str, Tensor]:
        """Some of the rows, and others without labels, `count` in all: int64 (count, length) each."""
        table = self._table
        ids = torch.zeros(count, length, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED)
        at = np.tile(np.arange(length), (count, 1))
        for row, (start, size) in enumerate(zip(self._starts[chosen].tolist(), self.sizes[chosen].tolist())):
            taken = torch.from_numpy(table.tokens[start : start + size + 1].astype(np.int64))
            ids[row, :size], labels[row, :size] = taken[:-1], taken[1:]
            if table.counts is not None:
                predicted = torch.from_numpy(table.counts[start + 1 : start + size + 1] != 0)
                labels[row, :size].masked_fill_(~predicted, IGNORED)
            if self._packed:
                first, last = np.searchsorted(table.begins, [start + 1, start + size + 1])
                inner = table.begins[first:last] - start
                labels[row, inner - 1] = IGNORED
                begun = np.zeros(length, dtype=np.int64)
                begun[inner[inner < length]] = inner[inner < length]
                at[row] -= np.maximum.accumulate(begun)
        return {"input_ids": ids, "labels": labels} | (
            {"position_ids": torch.from_numpy(at)} if self._packed else {}
        )


class Buckets:
    """A document a row, in buckets of documents that are about as long.

    In an epoch every row is visited once: the rows of a bucket in an order that the seed decides, cut into
    batches, and the batches of all buckets in another. The last batch of a bucket has the rows that are left.
    """

    def __init__(self, table: Table, lengths: Sequence[int], seed: int, multiple: int = 1) -> None:
        """lengths: of buckets, ascending. multiple: of rows in a smaller batch, which is filled up with rows
        without labels. Raises UsageError for text without a document of two tokens."""
        self._lengths, self._seed, self._multiple = tuple(lengths), seed, multiple
        self._documents = DocumentRows(table, self._lengths[-1], seed)
        bucket = np.searchsorted(self._lengths, self._documents.sizes)
        self._of = [np.flatnonzero(bucket == at) for at in range(len(self._lengths))]

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
        return self._documents.filled(rows, full, self._lengths[bucket])


def shares(numbers: Numbers, weights: Sequence[float]) -> tuple[Numbers, Numbers]:
    """Of which source each row is, and which visit of it: of any rows that follow each other, each source has
    its share to within one a source. The first is taken evenly, then the second of the others' rows."""
    source, visits = np.zeros_like(numbers), numbers.copy()
    exact = [Fraction(weight).limit_denominator(10**6) for weight in weights]
    for at in range(len(weights) - 1):
        share = exact[at] / sum(exact[at:])
        here, exact_visits = source == at, visits.astype(object)  # of any size: a share's terms may be large
        before, behind = (
            ((exact_visits + more) * share.numerator // share.denominator).astype(np.int64) for more in (0, 1)
        )
        rest = here & (behind == before)
        source[rest], visits[rest] = at + 1, visits[rest] - before[rest]
        visits[here & ~rest] = before[here & ~rest]
    return source, visits


def mixed(sources: Sequence[RowsOf], weights: Sequence[float], lengths: Sequence[int]) -> RowsOf:
    """Rows of several sources, input_ids and labels (and position_ids), filled up to the least of `lengths`
    that the longest of them needs."""

    def rows(numbers: Numbers) -> Rows:
        source, visits = shares(numbers, weights)
        made: dict[str, Tensor] = {}
        for at in np.unique(source).tolist():
            found = sources[at](visits[source == at])
            if isinstance(found, Tensor):
                found = {"input_ids": found[:, :-1], "labels": found[:, 1:]}
            for name, leaf in found.items():
                made.setdefault(name, torch.zeros(len(numbers), leaf.shape[1], dtype=torch.int64))
                made[name][torch.from_numpy(source == at)] = leaf
        used = torch.nonzero((made["labels"] != IGNORED).any(0))[-1].item() + 1
        length = next(one for one in lengths if one >= used)
        return {name: leaf[:, :length].contiguous() for name, leaf in made.items()}

    return rows


def by_step(rows: RowsOf) -> Callable[[int, int], Rows]:
    """Batches: each step has the visits that follow those of the step before."""
    return lambda step, rows_of_step: rows(
        np.arange(step * rows_of_step, (step + 1) * rows_of_step, dtype=np.int64)
    )


def batches_of(settings: TrainSettings, rows: RowsOf, table: Table | None) -> Callable[[int, int], Rows]:
    """Batches to train on. table: of documents for buckets, of which a smaller last batch has microbatches of
    the same rows, and fewer."""
    data = settings.data
    if table is None or not data.bucket_lengths:
        return by_step(rows)
    lengths = sorted({*data.bucket_lengths, data.sequence_length})
    multiple = settings.training.global_batch // settings.parallel.microbatches
    return Buckets(table, lengths, data.seed, multiple).batch


def example_of(settings: DataSettings) -> Callable[[int], Rows]:
    """global_batch -> a batch of the largest shape, on "meta"."""

    def example(rows: int) -> Rows:
        def leaf(columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=torch.int64, device="meta")

        names = ["input_ids", "labels", *(["position_ids"] if settings.document_masks else [])]
        if settings.is_windows and not settings.document_masks:
            return leaf(settings.sequence_length + 1)
        return {name: leaf(settings.sequence_length) for name in names}

    return example


def _rows(begins: Numbers, sizes: Numbers, longest: int) -> tuple[Numbers, Numbers]:
    """Where rows begin, and how many tokens of each are predicted. sizes: of documents."""
    pieces = -(-sizes // longest)  # none of a document of one token
    document = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = begins[document] + number * longest
    return starts, np.minimum(longest, sizes[document] - number * longest)
