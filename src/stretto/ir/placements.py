"""Which part of a value a rank has: what follows for an op's result from what it reads.

Ranks along an axis walk one program. Of the value that the program names, each rank has along the axis:

    equal      all of it
    part       an equal slice along a dim, or of each of `blocks` equal blocks along it
    sum        a partial sum: the value is the sum over ranks
    local      something of its own. Only what reads the rank's coordinate makes such: the lookups in a
               sharded vocabulary, and the cross-entropy over one, whose collectives make values of it again;
               and the rows of a rank's tokens, which it sorts by expert

An op computes on what its rank has, and its result must be placed so that it is what the op would
have made of the values themselves. Where it is not (a nonlinear function of partial sums, a partial sum plus
a full value, a slice beside another slice) the op is refused. Collectives change how a value is placed,
never the value. So a program of which every op is placed computes what it would compute without the axis.

A slice is known by its place in the order of a tensor's elements, which views keep. Where dims of one element
make it several dims' at once, all are remembered until an op, or the model's own shape, decides.

Gathered values are put in order by a view, a permutation and a copy, which passes move and drop
(`passes.sequence_first`): what is checked is what is equal, sharded or added, not the order of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stretto.ir.collectives import Kind
from stretto.ir.dim_rules import Dims
from stretto.ir.dims import dims_of, operands
from stretto.ir.op_names import ATTENTION, ATTENTION_BACKWARD, OWN
from stretto.ir.placed_by_rule import (
    EXPAND,
    VIEW_OPS,
    all_cuts,
    behind_one_another,
    full,
    joined,
    with_local,
    with_parts,
)
from stretto.ir.placement import (
    EQUAL,
    LOCAL,
    SUM,
    UNKNOWN,
    EqualReducedError,
    NeedsEqualError,
    Placement,
    RefusedError,
    cuts_at,
    is_thin,
    of_whom,
    part,
    uniform_view,
    where_cut,
)
from stretto.ir.prices import signature
from stretto.ir.program import CHUNK, GETITEM, INDEX, STARTS, VIEW, WAIT, Op, TensorSpec, refs
from stretto.ir.updates import SQUARES, UPDATE, by_element, clipped_by

KNOWN_OPS = ("aten.", "stretto_moe.", "stretto_copies.", "stretto_ctc.")
"""Libraries whose ops give equal results of equal operands, unless they draw."""

OWN_REDUCTIONS = ("aten.amax.default", "aten.nll_loss_forward.default", "aten.nll_loss_backward.default")
"""What the cross-entropy over a sharded vocabulary does along it."""

FILLS = frozenset(
    f"aten.{name}.default"
    for name in (
        *("zeros", "ones", "full", "empty", "scalar_tensor", "zeros_like", "ones_like", "full_like"),
        *("empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "empty_strided"),
        "new_empty_strided",
    )
)
"""One number everywhere."""

SIDE_BY_SIDE = "aten._chunk_cat.default"
"""Tensors of any placement, in one flat tensor, in which each keeps its own."""
IN_DTYPE = "stretto_copies.in_dtype.default"
"""Copies of tensors of any placement, of which each keeps its own."""

SLICE = "aten.slice.Tensor"
CAT, CLONE = "aten.cat.default", "aten.clone.default"
SPLITS = frozenset(
    f"aten.{name}" for name in ("split.Tensor", "split_with_sizes.default", "split_with_sizes_copy.default")
)


def _is_zero(op: Op) -> bool:
    name = op.target.split(".")[1]
    if "zeros" in name:
        return True
    at = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}.get(name)
    return at is not None and len(op.args) > at and op.args[at] == 0 and op.args[at] is not False


def _to_own_keys(op: Op, given: Sequence[Placement]) -> bool:
    """Whether it is attention to the keys that a rank has, whose results are merged: of queries, keys and
    values nothing is sharded but rows."""
    tensors = given[:3] if op.target in ATTENTION else given[:4]  # (batch, heads, rows, features)
    rows = (kept.kind in ("equal", "local") or any(dim == 2 for dim, _ in kept.at) for kept in tensors)
    alone = not any(kept.kind == "sum" for kept in given)
    return op.target in ATTENTION | ATTENTION_BACKWARD and alone and all(rows)


def _adds_up(rule: Dims, given: Sequence[Placement]) -> bool:
    """Whether what an op makes of partial sums are partial sums of what it makes."""
    sums = {at for at, kept in enumerate(given) if kept.kind == "sum"}
    return not any(kept.kind == "part" for kept in given) and any(
        sums <= together and all(given[at].zero for at in together - sums) for together in rule.linear
    )


def _with_rows(kept: Placement, dim: int, before: int, after: int) -> Placement:
    """Where along a dim there are more of what another axis has, or fewer: so many more blocks, or fewer. One
    block may be a part of one: of so many together, some are in the same."""
    at = []
    for d, blocks in kept.at:
        times = after // before if d == dim else 1
        if times > 1 and blocks == 1:
            at += [(d, count) for count in range(times, 0, -1) if times % count == 0]
        else:
            at.append((d, max(blocks * after // before, 1) if d == dim else blocks))
    return replace(kept, at=tuple(at))


class Placer:
    """Places the ops of a program one by one, along one axis.

    axis, size: of the ranks. along: how many of them differ, where they share parts. given: value ->
        placement, of values that no op makes (others are equal).
    """

    def __init__(
        self, axis: str, size: int, given: Mapping[str, Placement], along: int | None = None
    ) -> None:
        self._axis = axis
        self.along = along or size
        self.values: dict[str, Placement] = dict(given)
        self._tuples: dict[str, tuple[Placement, ...]] = {}
        self._shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
        """Flat tensor -> the shapes of what is side by side in it."""
        self._taken: dict[str, tuple[Placement, tuple[int, ...]]] = {}
        """What is taken out of one -> how it is placed in its own shape."""
        self._known: dict[Any, tuple[Placement, ...]] = {}

    def of(self, name: str) -> Placement:
        return self.values.get(name, EQUAL)

    def place(self, op: Op, specs: Mapping[str, TensorSpec]) -> None:
        """Find the placement of what an op makes, or updates. specs: of the values that it reads. Raises
        PlacementError."""
        if op.target == UPDATE:
            by = clipped_by(op)
            if by is not None and not self.of(by[0].name).is_full:
                raise NeedsEqualError([by[0].name])
            for each in by_element(op, specs):
                self.values[each.name] = self._placed(each, specs)[0]
            return
        result = self._placed(op, specs)
        if len(result) > 1:
            self._tuples[op.name] = result
        self.values[op.name] = result[0]
        self._side_by_side(op, specs)

    def _side_by_side(self, op: Op, specs: Mapping[str, TensorSpec]) -> None:
        """Remember what is side by side in a flat tensor: a slice of it is one in its own shape alone."""
        if op.target == SIDE_BY_SIDE:
            self._shapes[op.name] = tuple(specs[name].shape for name in refs(op.args))
        elif op.uses and op.uses[0] in self._shapes:
            shapes = self._shapes[op.uses[0]]
            if op.target == GETITEM:
                kept = self.values[op.name]
                self._taken[op.name] = kept, shapes[int(op.args[1])]
                self.values[op.name] = LOCAL if kept.kind == "part" else kept
            elif op.target in (*STARTS, WAIT, *SPLITS) or (op.target == VIEW and len(shapes) > 1):
                self._shapes[op.name] = shapes
                if len(shapes) == 1:
                    self._taken[op.name] = self.values[op.name], shapes[0]
        if op.target in (*VIEW_OPS, SLICE) and op.uses[0] in self._taken:
            self._taken[op.name] = self._taken[op.uses[0]]

    def _placed(self, op: Op, specs: Mapping[str, TensorSpec]) -> tuple[Placement, ...]:
        if op.target in STARTS:
            source = op.args[0].name
            pieces = self._pieces(source)
            shapes = self._shapes.get(source, (op.made.shape,))
            return tuple(self._started(op, *one, specs) for one in zip(pieces, shapes, strict=True))
        if op.target == WAIT:
            return self._pieces(op.args[0].name)
        if op.target in (SIDE_BY_SIDE, IN_DTYPE):
            return tuple(self.of(name) for name in refs(op.args))
        row = op.target == VIEW and len(self._shapes.get(op.uses[0], ())) > 1
        if row or (op.target in SPLITS and op.uses[0] in self._shapes):
            return self._pieces(op.uses[0])
        if op.target in (*VIEW_OPS, SLICE) and op.uses[0] in self._taken:
            kept, shape = self._taken[op.uses[0]]
            again = op.target != SLICE and op.made.shape[1:] == shape[1:]
            return (kept if kept.kind != "part" or again else LOCAL,)
        if op.target == INDEX:
            return (LOCAL if op.args[-2] == self._axis else EQUAL,)
        if op.target == CHUNK:
            return (self._chunk(op),)
        if op.target == GETITEM:
            source = op.args[0].name
            several = self._tuples.get(source)
            return (self.of(source) if several is None else several[int(op.args[1])],)
        if op.target in FILLS:
            return (self._filled(op),)
        if op.target == SQUARES:
            return (self._squared(op),)
        names = operands(op)
        given = tuple(self.of(name) for name in names)
        if not op.target.startswith(KNOWN_OPS):
            return (of_whom(given),) * max(len(op.outputs), 1)
        if all(p is EQUAL for p in given) and op.target != EXPAND:
            return (EQUAL,) * max(len(op.outputs), 1)
        if op.target == OWN and op.args[1] == self._axis:
            return (LOCAL,)
        if UNKNOWN in given:
            return (of_whom(given),) * max(len(op.outputs), 1)
        key = signature(op, specs), op.outputs, op.random, given
        if key not in self._known:
            self._known[key] = self._ruled(op, names, given, [specs[name] for name in names])
        return self._known[key]

    def _pieces(self, name: str) -> tuple[Placement, ...]:
        """Of a flat tensor, those of what is side by side in it."""
        return self._tuples.get(name) or (self.of(name),)

    def _started(
        self, op: Op, kept: Placement, shape: Sequence[int], specs: Mapping[str, TensorSpec]
    ) -> Placement:
        """shape: what it is placed in, of what is side by side its own."""
        source, kind = op.args[0].name, op.kind
        assert kind is not None
        if op.args[-2] != self._axis:
            assert op.outputs[0] is not None
            rows = op.outputs[0].shape[:1]
            return _with_rows(kept, 0, specs[source].shape[0], rows[0]) if rows else kept
        if not kind.sums and kind.differs == "never":
            return self._gathered(source, kept)
        if not kind.sums:
            return self._exchanged(source, kept, kind)
        if kept.zero:
            return EQUAL
        if op.how == "max" and kept.kind in ("equal", "local"):
            return EQUAL
        if kept.kind == "equal":
            raise EqualReducedError(source)
        if not kind.splits:
            return EQUAL
        part_of = Placement("part", tuple((d, 1) for d in range(len(shape))))
        return part_of if source in self._shapes else all_cuts(part_of, op.made)

    def _exchanged(self, source: str, kept: Placement, kind: Kind) -> Placement:
        """What goes to other ranks is no part of the value as ops know it."""
        if kept.zero or (kept.kind == "equal" and kind.differs == "as given"):
            return EQUAL
        if kept.kind == "sum":
            raise NeedsEqualError((source,))
        return LOCAL

    def _gathered(self, source: str, kept: Placement) -> Placement:
        if kept.kind not in ("part", "local", "equal") and not kept.zero:
            raise RefusedError(f"{source} is {kept} and is gathered from all ranks")
        return EQUAL

    def _squared(self, op: Op) -> Placement:
        """A sum over all elements: of full tensors, or of the parts that ranks have."""
        given = {name: self.of(name) for name in op.uses}
        if sums := [name for name, kept in given.items() if kept.kind == "sum"]:
            raise NeedsEqualError(sums)
        full = [name for name, kept in given.items() if kept.kind == "equal"]
        if full and len(full) < len(given):
            raise RefusedError(f"ranks have parts of others than {full[0]}")
        return EQUAL if full else SUM

    def _chunk(self, op: Op) -> Placement:
        source = op.args[0].name
        kept = self.of(source)
        if op.args[-2] != self._axis:
            return _with_rows(kept, op.args[1], op.args[-1], 1)
        if kept.zero or kept.kind == "local":
            return LOCAL if kept == UNKNOWN else kept
        if kept.kind == "sum":
            raise NeedsEqualError((source,))
        if kept.kind != "equal":
            raise RefusedError(f"{source} is {kept}, and every rank takes a slice of it")
        return part(int(op.args[1]))

    def _filled(self, op: Op) -> Placement:
        made = op.outputs[0]
        dims = frozenset(range(0 if made is None else len(made.shape)))
        return Placement("equal", uniform=dims, zero=_is_zero(op))

    def _ruled(
        self,
        op: Op,
        names: Sequence[str],
        given: Sequence[Placement],
        specs: Sequence[TensorSpec],
    ) -> tuple[Placement, ...]:
        if op.target in VIEW_OPS or op.target == CLONE:
            return (self._view(op, given[0], specs[0]),)
        if op.target in SPLITS and given[0].kind == "part":
            return self._split(op, given[0], specs[0])
        if op.target == CAT:  # what is empty has no dims
            used = [k for k, spec in enumerate(specs) if spec.shape != (0,)]
            names, given, specs = ([values[k] for k in used] for values in (names, given, specs))  # type: ignore[assignment]
        rule = joined(op, specs) if op.target == CAT else dims_of(op, self._shared(op, given, specs))
        if op.target in SPLITS or (rule is None and op.target == SLICE):
            return (given[0],) * len(op.outputs)
        if any(p.kind == "local" for p in given):
            if _to_own_keys(op, given):
                return (LOCAL,) * len(op.outputs)
            return with_local(rule, names, given, op)
        if rule is None:
            if all(p.kind == "equal" for p in given):
                return (EQUAL,) * max(len(op.outputs), 1)
            return (LOCAL,) * max(len(op.outputs), 1)
        partial_sums = {at for at, p in enumerate(given) if p.kind == "sum"}
        if partial_sums and all(is_thin(p, s.shape) for p, s in zip(given, specs, strict=True) if p.at):
            # A sum over repetitions, of which a rank has one, is a slice of one element there.
            given = [SUM if p.at else p for p in given]
            partial_sums = {at for at, p in enumerate(given) if p.kind == "sum"}
        if any(p.kind == "part" for p in given):
            along = behind_one_another(rule, given, specs) if op.target == CAT else ()
            try:
                made = with_parts(op, rule, names, given, specs)
            except RefusedError:
                if along:
                    return (Placement("part", along),)
                if op.target in OWN_REDUCTIONS or _to_own_keys(op, given):
                    return (LOCAL,) * len(op.outputs)
                if not _adds_up(rule, [SUM if p.or_sum else p for p in given]):
                    raise
                return (SUM,) * len(op.outputs)
            if along:
                return (replace(made[0], at=tuple(dict.fromkeys((*made[0].at, *along)))),)
            return made
        if partial_sums:
            if _adds_up(rule, given):
                return (SUM,) * len(op.outputs)
            raise NeedsEqualError([names[at] for at in sorted(partial_sums)])
        return full(op, rule, given, specs)

    def _shared(
        self, op: Op, given: Sequence[Placement], specs: Sequence[TensorSpec]
    ) -> Sequence[TensorSpec]:
        """Operands of attention with all heads that ranks have: one head of keys, which a rank's queries
        share, is a part of several, or the only one."""
        if "scaled_dot_product" not in op.target:
            return specs
        first = 1 if "_backward" in op.target else 0
        result = list(specs)
        for k in range(first, first + 3):
            batch, *rest = result[k].shape
            if (1, 1) in given[k].at and rest:
                result[k] = replace(result[k], shape=(batch, rest[0] * self.along, *rest[1:]), stride=None)
        return result

    def _view(self, op: Op, kept: Placement, spec: TensorSpec) -> Placement:
        made = op.made
        if kept.kind == "part":
            inners = dict.fromkeys(where_cut(spec.shape, *at) for at in kept.at)
            result = tuple(dict.fromkeys(at for i in inners for at in cuts_at(made.shape, i)))
            if not result:
                raise RefusedError(
                    f"{op.args[0].name} is {kept} of {spec}, and gets the shape {list(made.shape)}, in which "
                    "that is no slice along one dim"
                )
            return replace(kept, at=result)
        if kept.kind == "equal" and kept.uniform:
            return replace(kept, uniform=uniform_view(spec.shape, made.shape, kept.uniform))
        return kept

    def _split(self, op: Op, kept: Placement, spec: TensorSpec) -> tuple[Placement, ...]:
        dim = (op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", 0)) % len(spec.shape)
        result: list[tuple[tuple[int, int], ...]] = []
        for made in op.outputs:
            assert made is not None
            at = []
            for d, blocks in kept.at:
                block = spec.shape[dim] // blocks if d == dim else 0
                if d != dim:
                    at.append((d, blocks))
                elif made.shape[dim] and made.shape[dim] % block == 0:
                    at.append((dim, made.shape[dim] // block))
            result.append(tuple(at))
        if not all(result):
            raise RefusedError(
                f"{op.args[0].name} is {kept}, and is split along that dim in pieces that are not full "
                "blocks of it"
            )
        return tuple(Placement("part", at) for at in result)
