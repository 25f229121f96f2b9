"""Rows that are read when they are needed: of a `datasets.IterableDataset`, or of what else can be iterated.

    1. Some rows at a time are read, a block, and become documents; those that are held out are dropped.
    2. The rows of a block are visited in an order that the seed and the number of the block decide.
    3. At the end of the stream it begins again.

So a row is a function of its number, the same on every rank. A checkpoint has where the block begins:
the dataset's own state (`state_dict()`), or, where it has none, how many rows are to be passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from stretto.config.data import SourceSettings
from stretto.errors import StrettoError, UsageError
from stretto.train.records import Record
from stretto.train.rows import DocumentRows, Numbers, Rows

Block = Callable[[Sequence[Record], int], DocumentRows | None]
"""Rows as they were read, and the number of their block -> the rows to train on, if any."""


class RowStream:
    """The rows of a stream by their numbers, which ascend from call to call; a step back begins again."""

    def __init__(self, begin: Callable[[], Any], block: Block, size: int, key: str) -> None:
        """begin: gives the stream from its beginning. size: rows of a block. key: of the settings."""
        self._begin, self._block, self._size, self.key = begin, block, size, key
        self.restore({})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`; an empty one is the beginning."""
        self.state: dict[str, Any] = {"first": 0, "block": 0, "read": 0, "inner": None, **state}
        """Where this block begins: the number of its first row; its own; rows of the stream before it, since
        that last began; the stream's own state."""
        self._rows: DocumentRows | None = None
        self._left: Iterator[Any] | None = None
        self._begun = -1

    def rows(self, visits: Numbers) -> Rows:
        """The rows of these visits. Raises StrettoError for a stream that cannot be read."""
        if visits[0] < self.state["first"]:
            self.restore({})
        made: list[dict[str, torch.Tensor]] = []
        while len(visits):
            rows, first = self._loaded(), self.state["first"]
            within = visits < first + len(rows.sizes)
            if within.any():
                made.append(rows.rows(visits[within] - first))
            visits = visits[~within]
            if len(visits):
                self._pass(len(rows.sizes))
        return {name: torch.cat([one[name] for one in made]) for name in made[0]}

    def _loaded(self) -> DocumentRows:
        """The rows of this block, or of the next that has some."""
        while self._rows is None:
            before = self.state["read"]
            if self._left is None:
                self._source, passed = self._begin(), before
                if self.state["inner"] is not None:
                    self._source.load_state_dict(self.state["inner"])
                    passed = 0
                self._left = islice(read(self._source, self.key), passed, None)
            rows = list(islice(self._left, self._size))
            if rows:
                records = [(f"{self.key}.stream, row {before + n}", row) for n, row in enumerate(rows)]
                self._rows, self._read = self._block(records, self.state["block"]), len(rows)
                if self._rows is None:
                    self._pass(0)
            elif self._begun == self.state["first"]:
                raise UsageError(f"{self.key}.stream has no row to train on")
            else:
                self._begun, self._left = self.state["first"], None
                self.state = {**self.state, "read": 0, "inner": None}
        return self._rows

    def _pass(self, rows: int) -> None:
        """Go behind this block, which has so many rows."""
        inner = self._source.state_dict() if hasattr(self._source, "load_state_dict") else None
        first, block, read = (self.state[name] for name in ("first", "block", "read"))
        self.state = {"first": first + rows, "block": block + 1, "read": read + self._read, "inner": inner}
        self._rows = None


def read(rows: Iterable[Any], key: str) -> Iterator[Any]:
    """The rows of a stream. Raises StrettoError where it ends in an error."""
    try:
        yield from rows
    except StrettoError:
        raise
    except Exception as error:  # of a library, of the network, or of what it has of a file
        raise StrettoError(f"{key}.stream cannot be read: {error}; see to it, and resume") from None


def opened(source: SourceSettings, key: str) -> Any:
    """The stream that settings name. Raises UsageError where `datasets` is absent, or finds nothing."""
    try:
        import datasets
    except ImportError:
        raise UsageError(f"{key}.stream needs datasets: pip install 'stretto[datasets]'") from None
    files = {"data_files": source.paths} if source.paths else {}
    try:
        return datasets.load_dataset(
            source.stream, source.subset, split=source.split, streaming=True, **files
        )
    except Exception as error:  # whatever files of others, or the network, make of it
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{key}.stream = {source.stream!r}: datasets cannot open it: {line}; name a dataset of the Hub, "
            'a folder, or "json", "parquet" or "text" with its files in paths'
        ) from None
