"""Timelines as JSON: written so that people can read and other tools can load them, and read back.

Spans are rows under named columns, one a line. Times are microseconds, memory is bytes.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.files.parse import parse_json
from stretto.files.whole_file import write_file
from stretto.ir.action import Phase
from stretto.ir.timeline import Span, SpanKind, Timeline

FORMAT = "stretto timeline"
VERSION = 1
COLUMNS = tuple(field.name for field in fields(Span))


def save_json(timeline: Timeline, path: Path) -> None:
    """Write a timeline to `path`; equal timelines give equal files."""
    write_file(path, to_json(timeline))


def to_json(timeline: Timeline) -> str:
    """A timeline as JSON text."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "source": timeline.source,
        "ranks": timeline.ranks,
        "step_us": timeline.step_us,
        "peak_bytes": list(timeline.peak_bytes),
        "memory": [[list(step) for step in steps] for steps in timeline.memory],
        "members": timeline.members,
        "columns": list(COLUMNS),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = ",\n".join(
        "  " + json.dumps([getattr(span, column) for column in COLUMNS]) for span in timeline.spans
    )
    return "\n".join(["{", *lines, ' "spans": [', rows, " ]", "}"]) + "\n"


def load_timeline(path: str | Path) -> Timeline:
    """Read what `save_json` wrote. Raises UsageError that names the file and what is wrong with it."""
    path = Path(path)
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the timeline {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"cannot read the timeline {path}: it is not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f'cannot read {path}: it is no timeline (its key "format" is not "{FORMAT}")')
    if data.get("version") != VERSION:
        raise UsageError(
            f"cannot read the timeline {path}: its version is {data.get('version')}, "
            f"this Stretto reads {VERSION}"
        )
    try:
        return _from_data(data)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"cannot read the timeline {path}: {type(error).__name__}: {error}") from None


def _from_data(data: dict[str, Any]) -> Timeline:
    spans: list[Span] = []
    for row in data["spans"]:
        fields = dict(zip(data["columns"], row, strict=True))
        fields["kind"] = SpanKind(fields["kind"])
        fields["phase"] = None if fields["phase"] is None else Phase(fields["phase"])
        spans.append(Span(**fields))
    return Timeline(
        str(data["source"]),
        int(data["ranks"]),
        float(data["step_us"]),
        tuple(spans),
        tuple(int(n) for n in data["peak_bytes"]),
        tuple(tuple((float(at), int(held)) for at, held in steps) for steps in data["memory"]),
        int(data.get("members", 1)),
    )
