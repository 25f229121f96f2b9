"""Proves that a program on meshes computes on each rank what the model alone computes.

    1. Parameters are placed as their shards say, the batch and buffers are full.
    2. Every op is placed, in order (`stretto.ir.placements`).
    3. The gradient of a full parameter may be a partial sum on every rank, which is summed once a step.

That the loss, buffers and gradients are what they must be at the end is for the proof of the plan
(`stretto.verifying.placements`).

The program says itself what is communicated; nothing is added to it. Whatever does not fit is refused, with
the module and what to write.
"""

from __future__ import annotations

from collections.abc import Mapping

from stretto.capturing.graph import GRAD
from stretto.errors import CaptureError
from stretto.ir.placed_programs import place_all, placers_of
from stretto.ir.placement import LOCAL, is_thin
from stretto.ir.program import PARAM, Shard
from stretto.parallelize.tensor import AXIS
from stretto.passes.layout.program import StepProgram


class Proof:
    """See the module. Raises CaptureError for what does not fit. size: of the axis."""

    def __init__(self, program: StepProgram, shards: Mapping[str, Shard], size: int) -> None:
        self._specs = dict(program.given)
        self._made = {op.name: op for op, _ in program.ops}
        self._shards, self._roots = shards, program.roots
        (self._placer,) = placers = placers_of(
            AXIS, size, {PARAM + name: one for name, one in shards.items()}
        )
        for _, op, trouble in place_all([list(self._made.values())], placers, self._specs):
            raise CaptureError(
                f"{self._where(op.name)} cannot be computed in parts: {op.name} ({op.target}) {trouble}. "
                "Reshard it to [Replicate()] before"
            )

    def partial(self) -> dict[str, tuple[str, ...]]:
        """The parameters whose gradients are partial sums, with the axes along which they are."""
        gradients = {r.removeprefix(GRAD): value for r, value in self._roots.items() if r.startswith(GRAD)}
        full = {name: value for name, value in gradients.items() if name not in self._shards}
        return {name: (AXIS,) for name, value in full.items() if not self._placer.of(value).is_full}

    def sharded(self) -> frozenset[str]:
        """Values of which ranks have parts along dim 0."""
        return frozenset(name for name in self._made if any(not dim for dim, _ in self._placer.of(name).at))

    def of(self, value: str) -> tuple[str, ...]:
        """The axes along which a value that is observed is a partial sum. Raises CaptureError for a part."""
        at = self._placer.of(value)
        if at.is_full or at.kind == "sum" or at == LOCAL or is_thin(at, self._specs[value].shape):
            return () if at.is_full else (AXIS,)
        raise CaptureError(
            f"{self._where(value)} observes what is {at} on {AXIS} ranks: observe a sum over what is sharded"
        )

    def _where(self, value: str) -> str:
        op = self._made.get(value)
        return (op is not None and op.module) or "the model or its loss"
