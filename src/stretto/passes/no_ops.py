"""Ops that change nothing are dropped, and what used them uses what they read.

Ops of a step write to no value, so a copy is as good as the original, unless it exists to outlive it (a
buffer that the model writes) or to be smaller (a part of a large tensor).

`dead_ops`: no root (loss, gradient, update) can be reached from the op. Draws depend on the names of ops
alone.

`no_ops`:

    1. In order, every op gets what its inputs are by now.
    2. An op whose result is its input, element by element and in the same layout, is dropped.
    3. Swaps of dims that cancel are dropped; reshapes of a contiguous value become one reshape of the first.
       Not where the value between is needed as well: two stages might then exchange both.
    4. What is dead in this way is dropped.

`equal_collectives`: one collective where two would bring the same value, seen the same way, on the same axis.
Both must be in the forward, or both in the backward, so that nothing is kept between the two for it
(`recompute = "gathers"` is that choice), and in one module, or side by side in one layer, so that no stage
has to send what is gathered to the next. An all-reduce of the backward may be one of the forward: its result
is as large as the value that would be kept to reduce it again.

    1. A value is identified by the op that made it; a view by what it is a view of, and how.
    2. A start whose input, arguments and position are those of an earlier one is dropped, with its wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stretto.ir.dims import dims_of
from stretto.ir.flow import is_external
from stretto.ir.program import VIEW, VIEWS, WAIT, Op, Ref, TensorSpec
from stretto.passes.layout.program import Origin, StepProgram
from stretto.passes.rewrite import live, rooted, users_of, with_uses

SAME = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")
"""Views of all of their input."""

RESHAPES = (
    *VIEWS,
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
)
"""The same elements in the same order, when input and result are contiguous."""

COPIES = ("aten.clone.default", "aten._to_copy.default")

SWAPS = ("aten.t.default", "aten.transpose.int", "aten.permute.default")


def no_ops(program: StepProgram, _: Collection[str]) -> StepProgram:
    """See the module."""
    work = _NoOps(frozenset(program.roots.values()), users_of(op for op, _ in program.ops))
    ops = [(now, origin) for op, origin in program.ops if (now := work.kept(op)) is not None]
    if ops == list(program.ops):
        return program
    return live_ops(program.with_ops(ops, work.now))


@dataclass(slots=True)
class _NoOps:
    """What is known of the graph so far. roots: values; users: as captured; same: value that is gone -> what
    replaces it; made: the op that makes a value, as it is now; owners: value -> the value that has its
    storage."""

    roots: frozenset[str]
    users: Mapping[str, list[Op]]
    same: dict[str, str] = field(default_factory=dict)
    made: dict[str, Op] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)

    def now(self, name: str) -> str:
        return self.same.get(name, name)

    def kept(self, op: Op) -> Op | None:
        """Steps 1 to 3 for one op: as it is now, or None where it is dropped."""
        now = with_uses(op, self.now)
        source = self._unchanged(now)
        if source is None:
            source = self._undone(now)
        # A root stays a value that an op makes: an external one would be a gradient without a place.
        if source is not None and not (op.name in self.roots and is_external(source)):
            self.same[op.name] = source
            return None
        now = self._one_reshape(now)
        if now.alias is not None:
            given = _given(now)
            self.owners[op.name] = self.owners.get(given, given)
        self.made[op.name] = now
        return now

    def spec(self, name: str) -> TensorSpec | None:
        op = self.made.get(name)
        return None if op is None else op.spec

    # Step 2.

    def _unchanged(self, op: Op) -> str | None:
        """The value that the op's result equals in everything, or None."""
        if op.target in SAME:
            return _given(op)
        test = IDENTITIES.get(op.target)
        if test is None or len(op.outputs) != 1:
            return None
        source = test(self, op)
        return source if source is not None and self.spec(source) == op.outputs[0] else None

    def may_share(self, source: str) -> str | None:
        """The value, where it may be used in the place of a copy of it."""
        owner = self.owners.get(source, source)
        if owner.startswith("buffer/"):
            return None  # which a later op of the step may find written
        full = self.made.get(owner)
        if full is not None and full.outputs[0] is not None:
            spec = self.spec(source)
            if spec is None or spec.nbytes < sum(s.nbytes for s in full.outputs if s is not None):
                return None  # the copy lets the larger tensor go
        return source

    # Step 3.

    def _undone(self, op: Op) -> str | None:
        """The value before a swap that this op swaps back, or before a reshape that this one takes back."""
        if op.target in SWAPS:
            before = self.made.get(_given(op))
            if before is None or before.target not in SWAPS or not self._passing(before, SWAPS):
                return None
            first = _order(before)
            return None if any(first[d or 0] != k for k, d in enumerate(_order(op))) else _given(before)
        base = self._reshaped(op)
        return base if base is not None and self.spec(base) == op.outputs[0] else None

    def _one_reshape(self, op: Op) -> Op:
        """The op, or one view of the value before all reshapes."""
        base = self._reshaped(op)
        spec = op.outputs[0] if op.outputs else None
        if base is None or base == _given(op) or spec is None:
            return op
        return replace(op, target=VIEW, args=(Ref(base), spec.shape), kwargs=())

    def _reshaped(self, op: Op) -> str | None:
        """For a reshape of what is in one piece: the first value of the chain of reshapes."""
        if op.target not in RESHAPES or op.outputs[0] is None or op.outputs[0].stride is not None:
            return None
        base = _given(op)
        spec = self.spec(base)
        if spec is None or spec.stride is not None:
            return None
        before = self.made[base]
        while before.target in RESHAPES and self._passing(before, RESHAPES):
            source = self.spec(_given(before))
            if source is None or source.stride is not None:
                break
            base = _given(before)
            before = self.made[base]
        return base

    def _passing(self, op: Op, through: tuple[str, ...]) -> bool:
        """Whether the value is there for ops alone that look past it, and so is dead, or costs nothing: the
        swap of a parameter is where the parameter is."""
        if op.name in self.roots:
            return False
        if is_external(_given(op)) and through is SWAPS:
            return True
        return all(user.target in through for user in self.users.get(op.name, ()))


def _given(op: Op) -> str:
    name: str = next((arg.name for arg in op.args if isinstance(arg, Ref)), "")
    return name


def _order(op: Op) -> tuple[int | None, ...]:
    """The dims of the input in the order of the result."""
    rule = dims_of(op, [op.made])  # of the input, how many dims it has is asked alone
    assert rule is not None
    return rule.outputs[0]


# Step 2, by target: the input that the result may equal; that layout and dtype are the same is seen after it.


def _swap(work: _NoOps, op: Op) -> str | None:
    return _given(op) if all(dim == k for k, dim in enumerate(_order(op))) else None


def _slice(work: _NoOps, op: Op) -> str | None:
    return _given(op) if len(op.args) < 5 or op.args[4] == 1 else None


def _slice_backward(work: _NoOps, op: Op) -> str | None:
    """Of a slice of all."""
    return work.may_share(_given(op)) if op.args[5] == 1 else None


def _times_one(work: _NoOps, op: Op) -> str | None:
    """x * 1, x / 1, x ** 1; (x + 0 changes a negative zero)."""
    number = op.args[1]
    plain = not op.kwargs and isinstance(number, (int, float)) and not isinstance(number, bool)
    return work.may_share(_given(op)) if plain and isinstance(op.args[0], Ref) and number == 1 else None


def _cat(work: _NoOps, op: Op) -> str | None:
    """Of one tensor beside empty ones."""
    specs = {ref.name: work.spec(ref.name) for ref in op.args[0]}
    if any(spec is None for spec in specs.values()):
        return None
    full = [ref.name for ref in op.args[0] if specs[ref.name].numel]  # type: ignore[union-attr]
    return work.may_share(full[0]) if len(full) == 1 else None


IDENTITIES: dict[str, Callable[[_NoOps, Op], str | None]] = {
    **dict.fromkeys((*VIEWS, "aten.expand.default"), lambda work, op: _given(op)),
    **dict.fromkeys(SWAPS, _swap),
    "aten.slice.Tensor": _slice,
    "aten.slice_backward.default": _slice_backward,
    **dict.fromkeys(COPIES, lambda work, op: work.may_share(_given(op))),
    **dict.fromkeys(("aten.mul.Tensor", "aten.div.Tensor", "aten.pow.Tensor_Scalar"), _times_one),
    "aten.cat.default": _cat,
}
"""Targets whose result may be their input."""


def dead_ops(program: StepProgram, _: Collection[str]) -> StepProgram:
    """See the module."""
    made = live_ops(program)
    return program if len(made.ops) == len(program.ops) else made


def live_ops(program: StepProgram) -> StepProgram:
    """Without the ops that no root needs; each view is called after the value that owns its storage."""
    kept = {op.name for op in live((op for op, _ in program.ops), program.roots.values())}
    ops = [pair for pair in program.ops if pair[0].name in kept]
    owned = rooted(op for op, _ in ops)
    return replace(program, ops=tuple(zip(owned, (origin for _, origin in ops), strict=True)))


def specs_in(program: StepProgram) -> dict[str, TensorSpec]:
    """Value -> spec, for what is given and for all values of ops that are one tensor."""
    return {**program.given, **{op.name: op.spec for op, _ in program.ops if op.spec is not None}}


def equal_collectives(program: StepProgram, _: Collection[str]) -> StepProgram:
    """See the module."""
    same: dict[str, str] = {}
    keys: dict[str, Any] = {}
    first: dict[Any, str] = {}
    waits: dict[str, str] = {}
    ops: list[tuple[Op, Origin]] = []

    def now(name: str) -> str:
        return same.get(name, name)

    for was, origin in program.ops:
        op = with_uses(was, now)
        source = op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
        if op.alias is not None and op.target != WAIT and len(op.uses) == 1:
            keys[op.name] = (op.target, keys.get(source, source), op.args[1:], op.kwargs)  # step 1
        elif op.kind is not None:
            key = (
                op.target,
                keys.get(source, source),
                op.args[1:],
                not op.kind.in_place and origin.backward,
                _place(op.module),
            )
            if first.setdefault(key, op.name) != op.name:  # step 2
                same[op.name] = first[key]
                continue
        elif op.target == WAIT and waits.setdefault(source, op.name) != op.name:
            same[op.name] = waits[source]
            continue
        ops.append((op, origin))
    return live_ops(program.with_ops(ops, now)) if same else program


def _place(module: str) -> str:
    """The module itself, or the one that it is a part of when both are in a layer (a numbered module)."""
    parent = module.rpartition(".")[0]
    return parent if any(part.isdigit() for part in parent.split(".")[:-1]) else module
