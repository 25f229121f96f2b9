"""In what the forms of a step differ (`Job.forms`), and how they are told apart in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.program import Job

_ONE_AND_MORE = {
    "stages": ("stage", "stages"),
    "chunks": ("chunk of the sequence", "chunks of the sequence"),
}


def forms_of(job: Job) -> tuple[Job, ...]:
    """The step in each form, as it is itself first."""
    return (replace(job, forms=()), *job.forms)


def differing(jobs: Sequence[Job]) -> tuple[str, ...]:
    """What there are different numbers of: "stages", "chunks"."""
    return tuple(what for what in _ONE_AND_MORE if len({_count(job, what) for job in jobs}) > 1)


def number(job: Job, differ: Sequence[str]) -> str:
    """A form among others, as "4" or "4 and 1"."""
    return " and ".join(str(_count(job, what)) for what in differ)


def form(job: Job, differ: Sequence[str]) -> str:
    """A form in words, as "4 stages and 1 chunk of the sequence"."""
    counts = [(_count(job, what), _ONE_AND_MORE[what]) for what in differ]
    return " and ".join(f"{count} {one if count == 1 else more}" for count, (one, more) in counts)


def nouns(differ: Sequence[str]) -> str:
    """What the numbers are of, as "stages and chunks of the sequence"."""
    return " and ".join(_ONE_AND_MORE[what][1] for what in differ)


def _count(job: Job, what: str) -> int:
    return len(job.stages) if what == "stages" else job.chunks
