"""Layouts that are not candidates yet, in order of a guess, and the blocks that were priced for them.

A layout's guess is of its own block where that is known, else of a block that shards layers in the same way
over other rows, scaled. Of each way to shard layers one layout is priced before all others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from stretto.capturing.captures import traced_by
from stretto.ir.parameters import scatters
from stretto.price.cluster import Description
from stretto.tune.block import TuneBlock
from stretto.tune.choices import VIRTUAL, Candidate, Choices, Dealt, LayoutChoice
from stretto.tune.estimate import Estimate, estimate, fastest_us, guess
from stretto.tune.work import Asked, Refused, Tuned

FITS = 1.20
"""Times a device's memory, up to which a candidate's likely peak lets it be planned. Assumed: estimates are
of ops in the order of a list, and a plan that waits at once was seen to need 0.88 of that."""

MOST_STAGES = 2
"""Stages of a layer at most, of which the shares are asked for: attention and MLP."""

TOO_LARGE = "too large: parameters, gradients and the optimizer's state alone are more than a device has"
LIKELY_TOO_LARGE = "too large: with all computed again that can be, likely more than a device has"


@dataclass(order=True, slots=True)
class OpenLayout:
    """A layout with a guess of its step. rows: of a microbatch. bound_us: no plan of it is faster; key: of
    its trace."""

    step_us: float
    rows: float
    layout: LayoutChoice
    key: str = field(compare=False)
    bound_us: float = field(default=0.0, compare=False)


class Layouts:
    """The layouts of one tuning. What is dropped is noted in `tuned`."""

    def __init__(self, choices: Choices, cluster: Description, tuned: Tuned) -> None:
        self.open: list[OpenLayout] = []
        self.blocks: dict[str, TuneBlock] = {}
        self._choices = choices
        self._cluster = cluster
        self._tuned = tuned
        self._limit = cluster.memory_bytes or inf
        self._by_sharding: dict[object, list[TuneBlock]] = {}
        self._seen: dict[LayoutChoice, OpenLayout] = {}
        self._shares_asked = False
        self._shares: TuneBlock | None = None
        self._keys: dict[tuple[LayoutChoice, Dealt], str] = {}
        self._gone = set[str]()
        """Keys of blocks that cannot be captured."""
        self._tight = set[LayoutChoice]()
        """Layouts that need more than was estimated."""
        self._refused: dict[Candidate, float] = {}
        """Candidates that do, with their bytes."""
        self._noted = set[tuple[Candidate, Dealt]]()
        """What was dropped where other kinds fit."""

    def add(self, layout: LayoutChoice) -> None:
        """One more layout, if it is new."""
        if layout in self._seen:
            return
        rows = self._choices.settings.training.global_batch / layout.pieces
        one = self._seen[layout] = OpenLayout(0.0, rows, layout, self.key(layout))
        self._tuned.layouts += 1
        if layout.sharding not in self._by_sharding or self._guessed(one):
            self.open.append(one)

    def key(self, layout: LayoutChoice, dealt: Dealt | None = None) -> str:
        """Equal for layouts that one block serves, of one trace: where microbatches scatter and gather, over
        as many ranks."""
        of = layout, dealt or self._choices.kinds(layout)[0][0]
        if of not in self._keys:
            plain = replace(self._choices.plain(layout), dealt=of[1])
            parallel = self._choices.settings_of(plain).parallel
            shared = f" zero={parallel.zero} over {parallel.dp_shard or parallel.dp}"
            self._keys[of] = f"{traced_by(parallel)}{shared if scatters(parallel.zero) else ''}"
        return self._keys[of]

    def first(self, busy: Collection[Asked], priced: bool = False) -> OpenLayout | None:
        """The one with the least guess that is not being priced. priced: of those that were, if there are."""
        pricing = {self.key(a.candidate.layout, a.candidate.dealt) for a in busy if a.order is None}
        left = {one.layout: self._left(one) for one in self.open}
        known = [one for one in self.open if left[one.layout] is None] if priced else []

        def free(one: OpenLayout) -> bool:
            dealt = left[one.layout]
            return dealt is None or self.key(one.layout, dealt) not in pricing

        return min(known or filter(free, self.open), default=None)

    def kinds(self, layout: LayoutChoice) -> list[Dealt]:
        """What copies may keep in parts, the least first: of each kind that over the fewest ranks with which
        nothing need be computed again, else over all. Of a layout whose block is known."""
        word = self._choices.again(layout)[0]
        return [
            next((one for one in kind if self._least(layout, one, word) <= self._limit), kind[-1])
            for kind in self._choices.kinds(layout)
        ]

    def _least(self, layout: LayoutChoice, dealt: Dealt, word: str | int) -> float:
        """Bytes that a rank has at least, by the block without what microbatches gather."""
        block = self.blocks[self.key(layout)]
        work = block.again[word]
        live = work.saved_bytes * min(layout.microbatches, layout.pp)
        extra = work.extra.of(layout.pp == 1, layout.microbatches, layout.pp)
        return (block.fixed_bytes(layout, dealt) + live) / layout.pp + extra

    def _left(self, one: OpenLayout) -> Dealt | None:
        """Of a layout, the kind whose block is to be priced next: the first, and where that of others, which
        communicate less, has more than a device has, those that scatter in microbatches."""
        layout = one.layout
        if one.key not in self.blocks:
            return self._choices.kinds(layout)[0][0]
        kinds = self.kinds(layout)
        once = [dealt for dealt in kinds if not scatters(dealt.zero)]
        word = self._choices.again(layout)[0]
        if layout not in self._tight and any(self._least(layout, of, word) <= self._limit for of in once):
            return None
        known = self.blocks.keys() | self._gone
        return next((dealt for dealt in kinds if self.key(layout, dealt) not in known), None)

    def to_price(self, one: OpenLayout) -> Asked | None:
        """The piece of work that prices a block of it; None where none is left. How stages share the work is
        asked once: it is about the same in all layouts."""
        dealt = self._left(one)
        if dealt is None:
            return None
        stages: Sequence[int] = ()
        if not self._shares_asked:
            self._shares_asked = True
            most = inf if self._choices.layers is None else MOST_STAGES * self._choices.layers
            counts = {other.layout.pp * each for other in self.open for each in (1, *VIRTUAL)}
            stages = sorted(count for count in counts if count <= most)
        words = self._choices.again(one.layout)
        plain = replace(self._choices.plain(one.layout), dealt=dealt)
        return Asked(plain, None, words, tuple(stages))

    def priced(self, of: Candidate, answer: TuneBlock | Refused) -> None:
        """A block, from which guesses of layouts that shard in the same way follow; or why none of its trace
        can be captured."""
        layout = of.layout
        key, sharding = self.key(layout, of.dealt), layout.sharding
        if key != self.key(layout):
            if isinstance(answer, Refused):
                self._tuned.drop(answer.why, of)
                self._gone.add(key)
            else:
                self.blocks[key] = answer
            return
        if isinstance(answer, Refused):
            gone = [one for one in self.open if one.key == key]
            self.open = [one for one in self.open if one.key != key]
            self._tuned.drop(answer.why, layout, len(gone))
            self._shares_asked = self._shares is not None
            return
        self._shares = self._shares or (answer if answer.shares else None)
        self.blocks[key] = answer
        self._by_sharding.setdefault(sharding, []).append(answer)
        self.open = [one for one in self.open if one.layout.sharding != sharding or self._guessed(one)]

    def _guessed(self, one: OpenLayout) -> bool:
        """Guess and bound of a layout from the nearest block; False for one that cannot fit."""
        known = self.blocks.get(one.key)
        near = min(self._by_sharding[one.layout.sharding], key=lambda block: abs(block.rows - one.rows))
        block = known or near.scaled(one.rows)
        # Rates may be better with other rows: then the bound is of arithmetic only.
        least_us = None if known else fastest_us(block.flops, self._cluster, self._choices.settings.precision)
        words, several = self._choices.again(one.layout), self._choices.several_stages(one.layout)
        most = self._choices.kinds(one.layout)[-1][-1]
        result = guess(one.layout, block, words, FITS * self._limit, several, most, least_us)
        one.step_us, one.bound_us = result.step_us, result.bound_us
        fixed_bytes = block.fixed_bytes(one.layout, most) / one.layout.pp
        if fixed_bytes > self._limit:
            self._too_large(TOO_LARGE, one.layout, fixed_bytes)
        elif known is not None and one.step_us == inf:
            self._too_large(LIKELY_TOO_LARGE, one.layout, result.peak_bytes)
        else:
            return True
        return False

    def estimated(self, bare: Candidate) -> list[tuple[Candidate, Estimate]]:
        """What may be the fastest with these stages and this schedule: of each kind of what copies keep in
        parts, with the least computed again that likely fits, if that is less than with kinds that keep less
        in parts.

        Raises UsageError for a schedule that cannot be made."""
        words = self._choices.again(bare.layout)
        result: list[tuple[Candidate, Estimate]] = []
        large: dict[Candidate, float] = {}
        for dealt in self.kinds(bare.layout):
            block = self.blocks.get(self.key(bare.layout, dealt))
            if block is None:
                continue
            before = min((words.index(one.recompute) for one, _ in result), default=len(words))
            for word in words[:before]:
                candidate = replace(bare, recompute=word, dealt=dealt)
                if word not in block.again:
                    continue
                if candidate in self._refused:
                    large[candidate] = self._refused[candidate]
                    continue
                made = self._estimate(candidate, block)
                if made.peak_bytes > FITS * self._limit:
                    large[candidate] = made.peak_bytes
                else:
                    result.append((candidate, made))
                    break
        fitting = {one.dealt for one, _ in result}
        for candidate, _ in result:
            larger = {one.dealt: n for one, n in large.items() if one.recompute == candidate.recompute}
            self._tuned.larger[candidate] = larger
        for candidate, nbytes in large.items():
            if not result:
                self._too_large(LIKELY_TOO_LARGE, candidate, nbytes)
            elif candidate.dealt not in fitting and (bare, candidate.dealt) not in self._noted:
                self._noted.add((bare, candidate.dealt))
                self._tuned.drop(f"zero = {candidate.dealt.zero} is {LIKELY_TOO_LARGE}", candidate)
        return result

    def beside(self, candidate: Candidate) -> list[tuple[Candidate, Estimate]]:
        """The same with the other kinds that communicate once a step, as far as they likely fit."""
        layout = candidate.layout
        others = [] if scatters(candidate.dealt.zero) else self.kinds(layout)
        once = (of for of in others if not scatters(of.zero) and of.zero != candidate.dealt.zero)
        block = self.blocks[self.key(layout)]
        made = [(one, self._estimate(one, block)) for one in (replace(candidate, dealt=of) for of in once)]
        return [pair for pair in made if pair[1].peak_bytes <= FITS * self._limit]

    def _estimate(self, candidate: Candidate, block: TuneBlock) -> Estimate:
        """With as much in full for a step as fits, of kinds that scatter in microbatches."""
        layout, word = candidate.layout, candidate.recompute
        if self._shares is not None:
            block = replace(block, shares=self._shares.shares)
        most = FITS * self._limit
        made = estimate(candidate, block, block.again[word], self._cluster, most)
        once = self.blocks[self.key(layout)]
        if not scatters(candidate.dealt.zero) or once is block or made.step_us == inf:
            return made
        once = replace(once, shares=block.shares)
        fuller = replace(candidate, dealt=replace(candidate.dealt, zero=1))
        full = estimate(fuller, once, once.again[word], self._cluster)
        room = max(0.0, self._limit - made.peak_bytes) / max(1.0, full.peak_bytes - made.peak_bytes)
        gain_us = max(0.0, made.step_us - full.step_us)
        return replace(made, step_us=made.step_us - min(1.0, room) * gain_us)

    def refused(self, candidate: Candidate, needs_bytes: float) -> None:
        """A candidate that needs more memory than a device has."""
        self._refused[candidate] = needs_bytes
        layout = candidate.layout
        if layout not in self._tight and self.key(layout) in self.blocks:
            self._tight.add(layout)
            if self._left(self._seen[layout]) is not None:
                self.open.append(self._seen[layout])

    def _too_large(self, reason: str, what: Candidate | LayoutChoice, needs_bytes: float) -> None:
        self._tuned.drop(reason, what)
        self._tuned.needs(what, 0.0 if needs_bytes == inf else needs_bytes)
