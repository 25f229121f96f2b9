"""What an op allocates and in which storage a value lies; and what becomes of a value that is a parameter's
gradient, or a part of it.

A storage has the name of the value that it was allocated for. The results of an op that returns several
tensors are storages of their own, made when the op runs, not when a `getitem` op names them; each goes on
its own, those that no one takes at once.

The first part of a gradient that a rank makes in a step becomes the gradient, later ones are added to it:

1. A matrix product that nothing else reads is added where the gradient is kept, while it is multiplied: once
   the gradient has begun, the product has no memory of its own.
2. A value whose storage nothing else reads becomes the gradient as it is.
3. Of any other value, and of one of another dtype, the gradient begins as a copy. So it does of an expanded
   one: elements that are in one place cannot be added to.

The runtime does so, and both counts of memory count it so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stretto.ir.flow import PHASES, is_external, results_of
from stretto.ir.kept import added_spec
from stretto.ir.program import GETITEM, Job, Op, TensorSpec


def makes(op: Op) -> tuple[tuple[str, int], ...]:
    """(storage, bytes) of what the op allocates; nothing for a view and for a part of a tuple."""
    if op.alias is not None or op.target == GETITEM:
        return ()
    if len(op.outputs) == 1:
        return ((op.name, op.nbytes),) if op.outputs[0] is not None else ()
    return tuple(
        (_part(op.name, index), spec.nbytes) for index, spec in enumerate(op.outputs) if spec is not None
    )


def owner(op: Op) -> str:
    """The storage of the op's result, or the value whose storage it shares."""
    if op.alias is not None:
        return op.alias
    return _part(op.args[0].name, op.args[1]) if op.target == GETITEM else op.name


def maker_of(storage: str) -> str:
    """The op that allocates a storage, by the storage's name."""
    return storage.partition("#")[0]


def reads(op: Op) -> tuple[str, ...]:
    """The values that the op reads; a part of a tuple reads the part alone."""
    return (owner(op),) if op.target == GETITEM else op.uses


def in_flight(start: Op) -> tuple[str, ...]:
    """The values that a communication still reads until it is waited for."""
    return () if start.kind is None or start.kind.in_place else start.uses


def _part(name: str, index: int) -> str:
    return f"{name}#{index}"


PRODUCT = "aten.mm.default"
PRODUCTS = (PRODUCT, "aten.bmm.default")
"""Plain, and of a batch of matrices, as experts are."""


@dataclass(frozen=True, slots=True)
class PartialSum:
    """A value as a part of a gradient. nbytes: of the full gradient, whose dtype it is; product, copied:
    steps 1 and 3."""

    parameter: str
    dtype: str
    nbytes: int
    product: bool
    copied: bool


def partial_sums(job: Job, stage: int) -> dict[str, tuple[PartialSum, ...]]:
    """Value of the stage -> the gradients that it is a part of, in the order in which it is added."""
    readers = _Readers(job, stage)
    parameters = {parameter.name: parameter for parameter in job.parameters}
    result: dict[str, tuple[PartialSum, ...]] = {}
    for phase in PHASES:
        for value, uses in results_of(job, stage, phase).items():
            op = readers.ops.get(value)
            owned = op is not None and len(uses) == 1 and readers.only(op)
            made: list[PartialSum] = []
            for use in uses:
                kind, _, name = use.partition(" ")
                if kind != "grad":
                    continue
                parameter = parameters[name]
                spec = op.outputs[0] if op is not None else None
                dtype = parameter.own_dtype or parameter.spec.dtype
                kept = owned and spec is not None and spec.dtype == dtype and not is_expanded(spec)
                product = kept and op is not None and op.target in PRODUCTS
                nbytes = added_spec(job, parameter).nbytes
                made.append(PartialSum(name, dtype, nbytes, product, not kept))
            if made:
                result[value] = tuple(made)
    return result


def is_expanded(spec: TensorSpec) -> bool:
    """Whether elements are in one place."""
    return spec.stride is not None and any(
        step == 0 and length > 1 for length, step in zip(spec.shape, spec.stride, strict=True)
    )


class _Readers:
    """Who reads a stage's values, and which of them share a storage."""

    def __init__(self, job: Job, stage: int) -> None:
        self.ops = {op.name: op for op in job.stages[stage].all_ops}
        self._sent = {edge.value for edge in job.edges if edge.source == stage}
        self._of: dict[str, set[str]] = defaultdict(set)
        self._families: dict[str, set[str]] = defaultdict(set)
        for name, op in self.ops.items():
            self._families[op.alias if op.alias is not None else name].add(name)
            for used in op.uses:
                self._of[used].add(name)

    def only(self, op: Op) -> bool:
        """Whether nothing else reads the storage of the op's result, so that it may be added to in place."""
        root = op.alias if op.alias is not None else op.name
        if is_external(root) or root not in self.ops:
            return False  # a message may still be on its way, or be another stage's tensor
        family = self._families[root]
        # The values that became this one by views alone; whatever else reads the storage shares it.
        chain = {op.name}
        reached = [op.name]
        while reached:
            sources = [n for n in self.ops[reached.pop()].uses if n in family and n not in chain]
            chain.update(sources)
            reached += sources
        shared = any(name in self._sent or not self._of[name] <= chain for name in family)
        return family <= chain and not shared
