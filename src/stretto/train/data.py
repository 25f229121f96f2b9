"""From settings to data: text becomes tokens once, which are kept for the next run; and batches of them.

    1. list the files; their names, sizes and times, and the settings, name the cache
    2. if the cache is complete, go to 7
    3. count the documents, and choose how to keep some text out
    4. learn a tokenizer from a sample of the training text, unless the model brings one
    5. write the tokens of both sides
    6. measure the unigram entropy
    7. map the tokens into memory

The cache is a folder that is built once and then reused, by any number of processes at once. It is built
beside its path and renamed, under a lock, so that what is there is complete. A manifest of sizes and
checksums shows damage. Nothing is downloaded; text is read by `stretto.train.text`. A batch is a pure
function of the seed and the step, so that resuming needs no state.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from filelock import FileLock, Timeout
from tokenizers import Tokenizer
from torch import Tensor

from stretto.config import DataSettings
from stretto.errors import UsageError
from stretto.files.kept import cache_dir
from stretto.files.parse import parse_json
from stretto.files.say import Say, silent
from stretto.files.whole_file import saving
from stretto.train import text as bpe
from stretto.train.encode import GivenTokenizer, count, encode, token_dtype
from stretto.train.text import TextFile, documents, find_files

CACHE_FORMAT = 1
"""Part of the cache's name; raised when the files in it, or the way that they are made, change."""
MIN_HELD_OUT_DOCUMENTS = 8
"""With fewer than this to keep out, documents are too coarse: their ends are held out instead."""
FILES = ("tokenizer.json", "train.npy", "held_out.npy")
"""What a run reads; data is equal where these are, wherever they are kept."""
MANIFEST = "manifest.json"


Tokens = npt.NDArray[np.unsignedinteger]
"""Token ids in one dim, in memory or mapped from a file."""


ROUNDS = 6
"""Four rounds look random for wide numbers (Luby and Rackoff); small ones are given two more."""


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
    end: int
    """The token behind each document."""
    unigram_entropy_nats: float
    """What the held-out loss would be, a token, from token frequencies alone."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are; little text gives fewer than were asked for."""
        return count(self.tokenizer)


def prepare_data(
    settings: DataSettings, say: Say, given: GivenTokenizer | None = None, begin: Say = silent
) -> TextData:
    """The data that the settings describe; the first time, its text is made into tokens, which is kept.

    given: the tokenizer, where none is to be learned. Safe to call from every rank at once: one does the
    work, and the others wait. `say` takes notices, and `begin` what takes long, before it begins. Raises
    UsageError for text that cannot be read or is too short, and StrettoError when the disk is full.
    """
    begin("looking at the text and its tokens")
    files = find_files(settings.paths)
    folder = built_folder(
        Path(settings.cache_dir).expanduser() if settings.cache_dir is not None else cache_dir(),
        _cache_key(files, settings, given),
        lambda folder: _build(folder, files, settings, given, say, begin),
        say,
    )
    train = np.load(folder / "train.npy", mmap_mode="r")
    held_out = np.load(folder / "held_out.npy", mmap_mode="r")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    manifest = parse_json((folder / MANIFEST).read_text(encoding="utf-8"))
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
        digest=hashlib.sha256(json.dumps([manifest[name] for name in FILES]).encode()).hexdigest()[:16],
        end=0 if given is None else given.end,
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
    folder: Path,
    files: Sequence[TextFile],
    settings: DataSettings,
    given: GivenTokenizer | None,
    say: Say,
    begin: Say,
) -> None:
    """Steps 3 to 6: write tokenizer.json, train.npy, held_out.npy and summary.json into `folder`."""
    fraction = settings.held_out_fraction
    begin(f"reading {len(files):,} files, {sum(file.bytes for file in files) / 1e6:.1f} MB")
    lengths = [len(text) for text in documents(files, settings.text_field, say)]
    chars = sum(lengths)
    if not chars:
        raise UsageError(f"data.paths: there is no text in {', '.join(settings.paths)}")
    by_document = len(lengths) * fraction >= MIN_HELD_OUT_DOCUMENTS
    if not by_document:
        say(f"only {len(lengths)} documents: the last {fraction:.1%} of each is held out")

    def side(held_out: bool) -> Iterator[str]:
        for text in documents(files, settings.text_field, silent):  # the first reading gave its notices
            train, resident = _divide(text, fraction, by_document)
            part = resident if held_out else train
            if part:
                yield part

    train_chars = round(chars * (1 - fraction))
    if given is None:
        some = min(bpe.SAMPLE_CHARS, train_chars)
        begin(f"learning {settings.vocab_size:,} tokens from {some / 1e6:.1f} MB of the text")
        learned = bpe.learn(bpe.sample(side(held_out=False), train_chars), settings.vocab_size)
        given = GivenTokenizer(learned)
    tokenizer = given.tokenizer
    begin(f"making tokens of the text, {chars / 1e6:.1f} MB")
    train = _write_tokens(folder / "train.npy", given, side(held_out=False))
    held_out = _write_tokens(folder / "held_out.npy", given, side(held_out=True))
    if not len(train) or not len(held_out):
        raise UsageError(f"data.paths: the text, {chars} characters, is too short to keep out {fraction:.1%}")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    summary = {
        "documents": len(lengths),
        "unigram_entropy_nats": unigram_entropy(train, held_out, count(tokenizer)),
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def _divide(text: str, fraction: float, by_document: bool) -> tuple[str, str]:
    """A document's part to train on and its part held out; one of them is empty where documents are not cut.

    A hash of the document itself decides, so that of two equal documents none is trained on while the
    other is held out.
    """
    if by_document:
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
        resident = int.from_bytes(digest, "little") < fraction * 2**64
        return ("", text) if resident else (text, "")
    cut = round(len(text) * (1 - fraction))
    line_end = text.find("\n", cut) + 1
    # A line is not cut, if that does not take most of what was to be held out.
    if line_end and 2 * (len(text) - line_end) >= len(text) - cut:
        cut = line_end
    return text[:cut], text[cut:]


def _write_tokens(path: Path, given: GivenTokenizer, texts: Iterator[str]) -> Tokens:
    """Write the tokens of `texts` as a .npy, group by group, and map it; it may be larger than memory."""
    dtype = token_dtype(count(given.tokenizer))
    written = 0
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (0,)})
        for ids in encode(given.tokenizer, texts, given.begin, given.end):
            file.write(ids.tobytes())
            written += len(ids)
        # NumPy pads headers so that the first dim can grow in its line.
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (written,)})
    if written == 0:
        return np.empty(0, dtype=dtype)  # There is nothing to map in such a file.
    tokens: Tokens = np.load(path, mmap_mode="r")
    return tokens


# The cache.


def built_folder(cache_dir: Path, key: str, build: Callable[[Path], None], say: Say) -> Path:
    """The folder `cache_dir/key`; when it is absent or damaged, `build(folder)` first writes its files.

    One process builds and the others wait. A damaged folder is built again, which `say` reports. Raises
    StrettoError when `cache_dir` cannot be written; other errors of `build` go through. Nothing half-built
    stays.
    """
    target = cache_dir / key
    # Looked at without the lock first, so that a cache can be used by those who may not write it.
    if fault(target) is None:
        return target
    partial = cache_dir / f"{key}.partial"
    with saving(f"{cache_dir} (data.cache_dir)"):
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
                say(f"{target} is damaged ({damage}); it is built again")
                shutil.rmtree(target)
            shutil.rmtree(partial, ignore_errors=True)  # Left by a process that was killed.
            partial.mkdir()
            build(partial)
            files = {path.name: (path.stat().st_size, _checksum(path)) for path in sorted(partial.iterdir())}
            (partial / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.release()
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


def _checksum(path: Path) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return zlib.crc32(content)


# Batches.


class TokenDataset:
    """Windows of `sequence_length + 1` tokens, visited in an order that the seed decides.

    Window i begins at token i * sequence_length: each token but the first is predicted in exactly one
    window. Every window is visited once before any is visited again, in another order each time.
    """

    def __init__(self, tokens: Tokens, sequence_length: int, seed: int, what: str = "the text") -> None:
        """Raises UsageError when `tokens`, called `what` in the message, do not fill one window."""
        if len(tokens) < sequence_length + 1:
            raise UsageError(
                f"data.paths: {what} has {len(tokens)} tokens, and a sequence of data.sequence_length = "
                f"{sequence_length} needs {sequence_length + 1}; give more text, or set a shorter length"
            )
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.seed = seed

    @property
    def windows(self) -> int:
        """How many sequences an epoch has."""
        return (len(self.tokens) - 1) // self.sequence_length

    def batch(self, step: int, global_batch: int) -> Tensor:
        """The sequences of a step: int64, (global_batch, sequence_length + 1), on the CPU.

        With the same `global_batch`, steps 0, 1, 2, ... go through one epoch after another.
        """
        return self.rows(np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64))

    def rows(self, visits: npt.NDArray[np.int64]) -> Tensor:
        """The sequences of visits 0, 1, 2, ..., of one epoch after another, as `batch`."""
        starts = order_of(visits, self.windows, self.seed) * self.sequence_length
        index = starts[:, None] + np.arange(self.sequence_length + 1)
        return torch.from_numpy(self.tokens[index].astype(np.int64))


def unigram_entropy(train: Tokens, held_out: Tokens, vocab_size: int) -> float:
    """How well token frequencies alone predict the held-out text: cross-entropy in nats a token.

    The frequencies are those of `train`, each count one higher, so that a token never seen there has a
    probability too. A model whose held-out loss is not below this has learned nothing from context.
    """
    counts = _counts(train, vocab_size) + 1
    log_probability = np.log(counts) - np.log(counts.sum())
    return float(-(_counts(held_out, vocab_size) * log_probability).sum() / len(held_out))


def _counts(tokens: Tokens, vocab_size: int) -> npt.NDArray[np.int64]:
    # In parts, since bincount makes int64 of what it is given, and tokens may be larger than memory.
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), 1 << 24):
        counts += np.bincount(tokens[start : start + (1 << 24)], minlength=vocab_size)
    return counts


def order_of(visits: npt.NDArray[np.int64], size: int, seed: int | str) -> npt.NDArray[np.int64]:
    """Which of `size` things each visit is of: all of them in every epoch, in another order each time."""
    epochs, visits = np.divmod(visits, size)
    chosen = np.empty_like(visits)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        chosen[now] = permute(visits[now], size, f"{seed}:{epoch}")
    return chosen


def permute(numbers: npt.NDArray[np.int64], size: int, key: str) -> npt.NDArray[np.int64]:
    """Where each of `numbers` (each in 0 .. size - 1) goes under the permutation that `key` names.

    It is computed and not stored: any number of it costs the same. A Feistel network (Luby and Rackoff, 1988)
    permutes the numbers below the next power of four; those that leave the range are permuted again until
    they are back in it (cycle walking; Black and Rogaway, 2002).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    digest = hashlib.shake_256(key.encode()).digest(8 * ROUNDS)
    round_keys = np.frombuffer(digest, dtype="<u8")
    permuted = numbers.astype(np.uint64)
    outside = np.ones(permuted.shape, dtype=bool)
    while outside.any():
        permuted[outside] = _feistel(permuted[outside], half_bits, round_keys)
        outside = permuted >= np.uint64(size)
    return permuted.astype(np.int64)


def _feistel(
    numbers: npt.NDArray[np.uint64], half_bits: int, round_keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> shift, numbers & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood, 2014); arithmetic wraps at 64 bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
