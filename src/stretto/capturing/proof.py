"""Proves that a program on meshes computes on each rank what the model alone computes.

    1. Parameters are placed as their shards say, the batch and buffers are full.
    2. Every op is placed, in order (`stretto.ir.placements`).
    3. The loss and the buffers must be full at the end, and a gradient sharded as its parameter is; that of a
       full parameter may be a partial sum on every rank, which is summed once a step.

The program says itself what is communicated; nothing is added to it. Whatever does not fit is refused, with
the module and what to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.capturing.graph import TracedOp
from stretto.errors import CaptureError
from stretto.ir.placed_programs import placers_of
from stretto.ir.placement import (
    LOCAL,
    UNKNOWN,
    EqualReducedError,
    NeedsEqualError,
    Placement,
    RefusedError,
    is_thin,
    part,
)
from stretto.ir.placements import Placer
from stretto.ir.program import STARTS, Shard, TensorSpec
from stretto.parallelize.tensor import AXIS


@dataclass(slots=True)
class Proof:
    """See the module. given: specs of what no op makes; gradients: parameter -> its value; kept: `loss` and
    `buffer/<name>` -> value; size: of the axis."""

    ops: Sequence[TracedOp]
    given: Mapping[str, TensorSpec]
    shards: Mapping[str, Shard]
    gradients: Mapping[str, str | None]
    kept: Mapping[str, str]
    size: int
    specs: dict[str, TensorSpec] = field(init=False)
    placer: Placer = field(init=False)
    made: dict[str, TracedOp] = field(init=False)

    def __post_init__(self) -> None:
        self.specs = dict(self.given)
        (self.placer,) = placers_of(AXIS, self.size, self.shards)
        self.made = {item.op.name: item for item in self.ops}

    def partial(self) -> dict[str, tuple[str, ...]]:
        """The parameters whose gradients are partial sums, with the axes along which they are. Raises
        CaptureError for what does not fit."""
        for item in self.ops:
            self._place(item)
        for what, value in self.kept.items():
            self._full(what, value)
        return dict.fromkeys(self._summed_later(), (AXIS,))

    def sharded(self) -> frozenset[str]:
        """Values of which ranks have parts along dim 0."""
        return frozenset(name for name in self.made if any(not dim for dim, _ in self.placer.of(name).at))

    def of(self, value: str) -> tuple[str, ...]:
        """The axes along which a value that is observed is a partial sum. Raises CaptureError for a part."""
        resident = self.placer.of(value)
        if resident.kind == "equal" or resident == UNKNOWN:
            return ()
        if resident.kind == "sum" or resident == LOCAL or is_thin(resident, self.specs[value].shape):
            return (AXIS,)
        raise CaptureError(
            f"{_made_in(self.made[value])} observes what is {resident} on {AXIS} ranks: observe a sum over "
            "what is sharded"
        )

    def _place(self, item: TracedOp) -> None:
        op = item.op
        try:
            self.placer.place(op, self.specs, backward=item.backward)
        except NeedsEqualError as need:
            words = f"every rank has a partial sum of {', '.join(need.names)}, which is used in full"
            raise self._refusal(item, words) from None
        except EqualReducedError as full:
            raise self._refusal(item, f"{full} is full on every rank, and is summed over ranks") from None
        except RefusedError as error:
            raise self._refusal(item, str(error)) from None
        if len(op.outputs) == 1 and op.outputs[0] is not None:
            self.specs[op.name] = op.outputs[0]

    def _full(self, what: str, value: str) -> None:
        resident = self.placer.of(value)
        if resident.kind == "equal" or resident == UNKNOWN:
            return
        where = "the loss" if what == "loss" else f"buffer {what.removeprefix('buffer/')!r}"
        raise CaptureError(
            f"{where} differs between {AXIS} ranks: it is {resident} ({_made_in(self.made[value])}). Reshard "
            "it to [Replicate()]"
        )

    def _summed_later(self) -> Iterator[str]:
        for name, value in self.gradients.items():
            if value is None:
                continue
            have, shard = self.placer.of(value), self.shards.get(name)
            if shard is None and have.kind != "equal" and have != UNKNOWN:
                if have.kind != "sum" and have != LOCAL and not is_thin(have, self.specs[value].shape):
                    raise self._gradient_refusal(name, value, have, "full")
                yield name
            elif shard is not None:
                want = part(shard.dim, shard.blocks)
                if have.kind != "local" and not have.zero and want.at[0] not in have.at:
                    raise self._gradient_refusal(name, value, have, str(want))

    def _gradient_refusal(self, name: str, value: str, have: Placement, want: str) -> CaptureError:
        return CaptureError(
            f"the gradient of parameter {name!r} is {have}, where the parameter is {want} "
            f"({_made_in(self.made.get(value))}): reshard what it is used with"
        )

    def _refusal(self, item: TracedOp, what: str) -> CaptureError:
        fix = (
            "Communicate what all ranks have in full: gather it before"
            if item.op.target in STARTS
            else "Reshard it to [Replicate()] before"
        )
        return CaptureError(
            f"{_made_in(item)} cannot be computed in parts ({item.op.name}, {item.op.target}): "
            f"{self._said(what)}. {fix}"
        )

    def _said(self, what: str) -> str:
        for name in what.replace(",", " ").split():
            module = self.made[name].op.module if name in self.made else ""
            if module:
                return what.replace(name, f"{name} (of {module})", 1)
        return what


def _made_in(item: TracedOp | None) -> str:
    return (
        "the model" if item is None else item.op.module or ("the backward" if item.backward else "the loss")
    )
