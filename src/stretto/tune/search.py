"""The search for a layout: estimate all, simulate short steps of the best, plan the best of these.

    1. Every layout that the settings allow has a guess of its step, from the nearest block that is priced
       (`tune.block`). One block of each way to shard layers is priced before all others.
    2. The next piece of work is that of the least time. A layout whose own block is not known is priced; one
       with its block becomes candidates: each schedule, with the least computed again that likely fits, and
       an estimate (`tune.estimate`). Of a candidate a short step is simulated, and where that is faster than
       every plan, it is planned at once, quickly: so there is a plan whenever the search ends. One that does
       not fit comes back with more computed again.
    3. What cannot win by its bound is dropped, and what is unlikely to by its estimate (`WITHIN`), once there
       are some to compare it with (`LEAST`).
    4. Where a plan that is the best so far exposes communication in blocks, other numbers of AMPipe's chunks
       are layouts too.
    5. The best are planned in full (`finalists`), also with "auto" for a schedule. The fastest of these wins.

The settings' own candidate is planned first, so that the gain can be told. The global batch is kept, so that
candidates compare by the step alone. The search can end at any time with what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from stretto.capturing.captures import traced_by
from stretto.errors import UsageError
from stretto.ir.stage_maps import AUTO
from stretto.order.policies import DEFAULT
from stretto.price.cluster import Description
from stretto.tune.block import Block
from stretto.tune.choices import VIRTUAL, Candidate, Choices, Layout
from stretto.tune.estimate import Estimate, estimate, fastest_us, guess
from stretto.tune.work import QUICK, Answer, Asked, Planned, Refused, ShortStep, Tuned, Workers, limit_of

WITHIN = 1.10
"""Times the best step, up to which an estimate lets a candidate be simulated. Measured on GPTs over 32
devices: plans take 0.8 to 1.07 times as long as estimated, and similar ones are off by similar factors."""

LEAST = 6
"""Candidates that are simulated whatever their estimates are. Assumed."""

FITS = 1.10
"""Times a device's memory, up to which a candidate's likely peak lets it be planned. Assumed: stages are
uneven, and live memory is freed op by op."""

TURN = 3
"""Of so many pieces of work one at least is a candidate's, as long as there are some."""

FULL_TIMES, FULL_SHARE = 6.0, 0.5
"""Of the time, what is kept for the plans in full: so many times what a quick one takes, since each takes
about three times as long and they come in two rounds; and this part of the whole at most. Assumed."""

FINALISTS = 3
"""Candidates that are planned in full. Assumed."""

MOST_STAGES = 2
"""Stages of a layer at most, of which the shares are asked for: attention and MLP."""

HIDES = 0.02
"""Of a step, what communication in blocks exposes at least where AMPipe's chunks are tried. Assumed."""

SAY_S = 2.0
"""Seconds between two lines of progress."""

BY_BOUND = "slower by its bound than the best plan"
BY_ESTIMATE = f"estimated to take {WITHIN:g} times the best step, or more"
BY_SHORT_STEP = "slower over few microbatches than those that were planned"
PLAN_TOO_LARGE = "too large: simulated or planned, and a rank holds more than a device has"
TOO_LARGE = "too large: parameters, gradients and the optimizer's state alone are more than a device holds"
LIKELY_TOO_LARGE = "too large: with all computed again that can be, likely more than a device holds"
NOT_REACHED = "not reached in the time"


@dataclass(order=True, slots=True)
class _Open:
    """A layout with a guess of its step, or a candidate with an estimate. rows: of a microbatch. bound_us: of
    the layout; key: of its trace; ahead: as in `Estimate`."""

    step_us: float
    rows: float
    what: Layout | Candidate
    key: str = field(compare=False)
    bound_us: float = field(default=0.0, compare=False)
    ahead: int | None = field(default=None, compare=False)

    @property
    def layout(self) -> Layout:
        return self.what if isinstance(self.what, Layout) else self.what.layout


class Search:
    """One tuning. max_seconds: how long it may take in all; say: takes a line of progress every two
    seconds."""

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
        self._quick_s = 0.0
        self._running: dict[Asked, float] = {}
        self._blocks: dict[str, Block] = {}
        self._by_sharding: dict[object, list[Block]] = {}
        self._stages: tuple[int, ...] = ()
        self._shares: Mapping[int, Sequence[float]] = {}
        self._layouts: list[_Open] = []
        self._candidates: list[_Open] = []
        self._seen: dict[Layout | Candidate, _Open] = {}
        self._prices_since = 0
        self._short_us: dict[Candidate, float] = {}
        self._plans: dict[Candidate, Planned] = {}
        self._made = 0
        self._finals: list[Candidate] | None = None
        self._unseen_us = inf

    def run(self, workers: Workers) -> None:
        """Until it is done or its time is over. Raises UsageError where no layout is allowed."""
        self._begin()
        while time.monotonic() < self._end_s:
            while workers.free and (asked := self._next()) is not None:
                self._running[asked] = time.monotonic()
                workers.give(asked)
            if not self._running:
                return
            for asked, answer in workers.answers(SAY_S / 4):
                self._answered(asked, answer, time.monotonic() - self._running.pop(asked))
            self._progress()
        if self._finals is None or self._finals or self._running:
            self.tuned.stopped = "the time was over"

    def result(self) -> Tuned:
        """What it has, now."""
        # Of equal ones a family comes before "auto", which every plan would have to search for again.
        self.tuned.planned = sorted(
            self._plans.values(), key=lambda one: (one.step_us, one.candidate.schedule == AUTO, one.candidate)
        )
        for candidate in self._short_us.keys() - self._plans.keys():
            self._drop(BY_SHORT_STEP, candidate, self._seen[candidate].bound_us)
        for one in (*self._candidates, *self._layouts):
            self._drop(NOT_REACHED, one.what, one.bound_us)
        for message, count in self.choices.refused.items():
            self.tuned.drop(message, count=count)
        self.tuned.unseen_us = None if self._unseen_us == inf else self._unseen_us
        return self.tuned

    def _begin(self) -> None:
        for layout in self.choices.layouts():
            self._add(layout)
            self._progress()
        if not self.tuned.layouts:
            why = "; ".join(text for text, _ in self.choices.refused.most_common(3))
            raise UsageError(
                f"no layout of {self.choices.devices} devices fits these settings: "
                f"{why or 'what is fixed does not multiply to as many'}"
            )
        counts = {one.layout.pp * each for one in self._layouts for each in (1, *VIRTUAL)}
        most = inf if self.choices.layers is None else MOST_STAGES * self.choices.layers
        self._stages = tuple(sorted(count for count in counts if count <= most))
        own = self.choices.own()
        if own is not None and self.choices.allowed(own):
            self._push(own, Estimate(0.0, 0.0), 0.0)

    # The next piece of work.

    def _next(self) -> Asked | None:
        """What a free process does; None where it waits for the others, or nothing is left."""
        kept_s = min(FULL_TIMES * self._quick_s, FULL_SHARE * (self._end_s - self._begun_s))
        late = time.monotonic() + kept_s > self._end_s
        if self._finals is None and not late:
            asked = self._searched()
            if asked is not None or self._running:
                return asked
        if self._finals is None:
            self._finals = finalists(self._plans, self._known_us(), self.choices)
            if late and (self._candidates or self._layouts):
                self.tuned.stopped = "the time was over"
        return Asked(self._finals.pop(0), DEFAULT) if self._finals else None

    def _searched(self) -> Asked | None:
        """Step 2."""
        while True:
            self._prune()
            candidate = min(self._candidates, default=None)
            pricing = {self._key(asked.candidate.layout) for asked in self._running if asked.order is None}
            layout = min((one for one in self._layouts if one.key not in pricing), default=None)
            turn = self._prices_since >= TURN
            if candidate is None and turn:
                known = (one for one in self._layouts if one.key in self._blocks)
                layout = min(known, default=layout)
            if candidate is not None and (layout is None or turn or candidate.step_us <= layout.step_us):
                return self._simulated(candidate)
            if layout is None:
                return None
            if layout.key not in self._blocks:
                return self._priced(layout)
            self._expand(layout)

    def _simulated(self, one: _Open) -> Asked:
        self._candidates.remove(one)
        self._prices_since = 0
        assert isinstance(one.what, Candidate)
        if one.what == self.choices.own():
            return Asked(one.what, QUICK)
        return Asked(one.what, QUICK, short=True, ahead=one.ahead, best_us=self._best_us())

    def _priced(self, one: _Open) -> Asked:
        self._prices_since += 1
        # How stages share the work is asked once: it is about the same in all layouts.
        known = self._shares or any(asked.stages for asked in self._running)
        words, stages = self.choices.again(one.layout), () if known else self._stages
        return Asked(self.choices.plain(one.layout), None, words, stages)

    def _expand(self, one: _Open) -> None:
        """The candidates of a layout."""
        self._layouts.remove(one)
        for family, each in self.choices.orders(one.layout):
            self._candidate(Candidate(one.layout, family, each), one.key, one.bound_us)
            self._progress()

    def _candidate(self, bare: Candidate, key: str, bound_us: float, more_than: object = None) -> None:
        """With the least computed again that likely fits; more_than: the word that did not."""
        block = replace(self._blocks[key], shares=self._shares)
        words = [word for word in self.choices.again(bare.layout) if word in block.again]
        if more_than in words:
            words = words[words.index(more_than) + 1 :]
            if not words:
                return
        needed = inf
        for word in words:
            candidate = replace(bare, recompute=word)
            try:
                result = estimate(candidate, block, block.again[word], self._found, FITS * self._limit)
            except UsageError as error:
                self.tuned.drop(str(error), candidate)
                return
            if result.peak_bytes <= FITS * self._limit:
                self._push(candidate, result, bound_us)
                return
            needed = min(needed, result.peak_bytes)
        self._too_large(LIKELY_TOO_LARGE, bare, 0.0 if needed == inf else needed)

    def _push(self, candidate: Candidate, result: Estimate, bound_us: float) -> None:
        if candidate not in self._seen:
            one = _Open(result.step_us, 0.0, candidate, self._key(candidate.layout), bound_us, result.ahead)
            self._seen[candidate] = one
            self._candidates.append(one)

    def _prune(self) -> None:
        """Step 3."""
        known_us = self._known_us()
        best_us = self._best_us()
        most_us = WITHIN * min(known_us.values()) if len(known_us) >= LEAST else inf

        def stays(one: _Open) -> bool:
            if one.bound_us >= best_us:
                self.tuned.drop(BY_BOUND, one.what)
            elif known_us and one.step_us > most_us:
                self._drop(LIKELY_TOO_LARGE if one.step_us == inf else BY_ESTIMATE, one.what, one.bound_us)
            else:
                return True
            return False

        self._candidates = [one for one in self._candidates if stays(one)]
        self._layouts = [one for one in self._layouts if stays(one)]

    def _drop(self, reason: str, what: Candidate | Layout, bound_us: float) -> None:
        """Drop what could still be faster than all that was planned."""
        self.tuned.drop(reason, what)
        self._unseen_us = min(self._unseen_us, bound_us)

    def _best_us(self) -> float:
        return min((one.step_us for one in self._plans.values()), default=inf)

    def _known_us(self) -> dict[Candidate, float]:
        """What a step takes: by its plan, else by its short step."""
        return self._short_us | {candidate: one.step_us for candidate, one in self._plans.items()}

    # Layouts and their guesses.

    def _add(self, layout: Layout) -> None:
        """One more layout, if it is new."""
        if layout in self._seen:
            return
        rows = self.choices.settings.training.global_batch / layout.pieces
        one = self._seen[layout] = _Open(0.0, rows, layout, self._key(layout))
        self.tuned.layouts += 1
        if layout.sharding not in self._by_sharding or self._guessed(one):
            self._layouts.append(one)

    def _key(self, layout: Layout) -> str:
        """Equal for layouts that one trace serves."""
        if layout in self._seen:
            return self._seen[layout].key
        return traced_by(self.choices.settings_of(self.choices.plain(layout)).parallel)

    def _guessed(self, one: _Open) -> bool:
        """Guess and bound of a layout from the nearest block; False for one that cannot fit."""
        known = self._blocks.get(one.key)
        near = min(self._by_sharding[one.layout.sharding], key=lambda block: abs(block.rows - one.rows))
        block = known or near.scaled(one.rows)
        # Rates may be better with other rows: then the bound is of arithmetic only.
        least_us = None if known else fastest_us(block.flops, self._found, self.choices.settings.precision)
        result = guess(
            one.layout,
            block,
            self.choices.again(one.layout),
            FITS * self._limit,
            self.choices.several_stages(one.layout),
            least_us,
        )
        one.step_us, one.bound_us = result.step_us, result.bound_us
        fixed_bytes = block.fixed_bytes / one.layout.pp
        if fixed_bytes > self._limit:
            self._too_large(TOO_LARGE, one.layout, fixed_bytes)
        elif known is not None and one.step_us == inf:
            self._too_large(LIKELY_TOO_LARGE, one.layout, result.peak_bytes)
        else:
            return True
        return False

    def _too_large(self, reason: str, what: Candidate | Layout, needs_bytes: float) -> None:
        self.tuned.drop(reason, what)
        self.tuned.needs(what, needs_bytes)

    # Answers.

    def _answered(self, asked: Asked, answer: Answer, took_s: float) -> None:
        candidate = asked.candidate
        if asked.order is None:
            assert isinstance(answer, (Block, Refused))
            self._block_answered(candidate.layout, answer)
        elif isinstance(answer, ShortStep):
            self._short_us[candidate] = answer.step_us
        elif isinstance(answer, Planned):
            self._planned(answer)
            if asked.order == QUICK:
                self._quick_s = max(self._quick_s, took_s)
        elif isinstance(answer, Refused):
            self._refused(answer, asked.order)

    def _block_answered(self, layout: Layout, answer: Block | Refused) -> None:
        """A block, from which guesses of layouts that shard in the same way follow."""
        key, sharding = self._key(layout), layout.sharding
        if isinstance(answer, Refused):
            gone = [one.what for one in self._layouts if one.key == key]
            self._layouts = [one for one in self._layouts if one.key != key]
            self.tuned.drop(answer.why, gone[0] if gone else layout, len(gone))
            return
        self._shares = self._shares or answer.shares
        self._blocks[key] = answer
        self._by_sharding.setdefault(sharding, []).append(answer)
        self._layouts = [
            one for one in self._layouts if one.layout.sharding != sharding or self._guessed(one)
        ]

    def _planned(self, plan: Planned) -> None:
        candidate, best_us = plan.candidate, self._best_us()
        self._made += 1
        before = self._plans.get(candidate)
        if before is None or plan.order == DEFAULT or plan.step_us <= before.step_us:
            self._plans[candidate] = plan
        if candidate == self.choices.own():
            self.tuned.own = self._plans[candidate]
        # Step 4.
        exposed_us = sum(us for axis, us in plan.exposed_us.items() if axis in ("tp", "ep"))
        chunks = plan.order == QUICK and plan.step_us < best_us and exposed_us >= HIDES * plan.step_us
        if chunks and candidate.layout.ampipe_degree == 1:
            for degree in self.choices.degrees(candidate.layout):
                self._add(replace(candidate.layout, ampipe_degree=degree))

    def _refused(self, answer: Refused, order: str) -> None:
        candidate = answer.candidate
        known = self._short_us.pop(candidate, None), self._plans.pop(candidate, None)
        if order == QUICK or known != (None, None):
            self.tuned.drop(PLAN_TOO_LARGE if answer.by_memory else answer.why, candidate)
        if order == QUICK:
            if candidate == self.choices.own():
                self.tuned.own = answer
            self.tuned.needs(candidate, answer.bytes_needed)
            one = self._seen[candidate]
            if answer.by_memory and one.key in self._blocks:
                self._candidate(candidate, one.key, one.bound_us, candidate.recompute)
        elif known != (None, None) and self._finals is not None:
            # What is written is planned in full wherever it is used: one more takes its place.
            full = {one.candidate for one in self._plans.values() if one.order == DEFAULT}
            full |= {asked.candidate for asked in self._running} | {*self._finals}
            self._finals += [one for one in ranked(self._known_us()) if one not in full][:1]

    def _progress(self) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_S:
            return
        self._said_s = now_s
        best = min(self._plans.values(), key=lambda one: one.step_us, default=None)
        self._say(
            f"{now_s - self._begun_s:.0f} s: {len(self._blocks)} blocks priced, {len(self._short_us)} short "
            f"steps simulated, {self._made} plans made; left {len(self._layouts)} of {self.tuned.layouts} "
            f"layouts, {len(self._candidates)} candidates; "
            + (f"best {best.step_us / 1e3:,.1f} ms: {best.candidate}" if best else "no plan yet")
        )


def ranked(known_us: Mapping[Candidate, float]) -> list[Candidate]:
    """The fastest first."""
    return sorted(known_us, key=lambda one: (known_us[one], one))


def finalists(
    planned: Mapping[Candidate, Planned], known_us: Mapping[Candidate, float], choices: Choices
) -> list[Candidate]:
    """What is planned in full, what wins most likely first, as the time may be over before the last. The
    settings' own is there, so that the gain is told of plans of one kind."""
    best, others = ranked(known_us)[:1], ranked(known_us)[1:FINALISTS]
    chosen = [*best, *(auto for one in best for auto in choices.with_auto(one)), *others]
    own = choices.own()
    return [*chosen, own] if own in planned and own not in chosen else chosen
