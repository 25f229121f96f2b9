"""Values of the global program on one rank: how each is placed, and by placement the local values that it is.

A conversion is emitted once. It belongs to where its value was made, and to the backward where only that
needs it. What several views of one value need in full is gathered once, above them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stretto.ir.dims import operands
from stretto.ir.op_names import COPIES, POINTWISE
from stretto.ir.program import Op, TensorSpec
from stretto.passes.layout.emit import Emitter, MisfitError
from stretto.passes.layout.placement import PARTIAL, REPLICATED, AxisPlacement, local_shape
from stretto.passes.layout.program import SAME_DATA, ZEROS, Origin
from stretto.passes.layout.rules import emit_op, full

STAYS = 1e6
"""What a byte of a sharded parameter counts when it is gathered: parameters stay, activations move. 4 times
as much, or a quarter, changes none of 63 steps; 1, as of an activation, changes 6: small batches would send
weights."""


@dataclass(slots=True)
class Values:
    """out: where local ops go. made: value -> the global op that makes it. spec: global ones. placed: as the
    next op finds values; forms: placement -> the local value. local: how local values are placed. fixed:
    parameters that are sharded, and views of them."""

    out: Emitter
    made: Mapping[str, Op]
    spec: dict[str, TensorSpec]
    placed: dict[str, AxisPlacement]
    fixed: dict[str, None]
    forms: dict[str, dict[AxisPlacement, str]] = field(init=False)
    local: dict[str, AxisPlacement] = field(default_factory=dict)
    origins: dict[str, tuple[Origin, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forms = {name: {at: name} for name, at in self.placed.items()}

    def add(self, value: str, spec: TensorSpec | None, local: str, at: AxisPlacement) -> None:
        """A value that was made. Raises MisfitError where its placement says another shape."""
        assert spec is not None, f"{value} is no tensor"
        if self.out.specs[local].shape != local_shape(at, spec.shape, self.out.size):
            raise MisfitError(f"{value} is {self.out.specs[local]}, where {spec} is {at}")
        self.spec[value], self.placed[value], self.forms[value] = spec, at, {at: local}
        self.local[local] = at
        self.origins[value] = self.out.origin, self.out.module
        maker = self.made.get(value)
        if at == REPLICATED and maker is not None and maker.target in ZEROS:
            self.forms[value][PARTIAL] = local

    def same(self, name: str, value: str) -> None:
        """Another name for a value."""
        self.spec[name], self.placed[name] = self.spec[value], self.placed[value]
        self.forms[name], self.origins[name] = dict(self.forms[value]), self.origins[value]

    def form(self, name: str, at: AxisPlacement) -> str:
        """The local value that is `name` with this placement; made where there is none."""
        forms = self.forms[name]
        if at not in forms:
            now = self.out.origin, self.out.module
            maker, module = self.origins.get(name, now)
            self.out.origin, self.out.module = now[0]._replace(segment=maker.segment), module
            source = self.source(name, at)
            op = self._made_again(name) if at == REPLICATED and source.is_sharded else None
            if op is None:
                forms[at] = self.out.converted(forms[source], source, at, self.spec[name].shape)
            else:
                given = [self.form(each, REPLICATED) for each in operands(op)]
                (forms[at],) = emit_op(full(op), self.out.size)(self.out, op, given)
            self.out.origin, self.out.module = now
            self.local[forms[at]] = at
        return forms[at]

    def place(self, name: str, at: AxisPlacement, *, only: bool = False) -> None:
        """From now on the value is placed so; a sum that is taken is no partial sum any more. only: as it was
        it is not used any more."""
        was = self.placed[name]
        self.form(name, at)
        self.placed[name] = at
        if was != at and (was.is_partial or only):
            del self.forms[name][was]

    # --- what conversions cost ------------------------------------------------------------------------------

    def source(self, name: str, at: AxisPlacement) -> AxisPlacement:
        """The form of which another is made."""
        nbytes = self.spec[name].nbytes
        return min(self.forms[name], key=lambda source: self.out.cost_bytes(source, at, nbytes))

    def cost(self, name: str, at: AxisPlacement) -> float:
        """Bytes that a rank sends for a form."""
        op = self._made_again(name) if at == REPLICATED and at not in self.forms[name] else None
        return self._sent(name, at) if op is None else self._sent_above(op)

    def _sent(self, name: str, at: AxisPlacement) -> float:
        source = self.source(name, at)
        cost = self.out.cost_bytes(source, at, self.spec[name].nbytes)
        return cost * STAYS if name in self.fixed and source != at else cost

    def _sent_above(self, op: Op) -> float:
        """Bytes for all that an op reads in full."""
        result = 0.0
        for name in dict.fromkeys(operands(op)):
            while REPLICATED not in self.forms[name]:
                above = self.made.get(name)
                if above is None or not self._is_copied(above):
                    break
                name = operands(above)[0]
            result += self._sent(name, REPLICATED)
        return result

    def sends(self, names: Sequence[str], inputs: Sequence[AxisPlacement]) -> bool:
        """Whether ranks send anything for operands that are placed so."""
        pairs = dict.fromkeys(zip(names, inputs, strict=True))
        return any(self.cost(name, at) > 0 and self.source(name, at) != REPLICATED for name, at in pairs)

    def _made_again(self, name: str) -> Op | None:
        """The op by which a sharded value is best made once more in full: a view or a copy of what is
        gathered above it, or element by element of what has fewer bytes, or is at hand."""
        op, at = self.made.get(name), self.placed.get(name)
        if op is None or at is None or not at.is_sharded or self._is_copied(op):
            return op if at is not None and at.is_sharded else None
        if op.target not in POINTWISE or op.random or len(op.outputs) != 1:
            return None
        given = operands(op)
        if not given or any(each in self.fixed or each not in self.placed for each in given):
            return None
        return op if self._sent_above(op) < self._sent(name, REPLICATED) else None

    def _is_copied(self, op: Op) -> bool:
        """Whether an op makes a view or a copy of what is sharded as well, or in full."""
        if op.target not in SAME_DATA | COPIES or len(op.outputs) != 1:
            return False
        base = operands(op)[0]
        at = self.placed.get(base)
        alike = at is not None and not at.is_partial and base not in self.fixed
        return alike and self.spec[base].dtype == self.spec[op.name].dtype
