"""The funnel: from all layouts to the plan of the best, the cheapest question first.

    1. Layouts stand in order of a guess (`tune.frontier`). The first is priced, if it is not, and else
       becomes candidates: each schedule with the least computed again that likely fits, with an estimate.
    2. The candidate with the least estimate is planned with quick settings where no layout's guess is below
       it, and when it is a plan's turn. One that does not fit comes back with more computed again.
    3. What cannot win by its bound is dropped, and what is unlikely to by its estimate (`WITHIN`), once there
       are some plans (`LEAST`).
    4. Of a plan that is the best so far, other numbers of AMPipe's chunks are candidates where communication
       in blocks is exposed: all that is exposed can be gained.
    5. The best `FINALISTS` are planned in full, and the best of them with schedule = "auto" too. The fastest
       of these wins. So are the settings' own, as what is gained is told of plans of one kind.

The settings' own candidate is planned first, so that what is gained can be told. The search can end at any
time with what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from stretto.capture.captures import KEPT
from stretto.errors import UsageError
from stretto.ir.stage_maps import AUTO
from stretto.order.policies import DEFAULT
from stretto.price.cluster import Description
from stretto.tune.block import Block
from stretto.tune.choices import Candidate, Choices, Layout
from stretto.tune.estimate import estimate
from stretto.tune.frontier import FITS, LIKELY_TOO_LARGE, Frontier, Look, words_of
from stretto.tune.outcome import Planned, Refused, Tuned
from stretto.tune.work import Answer, Asked, limit_of
from stretto.tune.workers import Worker, Workers

QUICK = "list"
"""The policy that orders ops in plans that are compared."""

WITHIN = 1.10
"""Times the best plan's step, up to which an estimate lets a candidate be planned. Assumed: estimates leave
out what no order can hide, so that plans are rarely faster than they say."""

LEAST = 6
"""Candidates that are planned whatever their estimates say, which may be wrong of all alike. Assumed."""

FINALISTS = 3
"""Candidates that are planned in full. Assumed."""

TURN = 3
"""Of so many pieces of work one at least is a plan, as long as there are candidates."""

FULL_TIMES = 3.0
"""A full plan takes about so many times a quick one, for which time is kept. Assumed."""

HIDES = 0.02
"""Of a step, what communication in blocks exposes at least where AMPipe's chunks are tried. Assumed."""

ALIKE = 1.02
"""Times the least estimate, up to which a process rather plans what it has traced. Assumed."""

SAY_S = 2.0
"""Seconds between two lines of progress."""

BY_BOUND = "slower by its bound than the best plan"
BY_ESTIMATE = f"estimated to take {WITHIN:g} times the best plan's step, or more"
PLAN_TOO_LARGE = "too large: planned, and a rank holds more than a device has"
NOT_REACHED = "not reached in the time"


@dataclass(order=True, slots=True)
class _Waiting:
    """A candidate with an estimate, and its layout's bound."""

    estimate_us: float
    candidate: Candidate
    bound_us: float = field(compare=False)
    key: str = field(compare=False)


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
        self._best: dict[Candidate, Planned] = {}
        self._plans = self._since_plan = 0
        self._quick_s = 0.0
        self._started_s: dict[Asked, float] = {}
        self._finals: list[Candidate] | None = None
        self._unseen_us = inf

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
        # Of equal ones a family before "auto", which every plan would have to look for again.
        tuned.planned = sorted(
            self._best.values(), key=lambda one: (one.step_us, one.candidate.schedule == AUTO, one.candidate)
        )
        for waiting in self._waiting:
            self._drop(NOT_REACHED, waiting.candidate, waiting.bound_us)
        for look in self._frontier.open:
            self._drop(NOT_REACHED, look.layout, look.bound_us)
        for message, count in self.choices.refused.items():
            tuned.drop(message, count=count)
        self._waiting, self._frontier.open = [], []
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
        if own is not None and self.choices.allowed(own):
            self._push(own, 0.0, 0.0)

    # Step 1 to 3: what comes next.

    @property
    def _best_us(self) -> float:
        return min((one.step_us for one in self._best.values()), default=inf)

    def _next(self, worker: Worker, resting: bool) -> Asked | None:
        """What a process does next. resting: whether none does anything, so that the search is over where
        there is nothing to ask."""
        late = time.monotonic() + FULL_TIMES * self._quick_s > self._end_s
        if self._finals is None and not late:
            asked = self._searched(worker)
            if asked is not None or not resting:
                return asked
        if self._finals is None:
            ranked = sorted(self._best.values(), key=lambda one: one.step_us)
            self._finals = [one.candidate for one in ranked[:FINALISTS]]
            self._finals += self._with_any_schedule(self._finals[:1])
            own = self.choices.own()
            if own in self._best and own not in self._finals:
                self._finals.append(own)
            if late and (self._waiting or self._frontier.open):
                self.tuned.stopped = "the time was over"
        if not self._finals:
            return None
        candidate = self._finals.pop(0)
        return Asked(candidate, DEFAULT)

    def _next_final(self) -> None:
        """One more is planned in full, in place of one that is refused."""
        ranked = sorted(self._best.values(), key=lambda one: one.step_us)
        found = [one.candidate for one in ranked if one.order == QUICK]
        running = {asked.candidate for asked in self._started_s}
        more = next((one for one in found if one not in running and one not in (self._finals or ())), None)
        if self._finals is not None and more is not None:
            self._finals.append(more)

    def _with_any_schedule(self, best: list[Candidate]) -> list[Candidate]:
        """The best once more, with the schedule that planning finds, where that may be chosen."""
        found = [replace(one, schedule=AUTO) for one in best if one.layout.pp > 1 and one.schedule != AUTO]
        if "schedule" in self.choices.fixed:
            return []
        return [one for one in found if self.choices.allowed(one)]

    def _searched(self, worker: Worker) -> Asked | None:
        while True:
            self._prune()
            waiting = self._likeliest(worker)
            look = self._frontier.first()
            if waiting is not None and (
                look is None or waiting.estimate_us <= look.guess_us or self._since_plan >= TURN
            ):
                self._waiting.remove(waiting)
                self._since_plan = 0
                self._remember(worker, waiting.key)
                return Asked(waiting.candidate, QUICK)
            if look is None:
                return None
            if look.key not in self._frontier.blocks:
                self._since_plan += 1
                self._frontier.ask(look.key)
                self._remember(worker, look.key)
                return Asked(self.choices.plain(look.layout), None, self.choices.again(look.layout))
            self._expand(look)

    def _prune(self) -> None:
        """Step 3."""
        best_us = self._best_us
        if best_us == inf:
            return
        left = []
        for waiting in self._waiting:
            if not self._hopeless(waiting.candidate, waiting.bound_us, waiting.estimate_us, best_us):
                left.append(waiting)
        self._waiting = left
        self._frontier.open = [
            look
            for look in self._frontier.open
            if not self._hopeless(look.layout, look.bound_us, look.guess_us, best_us)
        ]

    def _hopeless(self, what: Candidate | Layout, bound_us: float, likely_us: float, best_us: float) -> bool:
        if bound_us >= best_us:
            self.tuned.drop(BY_BOUND, what)
            return True
        if likely_us > WITHIN * best_us and len(self._best) >= LEAST:
            self._drop(LIKELY_TOO_LARGE if likely_us == inf else BY_ESTIMATE, what, bound_us)
            return True
        return False

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
        needed = inf
        for word, work in words[more:]:
            candidate = replace(bare, recompute=word)
            try:
                found = estimate(candidate, block, work, self._found, self.choices.layers)
            except UsageError as error:
                self.tuned.drop(str(error), candidate)
                return
            if found.peak_bytes <= FITS * self._limit:
                self._push(candidate, found.step_us, bound_us)
                return
            needed = min(needed, found.peak_bytes)
        self.tuned.drop(LIKELY_TOO_LARGE, bare)
        self.tuned.needs(bare, 0.0 if needed == inf else needed)

    def _push(self, candidate: Candidate, estimate_us: float, bound_us: float) -> None:
        if candidate not in self._seen:
            waiting = _Waiting(estimate_us, candidate, bound_us, self._frontier.key(candidate.layout))
            self._seen[candidate] = waiting
            self._waiting.append(waiting)

    # What comes back.

    def _answered(self, asked: Asked, answer: Answer) -> None:
        candidate = asked.candidate
        took_s = time.monotonic() - self._started_s.pop(asked)
        if asked.order is None:
            key = self._frontier.key(candidate.layout)
            if isinstance(answer, Block):
                self._frontier.priced(key, candidate.layout, answer)
            elif isinstance(answer, Refused):
                self._frontier.refused(key, answer.why)
            return
        self._plans += 1
        if asked.order == QUICK:
            self._quick_s = max(self._quick_s, took_s)
        if isinstance(answer, Planned):
            self._took(answer)
        elif isinstance(answer, Refused) and asked.order == QUICK:
            self._refused(answer)
        elif isinstance(answer, Refused) and self._best.pop(candidate, None) is not None:
            # What is written is planned in full wherever it is used.
            self.tuned.drop(PLAN_TOO_LARGE if answer.by_memory else answer.why, candidate)
            self._next_final()

    def _took(self, planned: Planned) -> None:
        candidate = planned.candidate
        before, best_us = self._best.get(candidate), self._best_us
        if before is None or planned.order == DEFAULT or planned.step_us <= before.step_us:
            self._best[candidate] = planned
        if candidate == self.choices.own():
            self.tuned.own = self._best[candidate]
        if planned.order == QUICK and planned.step_us < best_us and candidate.layout.ampipe_degree == 1:
            self._in_chunks(planned)

    def _in_chunks(self, planned: Planned) -> None:
        """Step 4."""
        exposed_us = sum(us for axis, us in planned.exposed_us.items() if axis in ("tp", "ep"))
        if exposed_us < HIDES * planned.step_us:
            return
        layout = planned.candidate.layout
        bound = self._seen[planned.candidate].bound_us
        for degree in self.choices.degrees(layout):
            other = replace(planned.candidate, layout=replace(layout, ampipe_degree=degree))
            if self.choices.allowed(other):
                self._push(other, planned.step_us - exposed_us, bound)

    def _refused(self, answer: Refused) -> None:
        candidate = answer.candidate
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
        best = min(self._best.values(), key=lambda one: one.step_us, default=None)
        told = f"best {best.step_us / 1e3:,.1f} ms: {best.candidate}" if best else "no plan yet"
        self._say(
            f"{now_s - self._begun_s:.0f} s: {len(self._frontier.blocks)} blocks priced, {self._plans} plans "
            f"made; left {len(self._frontier.open)} of {self.tuned.layouts} layouts, {len(self._waiting)} "
            f"candidates; {told}"
        )
