"""Text: which files have it, and the documents in them, in an order that is always the same.

Reads files (UTF-8 text, .jsonl, .parquet) and never writes one. A document is a file of text, a line of
a .jsonl, or a row of a .parquet.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import UsageError
from stretto.files.near import near_path
from stretto.files.parse import parse_json
from stretto.files.say import Say

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
"""Folders of compiled or of installed code: the same text would come in or not by what is installed."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of text. `named`: the user named this very file, so it must be readable."""

    path: Path
    bytes: int
    mtime_ns: int
    named: bool


def standard_library() -> Path:
    """The folder of the running interpreter's own library."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(paths: Sequence[str]) -> list[TextFile]:
    """The files in `paths` (files and folders; none means the standard library's .py files).

    Folders are walked in sorted order, without hidden files. Raises UsageError for a path that does not
    exist, and when there is no file at all.
    """
    if not paths:
        own = [_entry(path, named=False) for path in _walk(standard_library(), ".py")]
        if not own:
            raise UsageError(
                f"data.paths is empty, and {standard_library()} holds no .py file; name some text"
            )
        return own
    files: dict[Path, TextFile] = {}
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            for file in _walk(path):
                files.setdefault(file.resolve(), _entry(file, named=False))
        elif path.is_file():
            files[path.resolve()] = _entry(path, named=True)
        else:
            raise UsageError(
                f"data.paths: {name} does not exist (seen from {Path.cwd()}); "
                f"{near_path(path, '{} ')}name a file or a folder"
            )
    if not files:
        raise UsageError(f"data.paths: there is no file in {', '.join(paths)}")
    return list(files.values())


def _walk(folder: Path, suffix: str = "") -> list[Path]:
    files = [
        path
        for path in folder.rglob(f"*{suffix}")
        if not any(part in SKIPPED_FOLDERS or part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    ]
    return sorted(files, key=lambda path: path.relative_to(folder).parts)


def _entry(path: Path, named: bool) -> TextFile:
    status = path.stat()
    return TextFile(path, status.st_size, status.st_mtime_ns, named)


def documents(files: Sequence[TextFile], text_field: str, say: Say) -> Iterator[str]:
    """Every document that is not empty, in the files' order.

    In a folder, a file that is not UTF-8 text is left out, and one line counts them. Raises
    UsageError, with file and line, for a file that was named and cannot be read, and for a .jsonl or
    .parquet without the text field.
    """
    left_out: list[TextFile] = []
    for file in files:
        suffix = file.path.suffix.lower()
        if suffix == ".jsonl":
            yield from _jsonl(file.path, text_field)
        elif suffix == ".parquet":
            yield from _parquet(file.path, text_field)
        else:
            text = _plain(file)
            if text is None:
                left_out.append(file)
            elif text:
                yield text
    if left_out:
        say(f"left out {len(left_out)} of {len(files)} files that are not UTF-8 text, as {left_out[0].path}")


def _plain(file: TextFile) -> str | None:
    try:
        content = file.path.read_bytes()
        if b"\0" not in content:
            return content.decode("utf-8-sig")
        where = f"a zero byte at byte {content.index(0)}"
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is not UTF-8"
    except OSError as error:
        raise UsageError(f"data.paths: {file.path} cannot be read: {error.strerror or error}") from None
    if file.named:
        raise UsageError(f"data.paths: {file.path} is not UTF-8 text ({where}); convert it to UTF-8")
    return None


def _jsonl(path: Path, text_field: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                except ValueError as error:
                    why = error.msg if isinstance(error, json.JSONDecodeError) else error
                    raise UsageError(f"{path}:{number}: is not JSON: {why}") from None
                text = row.get(text_field) if isinstance(row, dict) else None
                if not isinstance(text, str):
                    keys = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
                    raise UsageError(
                        f"{path}:{number}: there is no text in the field {text_field!r} (there is: {keys}); "
                        "set data.text_field"
                    )
                if text:
                    # JSON can spell half a surrogate pair, which is no character.
                    yield text.encode("utf-8", "replace").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"data.paths: {path} is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise UsageError(f"data.paths: {path} cannot be read: {error.strerror or error}") from None


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{path}: reading .parquet needs pyarrow: pip install 'stretto[parquet]'") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            schema = table.schema_arrow
            field = schema.field(text_field) if text_field in schema.names else None
            kinds = (pyarrow.types.is_string, pyarrow.types.is_large_string)
            if field is None or not any(kind(field.type) for kind in kinds):
                columns = ", ".join(f"{one.name} ({one.type})" for one in schema)
                raise UsageError(
                    f"{path}: there is no column of text {text_field!r} (there is: {columns}); "
                    "set data.text_field"
                )
            for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
                yield from (text for text in batch.column(0).to_pylist() if text)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"data.paths: {path} cannot be read as parquet: {error}") from None
