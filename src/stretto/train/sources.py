"""From the settings of data to rows: one source or several, of text, chats, pairs, ids, or streams of them.

Rows of .jsonl and .parquet become tokens once, which are kept as those of text are. Files of nothing but ids
(.npy; .bin of 2 bytes an id, of 4 where the vocabulary is larger) are mapped where they are.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from stretto.config import TrainSettings
from stretto.config.data import SourceSettings
from stretto.errors import UsageError
from stretto.files.kept import cache_dir
from stretto.files.say import Say
from stretto.models.gpt import inputs_and_targets
from stretto.train import data as cache
from stretto.train.encode import GivenTokenizer, count, token_dtype
from stretto.train.records import Document, Record, columns_of, encoder_of, records_in
from stretto.train.rows import DocumentRows, Rows, RowsOf, Table, Together, Windows, mixed, table_of
from stretto.train.stream import RowStream, opened, read
from stretto.train.text import TextFile, find_files

FLAT = (".npy", ".bin")
"""Suffixes of files of nothing but ids."""
GROUP = 512
"""Rows that are made into tokens together. Assumed: enough for every thread."""
SEEN, SEEN_IDS = 64, 1 << 18
"""The digest of such a file is of so many blocks, of so many ids, taken evenly."""


@dataclass(frozen=True, slots=True)
class Source:
    """What rows are of. digest: equal for equal data, wherever it is. table: documents that may have
    a row each. tokenizer: None for ids without one. streams: by what they are of, wherever that is.
    unigram_entropy_nats: as `TextData` has it."""

    train: RowsOf
    held_out: RowsOf
    digest: str
    where: str
    tokenizer: Tokenizer | None
    table: Table | None = None
    streams: Mapping[str, RowStream] = field(default_factory=dict)
    unigram_entropy_nats: float | None = None


class Sources:
    """Makes what settings describe."""

    def __init__(self, settings: TrainSettings, given: GivenTokenizer | None, say: Say, begin: Say) -> None:
        """given: the tokenizer, where none is learned. say, begin: as in `prepare_data`."""
        self._data, self._given, self._say, self._begin = settings.data, given, say, begin
        self._measured_rows = settings.training.global_batch * settings.training.eval_batches
        self._tokenizer = None if given is None else given.tokenizer
        self._vocab_size = settings.data.vocab_size if given is None else count(given.tokenizer)

    def all(self) -> Source:
        """All sources as one. Raises UsageError for files that cannot be read, that have too little, or other
        rows than settings say."""
        data = self._data
        made = [self._one(one, key) for key, one, _ in data.each]
        weights, longest = [weight for _, _, weight in data.each], data.sequence_length
        if len(made) == 1 and not (made[0].streams and data.bucket_lengths):
            return made[0]
        train = mixed([one.train for one in made], weights, sorted({*data.bucket_lengths, longest}))
        held_out = mixed([one.held_out for one in made], weights, [longest])
        digest, where = (" ".join(getattr(one, name) for one in made) for name in ("digest", "where"))
        streams = {of: stream for one in made for of, stream in one.streams.items()}
        return Source(train, held_out, _digest(digest), where, self._tokenizer, streams=streams)

    def _one(self, one: SourceSettings, key: str) -> Source:
        if one.stream is not None:
            return self._stream(one, key)
        if one.kind == "text":
            return self._text(one)
        files = find_files(one.paths)
        flat = [file.path.suffix.lower() in FLAT for file in files]
        if one.kind != "tokens" or not any(flat):
            return self._kept(one, files, key)
        if not all(flat) or self._data.bucket_lengths or self._data.document_masks:
            raise UsageError(
                f"{key}.paths: files of nothing but ids ({', '.join(FLAT)}) have no documents: give "
                ".jsonl or .parquet beside data.document_masks, data.bucket_lengths and other such files"
            )
        return self._flat([self._mapped(file.path, key) for file in files], key)

    def _text(self, one: SourceSettings) -> Source:
        data = self._data
        own = data.model_copy(update={"paths": one.paths, "text_field": one.text_field})
        text = cache.prepare_data(own, self._say, self._given, self._begin)
        end = text.end if data.document_masks else None
        sides = Windows(text.train, end).rows, Windows(text.held_out, end).rows
        entropy = text.unigram_entropy_nats
        made = Source(*sides, text.digest, str(text.folder), text.tokenizer, unigram_entropy_nats=entropy)
        if not data.bucket_lengths:
            return made
        table = table_of(text.train.tokens, text.end)
        train = DocumentRows(table, data.sequence_length, data.seed, "each", "data")
        return replace(made, table=table, train=train.rows)

    def _together(self, one: SourceSettings, is_all_predicted: bool) -> Together:
        """Texts, and ids without labels, are one; what comes before a text, and is not predicted, is too."""
        if self._data.document_masks:
            return "packed"
        is_one = one.kind == "text" or (one.kind == "tokens" and is_all_predicted)
        return "joined" if is_one and not self._data.bucket_lengths else "each"

    # Rows that are kept.

    def _kept(self, one: SourceSettings, files: Sequence[TextFile], key: str) -> Source:
        data, given = self._data, self._given
        parts: list[object] = [cache.CACHE_FORMAT, columns_of(one), data.held_out_fraction, self._vocab_size]
        parts += [(str(file.path.resolve()), file.bytes, file.mtime_ns) for file in files]
        if given is not None:
            template = str(getattr(given.of_transformers, "chat_template", None))
            parts += [given.tokenizer.to_str(), given.begin, given.end, template]
        where = Path(data.cache_dir).expanduser() if data.cache_dir is not None else cache_dir()
        name = f"{one.kind}-{_digest(json.dumps(parts))}"
        folder = cache.built_folder(where, name, partial(self._build, one, files, key), self._say)
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        counts, ends, held_out = (np.load(folder / f"{name}.npy") for name in ("counts", "ends", "held_out"))
        table = Table(tokens, counts if len(counts) else None, np.concatenate([[0], ends[:-1]]), ends)
        train, rest = table.only(~held_out), table.only(held_out)
        self._say(f"{key}: {len(train.ends):,} rows to train on, {len(rest.ends):,} held out, in {folder}")
        how, length = self._together(one, table.counts is None), data.sequence_length
        rows, kept = (
            DocumentRows(of, length, seed, how, key).rows for of, seed in ((train, data.seed), (rest, 0))
        )
        digest = _digest((folder / cache.MANIFEST).read_text())
        return Source(rows, kept, digest, str(folder), self._tokenizer, train)

    def _build(self, one: SourceSettings, files: Sequence[TextFile], key: str, folder: Path) -> None:
        """Write the table, and which of its documents are held out."""
        fraction = self._data.held_out_fraction
        self._begin(f"making tokens of the rows of {len(files):,} files")
        records = records_in([file.path for file in files], one, key)
        groups = iter(lambda: list(islice(records, GROUP)), [])
        encode = encoder_of(one, self._given, key)
        table, draws = self._tabled(chain.from_iterable(map(encode, groups)), key)
        held_out = draws < fraction
        if len(draws) * fraction < cache.MIN_HELD_OUT_DOCUMENTS:  # by chance it might be none
            held_out = np.arange(len(draws)) >= len(draws) - max(1, round(len(draws) * fraction))
        if held_out.all():
            raise UsageError(f"{key}.paths: {len(draws)} rows are too few to keep one out: give two or more")
        counts = np.empty(0, np.uint8) if table.counts is None else table.counts
        arrays = {"tokens": table.tokens, "ends": table.ends, "held_out": held_out, "counts": counts}
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)

    def _tabled(self, documents: Iterable[Document], key: str) -> tuple[Table, npt.NDArray[np.float64]]:
        """A table of documents, and a number from 0 to 1 for each, the same for the same ids."""
        dtype = token_dtype(self._vocab_size)
        ids, counts, draws = [np.empty(0, dtype)], [np.empty(0, np.uint8)], []
        for one, predicted in documents:
            wide = np.asarray(one, np.int64)
            self._refuse_unknown(wide, key)
            ids.append(wide.astype(dtype))
            counts.append(np.asarray(predicted, np.uint8))
            drawn = hashlib.blake2b(wide.tobytes(), digest_size=8).digest()
            draws.append(int.from_bytes(drawn, "little") / 2**64)
        ends, marks = np.cumsum([*map(len, ids)]), np.concatenate(counts)
        tokens: cache.Tokens = np.concatenate(ids)
        return Table(tokens, None if marks.all() else marks, ends[:-1], ends[1:]), np.array(draws)

    def _refuse_unknown(self, ids: npt.NDArray[np.int64], key: str) -> None:
        if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab_size):
            raise UsageError(
                f"{key}: there are ids from {ids.min()} to {ids.max()}, and {self._vocab_size} tokens: name "
                "the tokenizer that made them (data.tokenizer), or set data.vocab_size"
            )

    # Files of ids.

    def _mapped(self, path: Path, key: str) -> cache.Tokens:
        is_npy = path.suffix.lower() == ".npy"
        try:
            ids: cache.Tokens = (
                np.load(path, "r") if is_npy else np.memmap(path, token_dtype(self._vocab_size), "r")
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"{key}.paths: {path} cannot be read as ids: {error}") from None
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            what = f"{ids.dtype} of shape {list(ids.shape)}"
            raise UsageError(f"{key}.paths: {path} has {what}: give integers in one dim")
        return ids

    def _flat(self, files: list[cache.Tokens], key: str) -> Source:
        """The end of each file is held out; windows go over none, and files are read evenly."""
        length, fraction = self._data.sequence_length, self._data.held_out_fraction

        def side(parts: list[cache.Tokens], seed: int) -> RowsOf:
            windows = [cache.TokenDataset(one, length, seed) for one in parts if len(one) > length]
            if not windows:
                raise UsageError(
                    f"{key}.paths: no file has {length + 1} ids to train on, and as many to keep out (data."
                    f"held_out_fraction = {fraction}): give longer ones, or set data.sequence_length lower"
                )
            rows = mixed([one.rows for one in windows], [one.windows for one in windows], [length])

            def known(visits: npt.NDArray[np.int64]) -> Rows:
                made = rows(visits)
                for ids in inputs_and_targets(made):
                    self._refuse_unknown(ids.numpy(), key)
                return made

            return known

        seen = ((one, at) for one in files for at in range(0, len(one), max(SEEN_IDS, len(one) // SEEN)))
        sums = [(len(one), zlib.crc32(one[at : at + SEEN_IDS].tobytes())) for one, at in seen]
        cuts = [round(len(one) * (1 - fraction)) for one in files]
        train = side([one[:cut] for one, cut in zip(files, cuts)], self._data.seed)
        held_out = side([one[cut:] for one, cut in zip(files, cuts)], 0)
        return Source(train, held_out, _digest(json.dumps(sums)), f"{key}.paths", self._tokenizer)

    # Streams.

    def _stream(self, one: SourceSettings, key: str) -> Source:
        fraction, encode = self._data.held_out_fraction, encoder_of(one, self._given, key)
        self._begin(f"reading rows of {key}.stream to keep out")

        def side(rows: Sequence[Record], is_held_out: bool) -> list[Document]:
            made = encode(rows)
            draws = self._tabled(made, key)[1] < fraction
            return [document for document, is_out in zip(made, draws) if is_out == is_held_out]

        def block(rows: Sequence[Record], number: int) -> DocumentRows | None:
            table, _ = self._tabled(side(rows, is_held_out=False), key)
            try:
                return DocumentRows(table, length, f"{self._data.seed}:{number}", how, key)
            except UsageError:
                return None  # nothing of it is predicted

        kept: list[Document] = []
        rows = enumerate(read(opened(one, key), key))
        records = ((f"{key}.stream, row {number}", row) for number, row in rows)
        while len(kept) < self._measured_rows and (group := list(islice(records, GROUP))):
            kept += side(group, is_held_out=True)
        if not kept:
            raise UsageError(f"{key}.stream: none of its rows is held out: set data.held_out_fraction higher")
        how, length = self._together(one, all(all(counts) for _, counts in kept)), self._data.sequence_length
        held_out = DocumentRows(self._tabled(kept, key)[0], length, 0, how, key).rows
        stream = RowStream(partial(opened, one, key), block, one.shuffled_rows, key)
        where, digest = f"{key}.stream = {one.stream!r}", _digest(json.dumps(kept))
        of = _digest(json.dumps([one.kind, one.subset, one.split, kept[0]]))
        return Source(stream.rows, held_out, digest, where, self._tokenizer, streams={of: stream})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]
