"""What a value will meet, for where a sum is best scattered and how a gradient is best placed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from stretto.ir.dim_rules import Dims
from stretto.ir.dims import operands
from stretto.ir.op_names import COPIES, POINTWISE, SUMS
from stretto.ir.placed_by_rule import VIEW_OPS
from stretto.ir.program import GETITEM, Op, TensorSpec
from stretto.passes.layout.placement import AxisPlacement, fits, sharded, viewed
from stretto.passes.layout.program import KEEP_PARTIAL, LIKE, NEW, SAME_DATA, ZEROS, StepProgram
from stretto.passes.layout.rules import passes_sums, rule_of

MOST_OPS = 40
"""Ops that a look ahead passes. Assumed: a sum meets what it is added to within a layer. 200 changes none of
70 steps (Llama, GPT, GPT-2, Qwen2 and 3, Gemma2, Mixtral; tp, cp, chunks, the sequence or not); looks ahead
were 11 % of capture's profile then (96 layers, tp 8)."""


@dataclass(frozen=True, slots=True)
class OpReads:
    """What an op reads: its operands, their specs, and its row in the table of dims. A view has none here."""

    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    rule: Dims | None


@dataclass(slots=True)
class Ahead:
    """Of the global program. size: of the axis. made: value -> the op that makes it; uses: the ops that
    read it; needed: values of roots; specs: of what no op makes, and of values that are decomposed."""

    program: StepProgram
    size: int
    specs: dict[str, TensorSpec]
    made: dict[str, Op] = field(init=False)
    uses: dict[str, list[Op]] = field(init=False)
    needed: frozenset[str] = field(init=False)
    _reads: dict[str, OpReads | None] = field(default_factory=dict, init=False)
    _bytes: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.made = {op.name: op for op, _ in self.program.ops}
        self.needed = frozenset(self.program.roots.values())
        self.uses = defaultdict(list)
        for op, _ in self.program.ops:
            for name in op.uses:
                self.uses[name].append(op)

    def spec(self, name: str) -> TensorSpec | None:
        """The global spec of a value that is one tensor."""
        if name in self.specs:
            return self.specs[name]
        op = self.made[name]
        if op.target == GETITEM:
            return self.made[op.args[0].name].outputs[op.args[1]]
        return op.outputs[0] if len(op.outputs) == 1 else None

    def reads(self, op: Op) -> OpReads | None:
        """None where an operand is no tensor. Each op is asked for several times, and answered once."""
        if op.name not in self._reads:
            names = operands(op)
            specs = tuple(spec for spec in map(self.spec, names) if spec is not None)
            rule = None if op.target in VIEW_OPS or len(specs) < len(names) else rule_of(op, specs)
            self._reads[op.name] = OpReads(names, specs, rule) if len(specs) == len(names) else None
        return self._reads[op.name]

    def wanted(self, wanted: Mapping[str, AxisPlacement]) -> dict[str, AxisPlacement]:
        """Placements that roots are to have -> those, and what follows for what they are views, copies and
        sums of."""
        result = dict(wanted)
        for op, _ in reversed(self.program.ops):
            at = result.get(op.name)
            if at is not None and len(op.outputs) == 1 and op.target in SAME_DATA | SUMS | COPIES:
                for name, placement in self.before(op, at):
                    result.setdefault(name, placement)
        return result

    def copied_to(self, values: Collection[str]) -> frozenset[str]:
        """Those values, and what they alone are views and copies of."""
        result = set(values)
        for op, _ in reversed(self.program.ops):
            if op.name in result and op.target in SAME_DATA | COPIES:
                result.update(name for name in op.uses if len(self.uses[name]) == 1)
        return frozenset(result)

    def before(self, op: Op, at: AxisPlacement) -> Iterator[tuple[str, AxisPlacement]]:
        """How operands are placed where the op's result is sharded so."""
        made, reads = op.outputs[0], self.reads(op)
        if made is None or reads is None or not at.is_sharded or at.copies > 1:
            return
        if op.target in VIEW_OPS:
            placement = viewed(at, made.shape, reads.specs[0].shape, self.size)
            if placement is not None:
                yield reads.names[0], placement
            return
        rule = reads.rule
        if rule is None or at.dim >= len(rule.outputs[0]):
            return
        label = rule.outputs[0][at.dim]
        for name, labels, spec in zip(reads.names, rule.inputs, reads.specs, strict=True):
            if label is not None and label in labels and label not in rule.full:
                placement = sharded(labels.index(label), at.blocks)
                if fits(placement, spec.shape, self.size):
                    yield name, placement

    def is_summed_later(self, name: str, is_scattered: Callable[[str], bool]) -> bool:
        """Whether a sum takes fewer bytes behind linear ops that read it than where it is, as that of what
        experts make of a token, behind its weights. is_scattered: of a value whose sum would be."""
        return self._bytes_summed(name, is_scattered) < self._own_bytes(name, is_scattered)

    def _own_bytes(self, name: str, is_scattered: Callable[[str], bool]) -> int:
        spec = self.spec(name)
        assert spec is not None, f"{name} is no tensor"
        return spec.nbytes if is_scattered(name) else 2 * spec.nbytes

    def _bytes_summed(self, name: str, is_scattered: Callable[[str], bool]) -> int:
        """The fewest bytes in which a partial sum becomes full: its own, or those of all that ops make of it
        that are linear in it."""
        if name not in self._bytes:
            own = self._own_bytes(name, is_scattered)
            uses = [op for op in self.uses.get(name, ()) if op.target not in LIKE | NEW]
            if uses and name not in self.needed and all(self._is_linear(op, name) for op in uses):
                own = min(own, sum(self._bytes_summed(op.name, is_scattered) for op in uses))
            self._bytes[name] = own
        return self._bytes[name]

    def _is_linear(self, op: Op, name: str) -> bool:
        """Whether a partial sum of that operand makes one of the result, without a product of matrices."""
        reads, spec = self.reads(op), self.spec(name)
        if reads is None or spec is None or op.flops or len(op.outputs) != 1:
            return False
        made = op.outputs[0]
        if made is None or made.dtype != spec.dtype:
            return False
        if op.target in VIEW_OPS or passes_sums(op):
            return True
        for together in () if reads.rule is None else reads.rule.linear:
            of = {reads.names[k] for k in together}
            makers = (self.made.get(other) for other in of - {name})
            if name in of and all(maker is not None and maker.target in ZEROS for maker in makers):
                return all(reads.names[k] != name or k in together for k in range(len(reads.names)))
        return False

    def best(
        self,
        name: str,
        placed: Mapping[str, AxisPlacement],
        asked: Mapping[str, AxisPlacement],
        fixed: Mapping[str, object],
    ) -> AxisPlacement | None:
        """How a value had best be sharded, for what it will meet: a sum is scattered to where what it is
        added to is, a gradient to where its forward's value is. placed: of the ops before; asked: wishes;
        fixed: parameters, which stay."""
        return self._best(name, placed, asked, fixed, set())

    def _best(
        self,
        name: str,
        placed: Mapping[str, AxisPlacement],
        asked: Mapping[str, AxisPlacement],
        fixed: Mapping[str, object],
        seen: set[str],
    ) -> AxisPlacement | None:
        for op in self.uses.get(name, ()):
            if op.target == GETITEM or op.name in placed or op.name in seen or len(seen) > MOST_OPS:
                continue
            seen.add(op.name)
            reads = self.reads(op)
            if reads is None:
                continue
            if reads.rule is not None:
                mine = reads.rule.inputs[reads.names.index(name)]
                for other, labels in zip(reads.names, reads.rule.inputs, strict=True):
                    at = placed.get(other)
                    if other == name or at is None or not at.is_sharded or at.copies > 1 or other in fixed:
                        continue
                    label = labels[at.dim] if at.dim < len(labels) else None
                    if label is not None and label in mine and label not in reads.rule.full:
                        return sharded(mine.index(label), at.blocks)
            made = self._first_result(op)
            if made is not None and (op.target in KEEP_PARTIAL or op.target in POINTWISE):
                after = asked.get(made) or self._best(made, placed, asked, fixed, seen)
                result = after and dict(self.before(op, after)).get(name)
                if result:
                    return result
        return None

    def _first_result(self, op: Op) -> str | None:
        """The value that an op makes; of several (a dropout's, and what it has kept) the first."""
        if len(op.outputs) == 1:
            return op.name
        parts = (part for part in self.uses.get(op.name, ()) if part.target == GETITEM)
        return next((part.name for part in parts if part.args[1] == 0), None)
