"""Timelines, and what a model let see of a run, as JSON: written so that people can read and other tools can
load them, and read back.

A span is a row: rank, lane, kind, name, start_us, end_us, and an object of what else is known of it, one a
line. Times are microseconds, memory is bytes.
"""

from __future__ import annotations

from stretto.files.codec import Codec
from stretto.files.form import Layout
from stretto.files.typed_file import TypedFile
from stretto.ir.metrics import ObservedRun
from stretto.ir.timeline import Span, Stall, Timeline

CODEC = Codec()
CODEC.row(Span, 6, Layout.ENTRY)
CODEC.row(Stall, 4, Layout.ENTRY)

FILE = TypedFile(
    Timeline, "stretto timeline", 3, "timeline", "Make one with `stretto simulate --json`", CODEC
)

save_json, to_json, load_timeline = FILE.save, FILE.to_text, FILE.load

OBSERVED = TypedFile(ObservedRun, "stretto observed", 1, "metrics", "A training run leaves it")
