"""Numbers of a batch that say which row or class is meant, looked at before a step: one that is out of range
would end it inside an op on processors, and end the process on accelerators.

    1. Which values of the batch are such numbers, the ops say: the rows of an embedding, the labels of a
       cross-entropy. What lies between is views and casts.
    2. The whole leaf is looked at, in one pass: where it is in range, so is every part of it.
    3. Where it is not, the very value is computed that the op reads.

Leaves on an accelerator are not looked at: that would wait for it. Labels over a vocabulary that
tensor-parallel ranks share are compared by other ops (`stretto.parallelize.vocabulary`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stretto.errors import UsageError
from stretto.ir.action import Phase
from stretto.ir.op_names import LIKELIHOODS
from stretto.ir.program import Job, Op, Ref
from stretto.runtime.counting import Alone

EMBEDDING = "aten.embedding.default"
"""(weight, indices, ...)"""
PASSED = ("aten._to_copy.default", "aten.clone.default")
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Files of token ids have them; PyTorch can keep and convert them, and little else."""


@dataclass(frozen=True, slots=True)
class _Use:
    """leaf: of the batch; value, ops: what is read of it, and how it is made; count: numbers from 0 on that
    are in range; ignored: one more that is; what: it is, in words."""

    leaf: str
    value: str
    ops: tuple[Op, ...]
    count: int
    ignored: int | None
    what: str


class Ranges:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ops = {op.name: op for stage in job.stages for op in stage.ops[Phase.F]}
        found = (self._use(op) for op in self._ops.values())
        self._uses = [use for use in found if use is not None]

    def _use(self, op: Op) -> _Use | None:
        """Step 1."""
        shape = self._shape(op.args[0]) if op.target in (EMBEDDING, *LIKELIHOODS) else None
        if shape is None:
            return None
        if op.target == EMBEDDING:
            return self._of(op.args[1], shape[0], None, f"the embedding {op.module!r} has {shape[0]} rows")
        classes = shape[min(1, len(shape) - 1)]
        return self._of(op.args[1], classes, op.args[4], f"the loss is over {classes} classes")

    def _shape(self, argument: object) -> tuple[int, ...] | None:
        if not isinstance(argument, Ref):
            return None
        kind, _, name = argument.name.partition("/")
        if kind == "param":
            return next((p.spec.shape for p in self._job.parameters if p.name == name), None)
        made = self._ops.get(argument.name)
        return made.outputs[0].shape if made is not None and made.outputs[0] is not None else None

    def _of(self, argument: object, count: int, ignored: object, what: str) -> _Use | None:
        """The chain from the leaf to what is read; None where the value is computed."""
        chain: list[Op] = []
        name = argument.name if isinstance(argument, Ref) else ""
        value = name
        while name in self._ops:
            op = self._ops[name]
            if len(op.uses) != 1 or (op.alias is None and op.target not in PASSED):
                return None
            chain.append(op)
            name = op.uses[0]
        kind, _, leaf = name.partition("/")
        if kind != "batch":
            return None
        left = ignored if isinstance(ignored, int) else None
        return _Use(leaf, value, tuple(reversed(chain)), count, left, what)

    def check(self, leaves: Mapping[str, torch.Tensor]) -> None:
        """leaves: of the whole batch, as the user gave it. Raises UsageError with leaf, number and range."""
        for use in self._uses:
            leaf = leaves[use.leaf]
            if leaf.device.type == "cpu" and leaf.numel() and self._wrong(use, leaf) is not None:
                self._refuse(use, leaf)

    @staticmethod
    def _wrong(use: _Use, values: torch.Tensor) -> torch.Tensor | None:
        """Step 2: those that are out of range."""
        if values.dtype in UNSIGNED:
            values = values.long()
        least, most = values.aminmax()
        if int(least) >= 0 and int(most) < use.count:
            return None
        wrong = (values < 0) | (values >= use.count)
        if use.ignored is not None:
            wrong &= values != use.ignored
        return values[wrong] if bool(wrong.any()) else None

    def _refuse(self, use: _Use, leaf: torch.Tensor) -> None:
        """Step 3."""
        whole = use.leaf in self._job.whole
        read = Alone(self._job, use.ops, use.value, torch.device("cpu")) if use.ops else None
        for at, part in enumerate((leaf,) if whole else leaf.chunk(self._job.pieces)):
            wrong = self._wrong(use, part if read is None else read(part))
            if wrong is not None:
                rest = f", or {use.ignored}, which does not count" if use.ignored is not None else ""
                raise UsageError(
                    f"batch leaf {use.leaf!r} holds {int(wrong[0])} (microbatch {at}), and {use.what}: give "
                    f"numbers from 0 to {use.count - 1}{rest}"
                )
