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
from stretto.tune.choices import VIRTUAL, Candidate, Choices, LayoutChoice
from stretto.tune.estimate import Estimate, estimate, fastest_us, guess
from stretto.tune.work import Asked, Refused, Tuned

FITS = 1.10
"""Times a device's memory, up to which a candidate's likely peak lets it be planned. Assumed: stages are
uneven, and live memory is freed op by op."""

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

    def add(self, layout: LayoutChoice) -> None:
        """One more layout, if it is new."""
        if layout in self._seen:
            return
        rows = self._choices.settings.training.global_batch / layout.pieces
        one = self._seen[layout] = OpenLayout(0.0, rows, layout, self.key(layout))
        self._tuned.layouts += 1
        if layout.sharding not in self._by_sharding or self._guessed(one):
            self.open.append(one)

    def key(self, layout: LayoutChoice) -> str:
        """Equal for layouts that one block serves, of one trace."""
        if layout in self._seen:
            return self._seen[layout].key
        parallel = self._choices.settings_of(self._choices.plain(layout)).parallel
        copies = f" dp={parallel.dp}" if scatters(parallel.zero) else ""
        return f"{traced_by(parallel)}{copies}"

    def first(self, busy: Collection[Asked], priced: bool = False) -> OpenLayout | None:
        """The one with the least guess that is not being priced. priced: of those that were, if there are."""
        pricing = {self.key(asked.candidate.layout) for asked in busy if asked.order is None}
        known = [one for one in self.open if one.key in self.blocks] if priced else []
        return min(known or (one for one in self.open if one.key not in pricing), default=None)

    def to_price(self, one: OpenLayout) -> Asked:
        """The piece of work that prices its block. How stages share the work is asked once: it is about the
        same in all layouts."""
        stages: Sequence[int] = ()
        if not self._shares_asked:
            self._shares_asked = True
            most = inf if self._choices.layers is None else MOST_STAGES * self._choices.layers
            counts = {other.layout.pp * each for other in self.open for each in (1, *VIRTUAL)}
            stages = sorted(count for count in counts if count <= most)
        words = self._choices.again(one.layout)
        return Asked(self._choices.plain(one.layout), None, words, tuple(stages))

    def priced(self, layout: LayoutChoice, answer: TuneBlock | Refused) -> None:
        """A block, from which guesses of layouts that shard in the same way follow; or why none of its trace
        can be captured."""
        key, sharding = self.key(layout), layout.sharding
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
        result = guess(one.layout, block, words, FITS * self._limit, several, least_us)
        one.step_us, one.bound_us = result.step_us, result.bound_us
        fixed_bytes = block.fixed_bytes(one.layout) / one.layout.pp
        if fixed_bytes > self._limit:
            self._too_large(TOO_LARGE, one.layout, fixed_bytes)
        elif known is not None and one.step_us == inf:
            self._too_large(LIKELY_TOO_LARGE, one.layout, result.peak_bytes)
        else:
            return True
        return False

    def estimated(self, bare: Candidate, above: object = None) -> tuple[Candidate, Estimate] | None:
        """The candidate with the least computed again that likely fits; above: the word that did not. Raises
        UsageError for a schedule that cannot be made."""
        block = self.blocks[self.key(bare.layout)]
        if self._shares is not None:
            block = replace(block, shares=self._shares.shares)
        words = [word for word in self._choices.again(bare.layout) if word in block.again]
        words = words[words.index(above) + 1 if above in words else 0 :]
        needs: list[float] = []
        for word in words:
            candidate = replace(bare, recompute=word)
            result = estimate(candidate, block, block.again[word], self._cluster, FITS * self._limit)
            if result.peak_bytes <= FITS * self._limit:
                return candidate, result
            needs.append(result.peak_bytes)
        if needs:
            self._too_large(LIKELY_TOO_LARGE, bare, min(needs))
        return None

    def _too_large(self, reason: str, what: Candidate | LayoutChoice, needs_bytes: float) -> None:
        self._tuned.drop(reason, what)
        self._tuned.needs(what, 0.0 if needs_bytes == inf else needs_bytes)
