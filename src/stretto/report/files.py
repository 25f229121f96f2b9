"""The files of a run that have a version: timelines, what a model observed, and a plan's figures.

A timeline is written so that users can read and other tools can load it: a span is a row (rank, lane, kind,
name, start_us, end_us, and an object of what else is known of it), one a line. Times are microseconds, memory
is bytes. Figures are what a report has of a plan besides its timelines: with them a run can be reported when
its plan file is of another version.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.files.codec import Codec, Fits, TextLayout, checked
from stretto.files.typed_file import TypedFile
from stretto.ir.costs import Prediction
from stretto.ir.limits import MOST_RANKS
from stretto.ir.metrics import ObservedRun
from stretto.ir.plan import Plan
from stretto.ir.timeline import Span, Stall, Timeline
from stretto.ir.work import Work, work_of
from stretto.report.grid import counted

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


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """name: of the job. about: its schedule, what it runs on, where costs are from, in words. world: ranks
    of the run. prediction: None for a plan without one. work: of a rank in a step."""

    name: str
    about: str
    world: int
    prediction: Prediction | None
    work: Work

    @staticmethod
    def of(plan: Plan) -> PlanFigures:
        """Those of a plan."""
        schedule, microbatches = plan.schedule, counted(plan.job.microbatches, "microbatch")
        about = f"{schedule.family}, {counted(schedule.stages, 'stage')} on {plan.where} · {microbatches}"
        about += f" · costs: {plan.costs.source}"
        return PlanFigures(plan.job.name, about, plan.world, plan.prediction, work_of(plan))


FIGURES = TypedFile(PlanFigures, "stretto figures", 3, "figures", "A training run leaves it")
