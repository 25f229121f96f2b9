"""The files of a run that have a version: timelines, and what a model observed.

A timeline is written so that users can read and other tools can load it: a span is a row (rank, lane, kind,
name, start_us, end_us, and an object of what else is known of it), one a line. Times are microseconds, memory
is bytes.
"""

from __future__ import annotations

from stretto.files.codec import Codec, Fits, TextLayout, checked
from stretto.files.typed_file import TypedFile
from stretto.ir.limits import MOST_RANKS
from stretto.ir.metrics import ObservedRun
from stretto.ir.timeline import Span, Stall, Timeline

CODEC = Codec()
CODEC.row(Span, 6, TextLayout.ENTRY)
CODEC.row(Stall, 4, TextLayout.ENTRY)


def _is_of_its_ranks(timeline: Timeline) -> bool:
    """Whether all that is given by rank is of the ranks that are counted, so that loops over ranks end."""
    ranks = range(timeline.ranks)
    return (
        len(timeline.peak_bytes) == timeline.ranks
        and len(timeline.memory) in (0, timeline.ranks)
        and 1 <= timeline.members <= MOST_RANKS
        and all(span.rank in ranks for span in timeline.spans)
    )


_CHECKED = Fits(_is_of_its_ranks, "spans, peaks and memory of as many ranks as `ranks` counts")
FILE = TypedFile(
    Timeline,
    "stretto timeline",
    3,
    "timeline",
    "Make one with `stretto simulate --json`",
    Codec({Timeline: checked(CODEC.form(Timeline), _CHECKED)}),
)

save_json, to_json, load_timeline = FILE.save, FILE.to_text, FILE.load

OBSERVED = TypedFile(ObservedRun, "stretto observed", 1, "metrics", "A training run leaves it")
