"""Values of the global program on one rank: how each is placed, and by placement the local values that it is.

A conversion is emitted once. It belongs to where its value was made, and to the backward where only that
needs it. What several views of one value need in full is gathered once, above them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stretto.ir.dims import operands
from stretto.ir.program import Op, TensorSpec
from stretto.passes.layout.emit import Emitter, MisfitError
from stretto.passes.layout.op_groups import SAME_DATA
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, local_shape
from stretto.passes.layout.program import Origin
from stretto.passes.layout.rules import emit_op, full

STAYS = 1e6
"""What a byte of a sharded parameter counts when it is gathered: parameters stay, activations move."""


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
            base = self._viewed_from(name) if at == REPLICATED and source.is_sharded else None
            if base is None:
                forms[at] = self.out.converted(forms[source], source, at, self.spec[name].shape)
            else:
                op = self.made[name]
                (forms[at],) = emit_op(full(op), self.out.size)(self.out, op, [self.form(base, REPLICATED)])
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
        base: str | None = name
        while at == REPLICATED and base is not None and REPLICATED not in self.forms[base]:
            base = self._viewed_from(base)
        if at == REPLICATED and base is not None:
            return 0.0  # it is a view of what was gathered
        source = self.source(name, at)
        cost = self.out.cost_bytes(source, at, self.spec[name].nbytes)
        return cost * STAYS if name in self.fixed and source != at else cost

    def sends(self, names: Sequence[str], inputs: Sequence[AxisPlacement]) -> bool:
        """Whether ranks send anything for operands that are placed so."""
        pairs = dict.fromkeys(zip(names, inputs, strict=True))
        return any(self.cost(name, at) > 0 and self.source(name, at) != REPLICATED for name, at in pairs)

    def _viewed_from(self, name: str) -> str | None:
        """What a sharded value is a view of, where that is sharded as well."""
        op = self.made.get(name)
        if op is None or op.target not in SAME_DATA or len(op.outputs) != 1:
            return None
        base = operands(op)[0]
        at = self.placed.get(base)
        return base if at is not None and at.is_sharded and base not in self.fixed else None
