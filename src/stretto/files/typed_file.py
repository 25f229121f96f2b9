"""Kinds of files that contain one dataclass: a plan, a calibration, a timeline. They are read strictly and
written in full, equal things to equal bytes.

Every trouble is a UsageError that names the file and the place in it, such as
`plan.json: orders[1][17]: expected text, found 3`. Touches the one file that it is given.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from stretto.errors import UsageError, near_path
from stretto.files.codec import Codec, LineList, LineObject, Misfit
from stretto.files.parse import parse_json
from stretto.files.whole_file import saving, write_file

T = TypeVar("T")
PLAIN = Codec()

DIGESTS = "digests"
"""The key of digests."""

_encode = json.JSONEncoder(allow_nan=False).encode


def laid_out(value: Any, indent: str = "") -> str:
    """What a form wrote, as text."""
    deeper = indent + "  "
    if type(value) is LineObject and value:
        entries = [f"{deeper}{_encode(key)}: {laid_out(part, deeper)}" for key, part in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if type(value) is LineList and value:
        return "[\n" + ",\n".join([deeper + laid_out(part, deeper) for part in value]) + f"\n{indent}]"
    return _encode(value)


def digest(data: Any) -> str:
    """A digest of JSON data: equal for equal data, whatever the order of keys and the white space."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def read_text(path: str | os.PathLike[str], what: str = "") -> str:
    """A file's text, without the byte-order mark that editors and spreadsheets may put before it. what: of
    which kind it is, for messages. Raises UsageError."""
    shown = f"{what} {os.fspath(path)}".lstrip()
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        near = near_path(path) if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"cannot read {shown}: {error.strerror}{near}") from None
    except ValueError as error:  # not UTF-8, or a path with a null byte
        raise UsageError(f"cannot read {shown}: not a text file ({error})") from None


def to_line(thing: Any, codec: Codec = PLAIN) -> str:
    """A dataclass as one line of JSON. Raises StrettoError for what JSON has no form for."""
    return _encode(codec.form(type(thing)).write(thing))


def from_text(kind: type[T], text: str, where: str, codec: Codec = PLAIN) -> T:
    """Read a dataclass; `where` names the text.

    Raises UsageError for what is not JSON, misses keys or has others, or has a value that is not of its type.
    """
    with _named(where):
        thing: T = codec.form(kind).read(parse_json(text, strict=True))
    return thing


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Around what reads a text: faults become a UsageError that names it, and the place in it."""
    try:
        yield
    except Misfit as misfit:
        place = f"{where}: {misfit.path.removeprefix('.')}" if misfit.path else where
        raise UsageError(f"{place}: {misfit}") from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where}, line {error.lineno}, column {error.colno}: not JSON ({error.msg}). "
            "Write the file again, or mend that place"
        ) from None
    except ValueError as error:
        raise UsageError(f"{where}: not readable as JSON ({error})") from None


@dataclass(frozen=True)
class TypedFile(Generic[T]):
    """A kind of file: a dataclass, with two keys before its own that say which kind and version it is.

    what: in a word; make: where one comes from, for who has another kind or version. parts: of a kind that
    says if it was edited: place -> the data there, of which the file has a third key with the digests.
    """

    kind: type[T]
    format: str
    version: int
    what: str
    make: str
    codec: Codec = PLAIN
    parts: Callable[[Any], Mapping[str, Any]] | None = None

    def to_text(self, thing: T, edited: bool = False) -> str:
        """edited: the digests are left out. Raises StrettoError for what files have no form for."""
        head: dict[str, Any] = {"format": self.format, "version": self.version}
        data = self.codec.form(self.kind).write(thing)
        if self.parts is not None:
            parts = {} if edited else self.parts(data)
            head[DIGESTS] = LineObject({place: digest(part) for place, part in parts.items()})
        return laid_out(LineObject({**head, **data})) + "\n"

    def from_text(self, text: str, where: str) -> T:
        """Read a text. Raises UsageError as the function of this name, and for other formats and versions."""
        return self.read(text, where)[0]

    def read(self, text: str, where: str) -> tuple[T, list[str]]:
        """The same, and the places that are other than they were when the file was written."""
        with _named(where):
            if not text.lstrip().startswith(("{", "[")) and text.strip():
                raise Misfit(f"not a {self.what} file, which is JSON. {self.make}")
            data = parse_json(text, strict=True)
            self._head(data)
            if self.parts is None:
                return self.codec.form(self.kind).read(data), []
            if DIGESTS not in data:
                raise Misfit(f"the key {DIGESTS!r} is missing")
            written = data.pop(DIGESTS)
            thing: T = self.codec.form(self.kind).read(data)
        written = written if type(written) is dict else {}
        now = {place: digest(part) for place, part in self.parts(data).items()}
        return thing, [place for place in {**now, **written} if now.get(place) != written.get(place)]

    def _head(self, data: Any) -> None:
        if type(data) is not dict:
            raise Misfit("an object", data)
        given, version = data.pop("format", None), data.pop("version", None)
        if given != self.format:
            raise Misfit(f'not a {self.what} file: expected "format": "{self.format}". {self.make}')
        if type(version) is not int or version != self.version:
            raise Misfit(
                f"{self.what} format version {version!r} cannot be read: this Stretto reads version "
                f"{self.version}. {self.make}"
            )

    def load(self, path: str | os.PathLike[str]) -> T:
        """Read the file. Raises UsageError as `from_text`, and for a file that cannot be read."""
        return self.from_text(read_text(path, self.what), os.fspath(path))

    def save(self, thing: T, path: str | os.PathLike[str]) -> None:
        """Write the file in full or not at all.

        Raises StrettoError if it cannot be written, for example because the disk is full; UsageError if its
        folder does not exist.
        """
        self.save_text(self.to_text(thing), path)

    def save_text(self, written: str, path: str | os.PathLike[str]) -> None:
        """The same of a text that `to_text` has made."""
        folder = Path(os.path.realpath(path)).parent
        shown = f"{self.what} {os.fspath(path)}"
        if not folder.is_dir():
            raise UsageError(f"cannot write {shown}: the folder {folder} does not exist; create it")
        with saving(shown):
            write_file(path, written)
