"""What a process of a tuning does: it prices blocks and plans candidates, and keeps what it traced."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from traceback import extract_tb
from typing import Any

from stretto.config import TrainSettings
from stretto.errors import PlanError, StrettoError
from stretto.planning.brief import brief
from stretto.planning.make_plan import plan, tries_of
from stretto.price.cluster import Description
from stretto.price.cluster_file import Hardware
from stretto.price.flat import Cluster
from stretto.train.job import captures_of
from stretto.tune.block import Block, block_of, shares_of
from stretto.tune.choices import Candidate, Choices
from stretto.tune.outcome import Briefed, Planned, Refused, planned_of
from stretto.verifying.memory import MemoryFault


@dataclass(frozen=True, slots=True)
class Asked:
    """A piece of work. order: of a plan; None prices a block. words: what the block's backward may compute
    again; stages: numbers of them of which the shares are asked for. brief: whether a short step is simulated
    in the place of a plan, with pairs as `ahead` says (`stretto.planning.brief`)."""

    candidate: Candidate
    order: str | None
    words: tuple[str | int, ...] = ()
    stages: tuple[int, ...] = ()
    brief: bool = False
    ahead: int | None = None


Answer = Block | Briefed | Planned | Refused


class Work:
    """Made in the process that works. limit_bytes: what a device holds; None is no limit."""

    def __init__(
        self, settings: TrainSettings, devices: int, found: Description, fixed: Mapping[str, Any]
    ) -> None:
        self._settings = settings
        self._choices = Choices(settings, devices, fixed)
        self._found = found
        self._captures = captures_of(settings, found)
        self._limit = limit_of(found)

    def do(self, asked: Asked) -> Answer:
        """Price or plan. What is refused comes back with the words of the refusal."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if asked.order is None:
                    return self._price(asked)
                if asked.brief:
                    return self._brief(asked.candidate, asked.order, asked.ahead)
                return self._plan(asked.candidate, asked.order)
            except StrettoError as error:
                return refused(asked.candidate, error)
            except Exception as error:  # of this candidate alone; the others go on
                return Refused(asked.candidate, failed(error))

    def _price(self, asked: Asked) -> Block:
        layout = asked.candidate.layout
        parallel = self._choices.settings_of(asked.candidate).parallel  # of which the layout counts
        rows = self._choices.settings.training.global_batch / layout.pieces
        block = block_of(self._captures, parallel, self._found, asked.words, rows, self._choices.layers)
        return replace(block, shares=shares_of(self._captures, parallel, self._found, asked.stages))

    def _brief(self, candidate: Candidate, order: str, ahead: int | None) -> Briefed | Refused:
        job = self._captures.job(self._choices.settings_of(candidate).parallel)
        tries = tries_of(job, self._found, order)

        def fits(peaks: Sequence[int]) -> bool:
            return self._limit is None or max(peaks) <= self._limit

        found = brief(tries, ahead, fits)
        peak_bytes = max(found.peak_bytes)
        if not fits(found.peak_bytes):
            return Refused(candidate, "a rank holds more than a device has", True, peak_bytes)
        return Briefed(candidate, found.step_us, peak_bytes)

    def _plan(self, candidate: Candidate, order: str) -> Planned:
        parallel = self._choices.settings_of(candidate).parallel
        job = self._captures.job(parallel)
        settings = self._settings
        made = plan(
            job,
            self._found,
            order=order,
            steps=settings.training.steps,
            search_s=settings.planning.search_s,
        )
        return planned_of(candidate, order, made)


def limit_of(found: Description) -> int | None:
    """Bytes of a device, where the description says."""
    return found.memory_bytes if isinstance(found, (Cluster, Hardware)) else None


def refused(candidate: Candidate, error: StrettoError) -> Refused:
    """The candidate with the words of its refusal."""
    faults = error.faults if isinstance(error, PlanError) else []
    holds = [fault.holds_bytes for fault in faults if isinstance(fault, MemoryFault)]
    # A limit that cannot be kept is nothing but memory.
    by_memory = bool(holds) or (bool(faults) and isinstance(candidate.recompute, int))
    return Refused(candidate, in_a_line(error), by_memory, max(holds, default=0))


def failed(error: Exception) -> str:
    """A fault that nobody foresaw as one line, with the place for who looks into it."""
    last = extract_tb(error.__traceback__)[-1]
    return f"failed with {type(error).__name__}: {error!s:.200} ({last.filename}, line {last.lineno})"


def in_a_line(error: StrettoError) -> str:
    """An error as one line: what, and its first fault."""
    if isinstance(error, PlanError) and error.faults:
        return f"{str(error).splitlines()[0].partition(':')[0]}: {error.faults[0]}"
    return " ".join(str(error).split())
