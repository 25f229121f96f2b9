"""The funnel: from all layouts to the plan of the best, the cheapest question first.

    1. Layouts stand in order of a guess (`tune.frontier`). The first is priced, if it is not, and else
       becomes candidates: each schedule with the least computed again that likely fits, with an estimate.
    2. Of the candidate with the least estimate a short step is simulated (`planning.brief`), where no
       layout's guess is below it, and when it is a candidate's turn. One that does not fit comes back with
       more computed again.
    3. What cannot win by its bound is dropped, and what is unlikely to by its estimate (`WITHIN`), once there
       are some to compare it with (`LEAST`).
    4. The best by its short step is planned whole, quickly, for half of the time at most: so that there is a
       plan whenever the search ends.
    5. Of a plan that is the best so far, other numbers of AMPipe's chunks are layouts where communication
       in blocks is exposed.
    6. The best are planned in full (`tune.finals`). The fastest of these wins.

The settings' own candidate is planned first, so that what is gained can be told. The search can end at any
time with what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from stretto.capturing.captures import KEPT
from stretto.errors import UsageError
from stretto.order.policies import DEFAULT
from stretto.price.cluster import Description
from stretto.tune.block import Block
from stretto.tune.choices import VIRTUAL, Candidate, Choices, Layout
from stretto.tune.estimate import Estimate, estimate
from stretto.tune.finals import finalists
from stretto.tune.frontier import FITS, LIKELY_TOO_LARGE, Frontier, Look, words_of
from stretto.tune.outcome import Briefed, Planned, Refused, Tuned
from stretto.tune.standing import Standing
from stretto.tune.work import Answer, Asked, limit_of
from stretto.tune.workers import Worker, Workers

QUICK = "list"
"""The policy that orders ops in steps and plans that are compared."""

WITHIN = 1.10
"""Times the best step, up to which an estimate lets a candidate be simulated. Measured on GPTs over 32
devices: plans take 0.8 to 1.07 times as long as estimated, and those alike are off alike."""

LEAST = 6
"""Candidates that are simulated whatever their estimates say, which may be wrong of all alike. Assumed."""

TURN = 3
"""Of so many pieces of work one at least is a candidate, as long as there are some."""

FULL_TIMES = 6.0
"""For the plans in full, so many times the time of a quick one is kept: each takes about three times as long,
and they come two at a time, in two rounds. Assumed."""

KEPT_AT_MOST = 0.5
"""Of the whole time, what is kept for them at most. Assumed."""

MOST_STAGES = 2
"""Stages of a layer at most, of which the shares are asked for: attention and MLP."""

HIDES = 0.02
"""Of a step, what communication in blocks exposes at least where AMPipe's chunks are tried. Assumed."""

ALIKE = 1.02
"""Times the least estimate, up to which a process rather plans what it has traced. Assumed."""

SAY_S = 2.0
"""Seconds between two lines of progress."""

BY_BOUND = "slower by its bound than the best plan"
BY_ESTIMATE = f"estimated to take {WITHIN:g} times the best step, or more"
BY_BRIEF = "slower over few microbatches than those that were planned"
PLAN_TOO_LARGE = "too large: simulated or planned, and a rank holds more than a device has"
NOT_REACHED = "not reached in the time"


@dataclass(order=True, slots=True)
class _Waiting:
    """A candidate with an estimate, and its layout's bound. ahead: as in `Estimate`."""

    estimate_us: float
    candidate: Candidate
    bound_us: float = field(compare=False)
    key: str = field(compare=False)
    ahead: int | None = field(compare=False)


class Funnel:
    """One tuning. max_seconds: how long it may take in all; say: is told every two seconds how far it is."""

    def __init__(
        self, choices: Choices, found: Description, max_seconds: float, say: Callable[[str], None]
    ) -> None:
        self.choices = choices
        self.tuned = Tuned()
        self._found = found
        self._limit = limit_of(found) or inf
        self._say = say
        self._begun_s = self._said_s = time.monotonic()
        self._end_s = self._begun_s + max_seconds
        self._frontier = Frontier(choices, found, self.tuned)
        self._waiting: list[_Waiting] = []
        self._seen: dict[Candidate, _Waiting] = {}
        self._standing = Standing()
        self._plans = self._since_candidate = 0
        self._quick_s = self._whole_s = self._brief_s = 0.0
        self._started_s: dict[Asked, float] = {}
        self._finals: list[Candidate] | None = None
        self._unseen_us = inf
        self._stages: tuple[int, ...] = ()
        self._shares: Mapping[int, Sequence[float]] = {}

    def run(self, workers: Workers) -> None:
        """Until it is done or its time is over. Raises UsageError where no layout is allowed."""
        self._begin()
        while time.monotonic() < self._end_s:
            for worker in workers.idle():
                asked = self._next(worker, resting=len(workers.idle()) == len(workers.all))
                if asked is not None:
                    self._started_s[asked] = time.monotonic()
                    workers.give(worker, asked)
            if len(workers.idle()) == len(workers.all):
                return
            for asked, answer in workers.answers(SAY_S / 4):
                self._answered(asked, answer)
            self._progress()
        if self._finals is None or self._finals or self._started_s:
            self.tuned.stopped = "the time was over"

    def lost(self, asked: Asked) -> Refused:
        """What becomes of a candidate whose process ended without a word."""
        return Refused(
            asked.candidate, "its process was ended from outside; this machine's memory may be too small"
        )

    def result(self) -> Tuned:
        """What it has, now."""
        tuned = self.tuned
        tuned.planned = self._standing.ranked_plans()
        for candidate in self._standing.unplanned():
            self._drop(BY_BRIEF, candidate, self._seen[candidate].bound_us)
        for waiting in self._waiting:
            self._drop(NOT_REACHED, waiting.candidate, waiting.bound_us)
        for look in self._frontier.open:
            self._drop(NOT_REACHED, look.layout, look.bound_us)
        for message, count in self.choices.refused.items():
            tuned.drop(message, count=count)
        self._waiting, self._frontier.open = [], []
        self._standing.briefs.clear()
        self.choices.refused.clear()
        tuned.unseen_us = None if self._unseen_us == inf else self._unseen_us
        return tuned

    def _begin(self) -> None:
        for layout in self.choices.layouts():
            self._frontier.add(layout)
            self.tuned.layouts += 1
            self._progress()
        own = self.choices.own()
        if not self.tuned.layouts:
            told = "; ".join(text for text, _ in self.choices.refused.most_common(3))
            raise UsageError(
                f"no layout of {self.choices.devices} devices fits these settings: "
                f"{told or 'what is fixed does not multiply to as many'}"
            )
        self._frontier.sort()
        sizes = {look.layout.pp for look in self._frontier.open}
        counts = {pp * each for pp in sizes for each in (1, *VIRTUAL)}
        most = inf if self.choices.layers is None else MOST_STAGES * self.choices.layers
        self._stages = tuple(sorted(count for count in counts if count <= most))
        if own is not None and self.choices.allowed(own):
            self._push(own, Estimate(0.0, 0.0), 0.0)

    # What comes next.

    def _next(self, worker: Worker, resting: bool) -> Asked | None:
        """What a process does next. resting: whether none does anything, so that the search is over where
        there is nothing to ask."""
        kept_s = min(FULL_TIMES * self._quick_s, KEPT_AT_MOST * (self._end_s - self._begun_s))
        late = time.monotonic() + kept_s > self._end_s
        if self._finals is None and not late:
            asked = self._searched(worker)
            if asked is not None or not resting:
                return asked
        if self._finals is None:
            self._finals = finalists(self._standing, self.choices)
            if late and (self._waiting or self._frontier.open):
                self.tuned.stopped = "the time was over"
        if not self._finals:
            return None
        return Asked(self._finals.pop(0), DEFAULT)

    def _next_final(self) -> None:
        """One more is planned in full, in place of one that is refused."""
        known = (
            {*self._standing.in_full()}
            | {asked.candidate for asked in self._started_s}
            | {*(self._finals or ())}
        )
        more = next((one for one in self._standing.ranked() if one not in known), None)
        if self._finals is not None and more is not None:
            self._finals.append(more)

    def _searched(self, worker: Worker) -> Asked | None:
        """Steps 1 to 4."""
        while True:
            self._prune()
            record = self._record()
            if record is not None:
                self._remember(worker, self._seen[record].key)
                return Asked(record, QUICK)
            waiting = self._likeliest(worker)
            look = self._frontier.first()
            if waiting is None and self._since_candidate >= TURN:
                look = self._frontier.first(priced=True) or look
            if waiting is not None and (
                look is None or waiting.estimate_us <= look.guess_us or self._since_candidate >= TURN
            ):
                self._waiting.remove(waiting)
                self._since_candidate = 0
                self._remember(worker, waiting.key)
                if waiting.candidate == self.choices.own():
                    return Asked(waiting.candidate, QUICK)
                return Asked(waiting.candidate, QUICK, brief=True, ahead=waiting.ahead)
            if look is None:
                return None
            if look.key not in self._frontier.blocks:
                self._since_candidate += 1
                self._frontier.ask(look.key)
                self._remember(worker, look.key)
                # How stages share the work is asked once: it is about the same in all layouts.
                known = self._shares or any(asked.stages for asked in self._started_s)
                words, stages = self.choices.again(look.layout), () if known else self._stages
                return Asked(self.choices.plain(look.layout), None, words, stages)
            self._expand(look)

    def _record(self) -> Candidate | None:
        """Step 4: what is faster by its short step than all that was planned."""
        if self._whole_s > self._brief_s or any(asked.order and not asked.brief for asked in self._started_s):
            return None
        return self._standing.promising()

    def _prune(self) -> None:
        """Step 3."""
        known_us = self._standing.known_us()
        if not known_us:
            return
        best_us = self._standing.best_us
        most_us = WITHIN * min(known_us.values()) if len(known_us) >= LEAST else inf

        def left(what: Candidate | Layout, bound_us: float, likely_us: float) -> bool:
            if bound_us >= best_us:
                self.tuned.drop(BY_BOUND, what)
            elif likely_us > most_us:
                self._drop(LIKELY_TOO_LARGE if likely_us == inf else BY_ESTIMATE, what, bound_us)
            else:
                return True
            return False

        self._waiting = [one for one in self._waiting if left(one.candidate, one.bound_us, one.estimate_us)]
        self._frontier.open = [
            look for look in self._frontier.open if left(look.layout, look.bound_us, look.guess_us)
        ]

    def _drop(self, reason: str, what: Candidate | Layout, bound_us: float) -> None:
        """Drop what could still be faster than all that was planned."""
        self.tuned.drop(reason, what)
        self._unseen_us = min(self._unseen_us, bound_us)

    def _likeliest(self, worker: Worker) -> _Waiting | None:
        if not self._waiting:
            return None
        least = min(self._waiting)
        near = [
            one
            for one in self._waiting
            if one.key in worker.recent and one.estimate_us <= ALIKE * least.estimate_us
        ]
        return min(near, default=least)

    def _remember(self, worker: Worker, key: str) -> None:
        if key in worker.recent:
            worker.recent.remove(key)
        worker.recent.append(key)
        del worker.recent[:-KEPT]

    def _expand(self, look: Look) -> None:
        """The candidates of a layout."""
        self._frontier.take(look)
        block = self._frontier.blocks[look.key]
        for family, each in self.choices.orders(look.layout):
            self._candidate(Candidate(look.layout, family, each), block, look.bound_us, 0)
            self._progress()

    def _candidate(self, bare: Candidate, block: Block, bound_us: float, more: int) -> None:
        """With the least computed again that likely fits, of what is left after the first `more` words."""
        words = words_of(self.choices, bare.layout, block.again)
        block = replace(block, shares=self._shares)
        needed = inf
        for word, work in words[more:]:
            candidate = replace(bare, recompute=word)
            try:
                found = estimate(candidate, block, work, self._found, FITS * self._limit)
            except UsageError as error:
                self.tuned.drop(str(error), candidate)
                return
            if found.peak_bytes <= FITS * self._limit:
                self._push(candidate, found, bound_us)
                return
            needed = min(needed, found.peak_bytes)
        self.tuned.drop(LIKELY_TOO_LARGE, bare)
        self.tuned.needs(bare, 0.0 if needed == inf else needed)

    def _push(self, candidate: Candidate, found: Estimate, bound_us: float) -> None:
        if candidate not in self._seen:
            key = self._frontier.key(candidate.layout)
            waiting = _Waiting(found.step_us, candidate, bound_us, key, found.ahead)
            self._seen[candidate] = waiting
            self._waiting.append(waiting)

    # What comes back.

    def _answered(self, asked: Asked, answer: Answer) -> None:
        candidate = asked.candidate
        took_s = time.monotonic() - self._started_s.pop(asked)
        if asked.order is None:
            key = self._frontier.key(candidate.layout)
            if isinstance(answer, Block):
                self._shares = self._shares or answer.shares
                self._frontier.priced(key, candidate.layout, answer)
            elif isinstance(answer, Refused):
                self._frontier.refused(key, answer.why)
            return
        self._plans += not asked.brief
        if asked.brief:
            self._brief_s += took_s
        elif asked.order == QUICK:
            self._whole_s += took_s
            self._quick_s = max(self._quick_s, took_s)
        if isinstance(answer, Briefed):
            self._standing.brief(answer)
        elif isinstance(answer, Planned):
            self._took(answer)
        elif isinstance(answer, Refused) and asked.order == QUICK:
            self._refused(answer)
        elif isinstance(answer, Refused) and self._standing.forget(candidate):
            # What is written is planned in full wherever it is used.
            self.tuned.drop(PLAN_TOO_LARGE if answer.by_memory else answer.why, candidate)
            self._next_final()

    def _took(self, planned: Planned) -> None:
        candidate, best_us = planned.candidate, self._standing.best_us
        self._standing.plan(planned)
        if candidate == self.choices.own():
            self.tuned.own = self._standing.plans[candidate]
        if planned.order == QUICK and planned.step_us < best_us and candidate.layout.ampipe_degree == 1:
            self._in_chunks(planned)

    def _in_chunks(self, planned: Planned) -> None:
        """Step 5."""
        exposed_us = sum(us for axis, us in planned.exposed_us.items() if axis in ("tp", "ep"))
        if exposed_us < HIDES * planned.step_us:
            return
        layout = planned.candidate.layout
        for degree in self.choices.degrees(layout):
            self.tuned.layouts += self._frontier.add(replace(layout, ampipe_degree=degree))
        self._frontier.sort()

    def _refused(self, answer: Refused) -> None:
        candidate = answer.candidate
        self._standing.forget(candidate)
        if candidate == self.choices.own():
            self.tuned.own = answer
        self.tuned.drop(PLAN_TOO_LARGE if answer.by_memory else answer.why, candidate)
        self.tuned.needs(candidate, answer.bytes_needed)
        waiting = self._seen[candidate]
        block = self._frontier.blocks.get(waiting.key)
        if answer.by_memory and block is not None:
            words = [word for word, _ in words_of(self.choices, candidate.layout, block.again)]
            if candidate.recompute in words[:-1]:
                more = words.index(candidate.recompute) + 1
                self._candidate(candidate, block, waiting.bound_us, more)

    def _progress(self) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_S:
            return
        self._said_s = now_s
        best = next(iter(self._standing.ranked_plans()), None)
        told = f"best {best.step_us / 1e3:,.1f} ms: {best.candidate}" if best else "no plan yet"
        self._say(
            f"{now_s - self._begun_s:.0f} s: {len(self._frontier.blocks)} blocks priced, "
            f"{len(self._standing.briefs)} short steps simulated, {self._plans} plans made; left "
            f"{len(self._frontier.open)} of {self.tuned.layouts} layouts, {len(self._waiting)} candidates; "
            f"{told}"
        )
