"""What a pass takes and gives: the ops of a whole step, and what must stay.

Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.ir.program import Op


@dataclass(frozen=True, slots=True)
class Graph:
    """ops: in an order that can be run. roots: values that must keep their names (the loss, gradients,
    updates). origin: for an op that a pass made, the captured op in whose place it stands."""

    ops: tuple[Op, ...]
    roots: frozenset[str]
    origin: Mapping[str, str] = field(default_factory=dict)

    def users(self) -> dict[str, list[Op]]:
        """Value -> the ops that use it."""
        found: dict[str, list[Op]] = defaultdict(list)
        for op in self.ops:
            for name in op.uses:
                found[name].append(op)
        return found
