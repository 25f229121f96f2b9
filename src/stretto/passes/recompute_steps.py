"""What a stage could compute again instead of keeping it, the most bytes for each microsecond first.

    1. A candidate is a storage that F keeps for the backward, and no other block's forward reads. Repeating
       it takes the ops between it and what is kept; several candidates share those.
    2. In each block the candidate that saves most bytes for each microsecond is the next step; then those
       that shared ops with it, or were repeated from it, are looked at again.
    3. Steps of several blocks are merged, best first.

Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stretto.ir.action import Phase
from stretto.ir.costs import Costs
from stretto.ir.program import Op, Stage
from stretto.passes.recompute import storages
from stretto.passes.recompute_blocks import Blocks, borders


@dataclass(slots=True)
class Step:
    """One more storage is not kept. stage, block: whose; nbytes: of it; ops: those repeated for it that were
    not repeated before; us: their time."""

    stage: int
    block: str
    nbytes: int
    ops: frozenset[str]
    us: float

    @property
    def rate(self) -> float:
        return self.nbytes / max(self.us, 1e-3)


def merged(blocks: Sequence[Sequence[Step]]) -> Iterator[Step]:
    """Steps of several blocks, the best first; those of one block in their order."""
    at = [0] * len(blocks)
    waiting = {index for index, steps in enumerate(blocks) if steps}
    while waiting:
        best = max(waiting, key=lambda index: (blocks[index][at[index]].rate, -index))
        yield blocks[best][at[best]]
        at[best] += 1
        if at[best] == len(blocks[best]):
            waiting.discard(best)


@dataclass(slots=True)
class _Candidate:
    """A storage that is kept. reads: what the backward reads of it; ops: what repeating it takes, as far as
    it is not repeated yet; stops: kept storages that these read."""

    nbytes: int
    reads: list[str] = field(default_factory=list)
    ops: frozenset[str] = frozenset()
    stops: frozenset[str] = frozenset()
    us: float = 0.0


class StageChoice:
    """Steps 1 and 2 for one stage."""

    def __init__(self, stage: Stage, blocks: Blocks, costs: Costs, *, cheap_only: bool) -> None:
        self.stage = stage
        self.costs = costs
        self.cheap_only = cheap_only
        self.forward = stage.ops[Phase.F]
        self.made = {op.name: op for op in self.forward}
        self.root = storages(self.forward)
        self.home = {op.name: blocks.of(op) for op in self.forward}
        self.borders = borders(stage, blocks, self.root)
        # Storages that are kept for the backward, and can be repeated.
        self.kept: dict[str, _Candidate] = {}
        for phase in (Phase.I, Phase.W):
            for op in stage.ops[phase]:
                for name in op.uses:
                    owner = self.root.get(name, "")
                    if owner in self.made and owner not in self.borders:
                        candidate = self.kept.setdefault(owner, _Candidate(self.made[owner].nbytes))
                        candidate.reads.append(name)
        self.repeated: set[str] = set()

    def steps(self) -> list[list[Step]]:
        """For each block its steps, in order."""
        by_block: dict[str, dict[str, _Candidate]] = {}
        for owner, candidate in self.kept.items():
            by_block.setdefault(self.home[owner], {})[owner] = candidate
        return [list(self._block(block, waiting)) for block, waiting in by_block.items()]

    def _block(self, block: str, waiting: dict[str, _Candidate]) -> Iterator[Step]:
        for owner in waiting:
            self._look(owner)
        while True:
            open_ = [owner for owner, candidate in waiting.items() if self._allowed(candidate)]
            if not open_:
                return
            best = max(open_, key=lambda owner: waiting[owner].nbytes / max(waiting[owner].us, 1e-3))
            chosen = waiting.pop(best)
            del self.kept[best]
            self.repeated |= chosen.ops
            yield Step(self.stage.index, block, chosen.nbytes, chosen.ops, chosen.us)
            for owner, candidate in waiting.items():
                if best in candidate.stops or candidate.ops & chosen.ops:
                    self._look(owner)

    def _look(self, owner: str) -> None:
        """What it takes now to repeat a storage."""
        candidate = self.kept[owner]
        ops: set[str] = set()
        stops: set[str] = set()
        reached = list(candidate.reads)
        while reached:
            name = reached.pop()
            if name in ops or name in self.repeated:
                continue
            ops.add(name)
            for use in self.made[name].uses:
                source = self.root.get(use, "")
                if source not in self.made or source in self.borders:
                    continue
                if source != owner and source in self.kept:
                    stops.add(source)
                elif self.home[source] == self.home[owner]:
                    reached.append(use)
        candidate.ops, candidate.stops = frozenset(ops), frozenset(stops)
        candidate.us = sum(self._us(self.made[name]) for name in ops)

    def _us(self, op: Op) -> float:
        """An op's time, with that of the collective that it starts: nothing may be there to hide it."""
        us = self.costs.op_us.get((self.stage.index, op.name), 0.0)  # views and waits may be without a cost
        asked = op.collective
        cost = None if asked is None else self.costs.collectives.get((asked.axis, asked.kind))
        return us if cost is None or asked is None else us + cost.curve.us(asked.nbytes)

    def _allowed(self, candidate: _Candidate) -> bool:
        if not candidate.nbytes:
            return False
        return not self.cheap_only or not any(self._is_dear(self.made[name]) for name in candidate.ops)

    def _is_dear(self, op: Op) -> bool:
        """A collective, or a product with a weight."""
        weight = any(self.root.get(name, name).startswith("param/") for name in op.uses)
        return op.collective is not None or (op.flops > 0 and weight)
