"""Small tensors that a step makes for users to see, besides its loss: what they are, and what came of them.

A model's code names them (`stretto.backend.observe_adapter`); nothing in a step depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Joined = Literal["sum", "max"]
"""How values of microbatches, of calls, and of ranks with other data become one."""

ROWS = "rows"
"""Name of: the rows that routers send to each expert of a layer."""
DROPPED = "dropped"
"""Name of: those of them that no expert computes, as there was no room."""
BUFFER = "buffer"
"""Name of: rows for the rank that is sent most, over the mean of the ranks."""
NO_ROOM = "no_room"
"""Name of: the same where there is no room for so many, which ends the step; else 0. It is not shown."""
RETURNED = "returned/"
"""How names begin of what the loss function returns as metrics: `returned/<how>/<name>`, of which `mean` and
`sum` are one value, `total` and `count` two of one metric. A step returns them; nothing else shows them."""

MOST_ELEMENTS = 4096
"""Of a metric: as many as a layer has experts, or a model classes, and no activations. Assumed."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A value of a stage's forward.

    module: the module whose code names it, and may name several so: they become one. partial: axes, besides
    those over which the loss is summed, along which each rank has its own; along others they are equal.
    """

    module: str
    name: str
    stage: int
    value: str
    joined: Joined = "sum"
    partial: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """A metric of all ranks of the run over some steps: of each of its elements the mean of the steps, the
    least and the most."""

    module: str
    name: str
    joined: Joined
    steps: int
    mean: tuple[float, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]

    def and_then(self, later: Observed) -> Observed:
        """Of these steps and of those that followed."""
        steps = self.steps + later.steps
        pairs = zip(self.mean, later.mean, strict=True)
        return Observed(
            self.module,
            self.name,
            self.joined,
            steps,
            tuple((one * self.steps + other * later.steps) / steps for one, other in pairs),
            tuple(map(min, self.least, later.least)),
            tuple(map(max, self.most, later.most)),
        )


def one_after_another(stretches: Iterable[tuple[Observed, ...]]) -> tuple[Observed, ...]:
    """All metrics over all stretches of steps."""
    result: dict[tuple[str, str], Observed] = {}
    for stretch in stretches:
        for one in stretch:
            before = result.get((one.module, one.name))
            result[one.module, one.name] = one if before is None else before.and_then(one)
    return tuple(result.values())


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """What a run shows: in the steps `first` to `last` of its end, in all since it was started or resumed,
    and in its last evaluation."""

    first: int
    last: int
    end: tuple[Observed, ...]
    all: tuple[Observed, ...]
    evaluation: tuple[Observed, ...] = ()

    def and_then(self, step: int, later: tuple[Observed, ...]) -> ObservedRun:
        """With the steps that followed, up to `step`."""
        return ObservedRun(self.last + 1, step, later, one_after_another((self.all, later)), self.evaluation)
