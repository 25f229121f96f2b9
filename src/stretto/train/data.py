"""From settings to data: text becomes tokens once, and is kept for the next run.

    1. list the files; their names, sizes and times, and the settings, name the cache
    2. if the cache is complete, go to 7
    3. count the documents, and choose how to hold some text out
    4. learn a tokenizer from a sample of the training text, unless the model brings one
    5. write the tokens of both sides
    6. measure the unigram entropy
    7. map the tokens into memory

The cache is a folder that is built once and then reused, by any number of processes at once. It is built
beside its path and renamed, under a lock, so that what is there is complete. A manifest of sizes and
checksums shows damage. Nothing is downloaded; text is read by `stretto.train.text`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from stretto.config import DataSettings
from stretto.errors import StrettoError, UsageError
from stretto.files.kept import cache_dir
from stretto.files.parse import parse_json
from stretto.files.say import Say, unheard
from stretto.train import tokenizer as bpe
from stretto.train.dataset import TokenDataset, Tokens, unigram_entropy
from stretto.train.text import TextFile, documents, find_files
from stretto.train.tokenizer import GivenTokenizer, learned

CACHE_FORMAT = 1
"""Part of the cache's name; raised when the files in it, or the way that they are made, change."""
MIN_HELD_OUT_DOCUMENTS = 8
"""With fewer than this to hold out, documents are too coarse: their ends are held out instead."""
FILES = ("tokenizer.json", "train.npy", "held_out.npy")
"""What a run reads."""
PROGRESS_S = 2.0
"""Seconds between two lines of progress."""
MANIFEST = "manifest.json"
READ_BYTES = 1 << 20
"""How much is read at once for a checksum."""


@dataclass(frozen=True, slots=True)
class TextData:
    """Tokens to train on, tokens held out, and the tokenizer that made them."""

    tokenizer: Tokenizer
    train: TokenDataset
    held_out: TokenDataset
    """Its batches do not depend on `data.seed`: the same text gives the same held-out loss."""
    folder: Path
    """Where the tokens are kept."""
    digest: str
    """Equal for equal tokens and tokenizers, wherever they are kept."""
    unigram_entropy_nats: float
    """What the held-out loss would be, a token, from token frequencies alone."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are; little text gives fewer than were asked for."""
        return bpe.count(self.tokenizer)


def prepare_data(settings: DataSettings, say: Say, given: GivenTokenizer | None = None) -> TextData:
    """The data that the settings describe; the first time, its text is made into tokens, which is kept.

    given: the tokenizer, where none is to be learned. Safe to call from every rank at once: one does the
    work, and the others wait. `say` takes lines of progress and notices. Raises UsageError for text that
    cannot be read or is too short, and StrettoError when the disk is full.
    """
    files = find_files(settings.paths)
    folder = built_folder(
        Path(settings.cache_dir).expanduser() if settings.cache_dir is not None else cache_dir(),
        _cache_key(files, settings, given),
        lambda folder: _build(folder, files, settings, given, say),
        say,
    )
    train = np.load(folder / "train.npy", mmap_mode="r")
    held_out = np.load(folder / "held_out.npy", mmap_mode="r")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    length = settings.sequence_length
    say(
        f"data: {summary['documents']:,} documents, {len(train):,} tokens to train on and {len(held_out):,} "
        f"held out, in {folder}"
    )
    return TextData(
        tokenizer=bpe.parse((folder / "tokenizer.json").read_text(encoding="utf-8")),
        train=TokenDataset(train, length, settings.seed, "the text to train on"),
        held_out=TokenDataset(held_out, length, 0, "the held-out text"),
        folder=folder,
        digest=contents(folder, FILES),
        unigram_entropy_nats=float(summary["unigram_entropy_nats"]),
    )


def _cache_key(files: Sequence[TextFile], settings: DataSettings, given: GivenTokenizer | None) -> str:
    parts: dict[str, object] = {
        "format": CACHE_FORMAT,
        "tokenizers": tokenizers.__version__,
        "vocab_size": settings.vocab_size,
        "held_out_fraction": settings.held_out_fraction,
        "text_field": settings.text_field,
        "files": [(str(file.path.resolve()), file.bytes, file.mtime_ns) for file in files],
    }
    if given is not None:
        parts["tokenizer"] = (given.tokenizer.to_str(), given.begin, given.end)
    return "text-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _build(
    folder: Path, files: Sequence[TextFile], settings: DataSettings, given: GivenTokenizer | None, say: Say
) -> None:
    """Steps 3 to 6: write tokenizer.json, train.npy, held_out.npy and summary.json into `folder`."""
    fraction = settings.held_out_fraction
    say(f"reading {len(files):,} files, {sum(file.bytes for file in files) / 1e6:.1f} MB")
    lengths = [len(text) for text in documents(files, settings.text_field, say)]
    chars = sum(lengths)
    if not chars:
        raise UsageError(f"data.paths: there is no text in {', '.join(settings.paths)}")
    by_document = len(lengths) * fraction >= MIN_HELD_OUT_DOCUMENTS
    if not by_document:
        say(f"only {len(lengths)} documents: the last {fraction:.1%} of each is held out")

    def side(held_out: bool) -> Iterator[str]:
        for text in documents(files, settings.text_field, unheard):  # the first reading gave its notices
            train, held = _divide(text, fraction, by_document)
            part = held if held_out else train
            if part:
                yield part

    train_chars = round(chars * (1 - fraction))
    if given is None:
        say(f"learning {settings.vocab_size:,} tokens from {min(bpe.SAMPLE_CHARS, train_chars) / 1e6:.1f} MB")
        tokenizer = bpe.learn(bpe.sample(side(held_out=False), train_chars), settings.vocab_size)
        given = learned(tokenizer)
    else:
        tokenizer = given.tokenizer
    progress = _Progress(chars, say)
    train = _write_tokens(folder / "train.npy", given, side(held_out=False), progress)
    held_out = _write_tokens(folder / "held_out.npy", given, side(held_out=True), progress)
    if not len(train) or not len(held_out):
        raise UsageError(f"data.paths: the text, {chars} characters, is too short to hold out {fraction:.1%}")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    summary = {
        "documents": len(lengths),
        "unigram_entropy_nats": unigram_entropy(train, held_out, bpe.count(tokenizer)),
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def _divide(text: str, fraction: float, by_document: bool) -> tuple[str, str]:
    """A document's part to train on and its part held out; one of them is empty where documents are not cut.

    A hash of the document itself decides, so that of two equal documents none is trained on while the
    other is held out.
    """
    if by_document:
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
        held = int.from_bytes(digest, "little") < fraction * 2**64
        return ("", text) if held else (text, "")
    cut = round(len(text) * (1 - fraction))
    line_end = text.find("\n", cut) + 1
    # A line is not cut, if that does not take most of what was to be held out.
    if line_end and 2 * (len(text) - line_end) >= len(text) - cut:
        cut = line_end
    return text[:cut], text[cut:]


class _Progress:
    """Says now and then how much of the text is done."""

    def __init__(self, total_chars: int, say: Say) -> None:
        self.total_chars, self.say = total_chars, say
        self.done_chars = 0
        self.said_s = time.monotonic()

    def add(self, chars: int) -> None:
        self.done_chars += chars
        if time.monotonic() - self.said_s >= PROGRESS_S:
            self.said_s = time.monotonic()
            self.say(f"tokens: {self.done_chars / 1e6:.1f} of {self.total_chars / 1e6:.1f} MB of text")


def _write_tokens(path: Path, given: GivenTokenizer, texts: Iterator[str], progress: _Progress) -> Tokens:
    """Write the tokens of `texts` as a .npy, group by group, and map it; it may be larger than memory."""
    dtype = bpe.token_dtype(bpe.count(given.tokenizer))
    count = 0
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (0,)})
        header_bytes = file.tell()
        for chars, ids in bpe.encode(given.tokenizer, texts, given.begin, given.end):
            file.write(ids.tobytes())
            count += len(ids)
            progress.add(chars)
        # NumPy pads headers so that the first dim can grow in place.
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (count,)})
        assert file.tell() == header_bytes
    if count == 0:
        return np.empty(0, dtype=dtype)  # There is nothing to map in such a file.
    tokens: Tokens = np.load(path, mmap_mode="r")
    return tokens


# The cache.


def built_folder(cache_dir: Path, key: str, build: Callable[[Path], None], say: Say) -> Path:
    """The folder `cache_dir/key`; when it is absent or damaged, `build(folder)` first writes its files.

    One process builds and the others wait. A damaged folder is built anew, which `say` reports. Raises
    StrettoError when the disk is full, UsageError when `cache_dir` cannot be written; other errors of
    `build` go through. Nothing half-built stays.
    """
    target = cache_dir / key
    # Looked at without the lock first, so that a cache can be used by those who may not write it.
    if fault(target) is None:
        return target
    partial = cache_dir / f"{key}.partial"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache_dir / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting for another process that prepares {target}")
            lock.acquire()
        try:
            damage = fault(target)
            if damage is None:
                return target
            if target.exists():
                say(f"{target} is damaged ({damage}); it is built anew")
                shutil.rmtree(target)
            shutil.rmtree(partial, ignore_errors=True)  # Left by a process that was killed.
            partial.mkdir()
            build(partial)
            _write_manifest(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.release()
    except OSError as error:
        raise _explained(error, cache_dir) from error
    return target


def fault(folder: Path) -> str | None:
    """What is wrong with a built folder, or None when every file is as it was written."""
    try:
        files = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, (size_bytes, checksum) in files.items():
            path = folder / name
            found_bytes = path.stat().st_size
            if found_bytes != size_bytes:
                return f"{name} has {found_bytes} bytes, not {size_bytes}"
            if _checksum(path) != checksum:
                return f"the bytes of {name} have changed"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def contents(folder: Path, names: Sequence[str]) -> str:
    """A digest of what is in these files of a built folder, by its manifest; equal wherever it is."""
    files = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps([files[name] for name in names]).encode()).hexdigest()[:16]


def _write_manifest(folder: Path) -> None:
    files = {path.name: (path.stat().st_size, _checksum(path)) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _explained(error: OSError, cache_dir: Path) -> StrettoError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StrettoError(
            f"{cache_dir}: the disk is full, and the tokens of the text cannot be kept there; "
            "free some space, or set data.cache_dir to a folder on another disk"
        )
    return UsageError(
        f"data.cache_dir: {cache_dir} cannot be used ({error.strerror or error}); set it to a folder that "
        "you may write"
    )
