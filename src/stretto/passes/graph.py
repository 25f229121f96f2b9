"""What a pass takes and gives: the ops of a full step, and what must stay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.ir.program import Op, TensorSpec


@dataclass(frozen=True, slots=True)
class Graph:
    """ops: in an order that can be run. roots: values that the step is for (the loss, gradients, updates).

    origin: for an op that a pass made, the captured op that it replaces.
    backward: names of the captured ops that belong to the backward.
    renamed: a captured root -> the value that it is now, where a pass found it to be equal to another.
    given: specs of values that no op makes (parameters, leaves of the batch), as far as they are known.
    spread: values whose first dim tensor-parallel ranks share.
    """

    ops: tuple[Op, ...]
    roots: frozenset[str]
    origin: Mapping[str, str] = field(default_factory=dict)
    backward: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, TensorSpec] = field(default_factory=dict)
    spread: frozenset[str] = frozenset()

    def users(self) -> dict[str, list[Op]]:
        """Value -> the ops that use it."""
        result: dict[str, list[Op]] = defaultdict(list)
        for op in self.ops:
            for name in op.uses:
                result[name].append(op)
        return result

    def specs(self) -> dict[str, TensorSpec]:
        """Value -> spec, for what is given and for all values of ops that are one tensor."""
        result = dict(self.given)
        for op in self.ops:
            if len(op.outputs) == 1 and op.outputs[0] is not None:
                result[op.name] = op.outputs[0]
        return result

    def is_backward(self, name: str) -> bool:
        """Whether an op belongs to the backward; one that a pass made, where what it replaces did."""
        return self.origin.get(name, name) in self.backward
