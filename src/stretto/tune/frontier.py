"""Layouts that are not yet candidates, in order of a guess, and the blocks that were priced for them.

A layout's guess is of its own block where that is known, else of a block that spreads layers in the same way
over other rows, scaled. Of a way to spread that is not known yet, one layout is priced before all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from stretto.capturing.captures import traced_by
from stretto.price.cluster import Description
from stretto.tune.block import Block, Work
from stretto.tune.choices import Choices, Layout
from stretto.tune.estimate import bound_us, fastest_us, guess_us, least_bytes, likely_bytes
from stretto.tune.outcome import Tuned
from stretto.tune.work import limit_of

FITS = 1.10
"""Times a device's memory, up to which what a candidate likely holds lets it be planned. Assumed: stages are
uneven, and what is live is freed op by op."""

TOO_LARGE = "too large: parameters, gradients and the optimizer's state alone are more than a device holds"
LIKELY_TOO_LARGE = "too large: with all computed again that can be, likely more than a device holds"

Spread = tuple[object, ...]
"""How layers are spread and cut; rows beside it make a trace."""


@dataclass(slots=True)
class Look:
    """A layout. key: of its trace. work: of a microbatch, with what must likely be computed again to fit;
    None where no block tells. asked: whether it is being priced."""

    layout: Layout
    key: str
    rows: float
    guess_us: float = 0.0
    bound_us: float = 0.0
    work: Work | None = None
    asked: bool = False

    @property
    def order(self) -> tuple[float, float, Layout]:
        return (self.guess_us, self.rows, self.layout)


class Frontier:
    """The layouts of one tuning. What is dropped is noted in `tuned`."""

    def __init__(self, choices: Choices, found: Description, tuned: Tuned) -> None:
        self._choices = choices
        self._found = found
        self._tuned = tuned
        self._limit = limit_of(found) or inf
        self._by_spread: dict[Spread, list[Block]] = {}
        self._seen: set[Layout] = set()
        self.blocks: dict[str, Block] = {}
        self.open: list[Look] = []

    def add(self, layout: Layout) -> bool:
        """One more layout; False for one that was there."""
        if layout in self._seen:
            return False
        self._seen.add(layout)
        rows = self._choices.settings.training.global_batch / layout.pieces
        look = Look(layout, self.key(layout), rows)
        if spread_of(layout) not in self._by_spread or self._judged(look):
            self.open.append(look)
        return True

    def key(self, layout: Layout) -> str:
        """Equal for layouts that one trace serves."""
        return traced_by(self._choices.settings_of(self._choices.plain(layout)).parallel)

    def sort(self) -> None:
        """Put them in order; call it after `add`."""
        self.open.sort(key=lambda look: look.order)

    def first(self, priced: bool = False) -> Look | None:
        """The one with the least guess that nobody prices. priced: of those that were."""
        known = (look for look in self.open if not priced or look.key in self.blocks)
        return next((look for look in known if not look.asked), None)

    def ask(self, key: str) -> None:
        """Layouts of this trace are being priced."""
        for look in self.open:
            look.asked |= look.key == key

    def take(self, look: Look) -> None:
        """It becomes candidates, or is dropped."""
        self.open.remove(look)

    def priced(self, key: str, layout: Layout, block: Block) -> None:
        """A block is known: guesses of those like it follow."""
        self.blocks[key] = block
        self._by_spread.setdefault(spread_of(layout), []).append(block)
        left: list[Look] = []
        for look in self.open:
            look.asked &= look.key != key
            if spread_of(look.layout) != spread_of(layout) or self._judged(look):
                left.append(look)
        self.open = left
        self.sort()

    def refused(self, key: str, why: str) -> None:
        """Nothing of this trace can be captured."""
        gone = [look for look in self.open if look.key == key]
        self.open = [look for look in self.open if look.key != key]
        if gone:
            self._tuned.drop(why, gone[0].layout, len(gone))

    def _judged(self, look: Look) -> bool:
        """Guess and bound of a layout, from the nearest block; False for one that cannot fit."""
        layout = look.layout
        known = self.blocks.get(look.key)
        near = min(self._by_spread[spread_of(layout)], key=lambda block: abs(block.rows - look.rows))
        block = known or near.scaled(look.rows)
        least = least_bytes(layout, block)
        if least > self._limit:
            self._tuned.drop(TOO_LARGE, layout)
            self._tuned.needs(layout, least)
            return False
        words = self._choices.again(layout)
        works = [block.again[word] for word in words if word in block.again]
        look.work = next((work for work in works if self._fits(layout, block, work)), None)
        if look.work is None and known is not None:
            self._tuned.drop(LIKELY_TOO_LARGE, layout)
            self._tuned.needs(layout, min(likely_bytes(layout, block, work) for work in works))
            return False
        look.guess_us = inf if look.work is None else guess_us(layout, look.work)
        if known is not None:
            look.bound_us = bound_us(layout, works[0], self.virtual(layout))
        else:
            # Rates may be better with other rows: of arithmetic alone.
            us = fastest_us(block.flops, self._found, self._choices.settings.precision)
            look.bound_us = bound_us(layout, Work((us, 0.0, 0.0), {}, 0.0))
        return True

    def _fits(self, layout: Layout, block: Block, work: Work) -> bool:
        return likely_bytes(layout, block, work) <= FITS * self._limit

    def virtual(self, layout: Layout) -> bool:
        """Whether a rank may have several stages."""
        layers = self._choices.layers
        return layers is None or layers >= 2 * layout.pp


def spread_of(layout: Layout) -> Spread:
    """How a layout spreads and cuts layers."""
    return (layout.tp, layout.ep, layout.sequence_parallel, layout.ampipe_degree)


def words_of(
    choices: Choices, layout: Layout, again: Mapping[str | int, Work]
) -> list[tuple[str | int, Work]]:
    """What a layout's backward may compute again, the least first, with the work that it makes."""
    return [(word, again[word]) for word in choices.again(layout) if word in again]
