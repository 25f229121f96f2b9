"""Texts that were made once and are found again by what they depend on: costs that were measured, and plans.

An entry is one file in a folder: a line of JSON that says when it was made and what its text's digest is,
and then the text. It is written in full or not at all, so that any number of processes may keep and find at
once; one that is damaged is none, and is removed. The entries that were used longest ago go when there are
too many.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stretto.errors import UsageError
from stretto.files.parse import parse_json
from stretto.files.say import Say, silent
from stretto.files.whole_file import write_file

MOST_ENTRIES = 256
MOST_BYTES = 2**28
"""Limits of a folder. Assumed: a plan of a small run takes 0.2 MB, one of a large model tens."""

SUFFIX = ".kept"
LEFT_OVER_S = 3600.0
"""A file that was being written this long ago is abandoned."""


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/stretto`, or `~/.cache/stretto`. Raises UsageError where there is neither."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of base directories says that a relative path is not to be used.
    if base and Path(base).is_absolute():
        return Path(base) / "stretto"
    try:
        return Path.home() / ".cache" / "stretto"
    except RuntimeError:
        raise UsageError(
            "this user has no home directory, in whose .cache things are kept: set XDG_CACHE_HOME to the "
            "full path of a folder"
        ) from None


def key_of(*parts: str) -> str:
    """A key that two lists of texts share only when they are equal."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()[:32]


@cache
def code_digest() -> str:
    """The digest of Stretto's own source files and tables: what other code made is not found again."""
    root = Path(__file__).parents[1]
    parts: list[str] = []
    for path in sorted(path for kind in ("*.py", "*.toml") for path in root.rglob(kind)):
        parts += (path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    return key_of(*parts)


def ago(age_s: float) -> str:
    """`3 minutes ago`."""
    for unit_s, unit in ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute")):
        count = int(age_s / unit_s)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return f"{int(age_s)} s ago"


@dataclass(frozen=True, slots=True)
class Kept:
    """A folder of entries. renew: whether what is there is made again, as if it were not. say: takes a line
    of what is found again, and of what cannot be kept."""

    folder: Path
    renew: bool = False
    say: Say = silent

    def find(self, kind: str, key: str, said: str, most_age_s: float = math.inf) -> str | None:
        """The text of that kind and key, made no longer ago than `most_age_s`; None if there is none, or it
        is damaged, or cannot be read. said: the words for what is found, with `{ago}` and `{folder}`."""
        if self.renew:
            return None
        path = self._path(kind, key)
        try:
            head, _, text = path.read_bytes().partition(b"\n")
            stamp = parse_json(head)
            age_s = time.time() - float(stamp["made_at_s"])
            if stamp["sha256"] != hashlib.sha256(text).hexdigest():
                raise ValueError("another text")
            found = text.decode()
        except OSError:
            return None
        except (ArithmeticError, LookupError, TypeError, ValueError):
            self.drop(kind, key)
            return None
        with suppress(OSError):
            os.utime(path)  # the entries that were used longest ago go first
        if not 0.0 <= age_s <= most_age_s:  # a clock that was set back says nothing of the age
            return None
        self.say(f"{kind}: {said.format(ago=ago(age_s), folder=self.folder)}")
        return found

    def keep(self, kind: str, key: str, text: str) -> None:
        """Keep a text. Where it cannot be written that is stamp, and nothing else comes of it."""
        data = text.encode()
        head = json.dumps({"made_at_s": time.time(), "sha256": hashlib.sha256(data).hexdigest()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self._path(kind, key), head.encode() + b"\n" + data)
        except OSError as error:
            self.say(f"note: {kind} cannot be kept in {self.folder} for the next run ({error.strerror})")
        else:
            self._tidy()

    def drop(self, kind: str, key: str) -> None:
        """Remove an entry, if it is there and may be removed."""
        with suppress(OSError):
            self._path(kind, key).unlink()

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}-{key}{SUFFIX}"

    def _tidy(self) -> None:
        """Remove the entries that were used longest ago, until what is left is within the limits."""
        entries: list[tuple[float, int, Path]] = []
        for path in [*self.folder.glob(f"*{SUFFIX}"), *self.folder.glob(f".*{SUFFIX}.*.tmp")]:
            with suppress(OSError):  # another process has removed it
                status = path.stat()
                if path.suffix == SUFFIX:
                    entries.append((status.st_mtime, status.st_size, path))
                elif time.time() - status.st_mtime > LEFT_OVER_S:
                    path.unlink()
        held_bytes = 0
        for count, (_, size, path) in enumerate(sorted(entries, reverse=True)):
            held_bytes += size
            if count >= MOST_ENTRIES or (count and held_bytes > MOST_BYTES):
                with suppress(OSError):
                    path.unlink()
