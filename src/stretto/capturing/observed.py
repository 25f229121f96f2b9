"""What the code of a model lets people see, taken out of the ops of a traced step.

    1. Each `observe` (`stretto.backend.observe_adapter`) goes; the value that it was given stays needed.
    2. Where a model is spread over ranks, the proof says whether they have equal values or addends.

Touches traced ops and `stretto.ir`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.backend.observe_adapter import TARGET
from stretto.capturing.expand import TracedOp
from stretto.errors import CaptureError
from stretto.ir.metrics import Joined


@dataclass(frozen=True, slots=True)
class Seen:
    """As `ir.metrics.Metric`, before there are stages."""

    module: str
    name: str
    value: str
    joined: Joined
    partial: tuple[str, ...] = ()

    def renamed(self, now: Mapping[str, str], partial: Mapping[str, tuple[str, ...]] | None = None) -> Seen:
        """With the name that the value has now. partial: value before -> axes of its addends. Raises
        CaptureError for addends of which the greatest is asked for: that is none of their sum's."""
        axes = self.partial if partial is None else partial.get(self.value, ())
        if axes and self.joined == "max":
            raise CaptureError(
                f"{self.module or 'the model'} calls observe({self.name!r}, ..., 'max') with what ranks of "
                f"{', '.join(axes)} have addends of, and the greatest addend is no greatest sum: observe "
                "it joined by 'sum', or what is made of it where it is whole"
            )
        return replace(self, value=now.get(self.value, self.value), partial=axes)


def taken_out(ops: Sequence[TracedOp]) -> tuple[list[TracedOp], tuple[Seen, ...]]:
    """Step 1. Raises CaptureError for what a backward makes, or is of several shapes."""
    kept: list[TracedOp] = []
    seen: list[Seen] = []
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for item in ops:
        op = item.op
        if op.target != TARGET:
            kept.append(item)
            continue
        value, name, joined = op.args[0].name, str(op.args[1]), op.args[2]
        where = f"{op.module or 'the model'} calls observe({name!r}, ...)"
        if item.backward:
            raise CaptureError(f"{where} in the backward: observe what the forward makes")
        made = op.outputs[0]
        assert made is not None
        if shapes.setdefault((op.module, name), made.shape) != made.shape:
            first = list(shapes[op.module, name])
            raise CaptureError(
                f"{where} of shape {list(made.shape)} after one of {first}: give them two names"
            )
        seen.append(Seen(op.module, name, value, joined))
    return kept, tuple(seen)
