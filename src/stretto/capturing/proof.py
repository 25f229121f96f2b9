"""Proves that a sharded step computes what the model alone computes, and sums what must be summed for it.

    1. Parameters are placed as their shards say, the batch and buffers are full.
    2. Every op is placed, in order (`stretto.ir.placements`). Where the shape is known that a result has in
       the model alone, the rank's shape and the placement must come to it.
    3. An op that would be right if a partial sum were summed before gets the sum. What is added to a sum over
       ranks is added to its partial sums, and one sum is made of both. A sum of what is full is left out.
    4. The loss and the buffers must be full at the end, and a gradient sharded as its parameter is; that of a
       full parameter may be a partial sum on every rank, which is summed once a step.

Whatever does not fit is refused, with the module and what to write. Copies of a shard (heads of keys that
several ranks share) make two axes of one: along the first the shards differ, along the second they are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stretto.capturing.graph import TracedOp
from stretto.errors import CaptureError
from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.placed_by_rule import VIEW_OPS
from stretto.ir.placed_programs import placers_of
from stretto.ir.placement import (
    LOCAL,
    SUM,
    UNKNOWN,
    EqualReducedError,
    NeedsEqualError,
    Placement,
    RefusedError,
    is_thin,
    part,
)
from stretto.ir.placements import Placer
from stretto.ir.program import CHUNK, STARTS, WAIT, Const, Op, Ref, Shard, TensorSpec
from stretto.parallelize.tensor import AXIS
from stretto.passes.rewrite import rooted, with_uses

ADD = "aten.add.Tensor"


@dataclass(frozen=True, slots=True)
class Proved:
    """The step with the sums that it needs. renamed: a root -> what it is called now. partial: parameters
    whose gradients are partial sums. seen: what is observed -> axes along which it is a partial sum."""

    ops: tuple[TracedOp, ...]
    renamed: Mapping[str, str]
    partial: Mapping[str, tuple[str, ...]]
    seen: Mapping[str, tuple[str, ...]]


@dataclass(slots=True)
class Proof:
    """See the module. given: specs of what no op makes; gradients: parameter -> its value; kept: `loss` and
    `buffer/<name>` -> value. on_meshes: the program says what is summed where, and nothing is added.
    seen: values that are observed."""

    ops: Sequence[TracedOp]
    given: Mapping[str, TensorSpec]
    shards: Mapping[str, Shard]
    gradients: Mapping[str, str | None]
    kept: Mapping[str, str]
    size: int
    on_meshes: bool = False
    seen: Sequence[str] = ()
    specs: dict[str, TensorSpec] = field(init=False)
    placers: list[tuple[int, Placer]] = field(init=False)
    made: list[TracedOp] = field(default_factory=list)
    at: dict[str, int] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    uses: Counter[str] = field(init=False)
    roots: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.specs = dict(self.given)
        try:
            placers = placers_of(AXIS, self.size, self.shards, exact=not self.on_meshes)
        except ValueError as error:
            raise CaptureError(f"{error}: give both the same heads of keys, or one 'replicated'") from None
        self.placers = [(placer.along, placer) for placer in placers]
        self.uses = Counter(name for item in self.ops for name in item.op.uses)
        grads = (v for v in self.gradients.values() if v is not None)
        self.roots = frozenset((*self.kept.values(), *grads, *self.seen))

    def proved(self) -> Proved:
        """Raises CaptureError for what does not fit."""
        for item in self.ops:
            self._add(item)
        for what, value in self.kept.items():
            self._full(what, value)
        partial = dict(self._partial())
        ops = [item for item in self.made if item.op.name not in self.gone]
        if self.renamed or self.sums or self.gone:
            owned = rooted(item.op for item in ops)
            ops = [replace(item, op=op) for item, op in zip(ops, owned, strict=True)]
        seen = {value: self._partial_sums(value) for value in self.seen}
        return Proved(tuple(ops), {root: self._now(root) for root in self.roots}, partial, seen)

    def _now(self, name: str) -> str:
        while name in self.renamed:
            name = self.renamed[name]
        return name

    # --- steps 2 and 3 ------------------------------------------------------------------------------------

    def _add(self, item: TracedOp) -> None:
        item = replace(item, op=with_uses(item.op, self._now)) if self.renamed else item
        op = item.op
        if op.target == WAIT and not self._is_start(op.args[0].name):
            self.renamed[op.name] = op.args[0].name  # what it waited for is no communication any more
            return
        while True:
            try:
                for _, placer in self.placers:
                    placer.place(op, self.specs, own=item.own, scaled=item.scaled, backward=item.backward)
                break
            except NeedsEqualError as need:
                if self.on_meshes:
                    words = f"every rank has a partial sum of {', '.join(need.names)}, which is used in full"
                    raise self._refusal(item, words) from None
                merged = self._merged(item)
                if merged:
                    return
                op = with_uses(op, self._summed(item, need.names))
                item = replace(item, op=op)
            except EqualReducedError as full:
                if self.on_meshes:
                    words = f"{full} is full on every rank, and is summed over ranks"
                    raise self._refusal(item, words) from None
                self._without_sum(item)
                return
            except RefusedError as error:
                raise self._refusal(item, str(error)) from None
        self._append(item)
        if item.full is not None:
            self._compare(item)

    def _without_sum(self, item: TracedOp) -> None:
        """A sum over ranks of what all have in full is that value; scattered, it is a slice."""
        op = item.op
        source = op.args[0].name
        if any(placer.of(source).kind != "equal" for _, placer in self.placers):
            raise self._refusal(item, f"{source} is full on ranks that share a head, and is summed over them")
        if op.target == ALL_REDUCE.target:
            self.renamed[op.name] = source
            return
        own = replace(op, target=CHUNK, args=(op.args[0], 0, *op.args[2:]), alias=source)
        self._append(replace(item, op=own))
        for _, placer in self.placers:
            placer.values[op.name] = placer.scattered(op, self.specs[source])

    def _is_start(self, name: str) -> bool:
        at = self.at.get(name)
        return at is not None and self.made[at].op.target in STARTS

    def _append(self, item: TracedOp) -> None:
        op = item.op
        self.at[op.name] = len(self.made)
        self.made.append(item)
        if len(op.outputs) == 1 and op.outputs[0] is not None:
            self.specs[op.name] = op.outputs[0]

    def _summed(self, item: TracedOp, names: Sequence[str]) -> Callable[[str], str]:
        result: dict[str, str] = {}
        for name in names:
            kinds = {placer.of(name).kind for _, placer in self.placers}
            if kinds != {"sum"}:
                raise self._refusal(
                    item, f"{name} is a partial sum among ranks that share a head, and is used in full"
                )
            if name not in self.sums:
                maker = self.made[self.at[name]]
                spec = TensorSpec(self.specs[name].shape, self.specs[name].dtype)
                source = name
                if self.specs[name].stride is not None:
                    source = f"{name}_in_order"
                    self._new(maker, Op(source, "aten.clone.default", (Ref(name),), _CONTIGUOUS, (spec,)))
                start = Op(
                    f"{name}_sum", ALL_REDUCE.target, (Ref(source), "sum", AXIS, self.size), (), (spec,)
                )
                self._new(maker, start)
                self._new(maker, Op(f"{name}_summed", WAIT, (Ref(start.name),), (), (spec,), start.name))
                self.sums[name] = f"{name}_summed"
            result[name] = self.sums[name]
        return lambda used: result.get(used, used)

    def _new(self, item: TracedOp, op: Op) -> None:
        op = replace(op, module=item.op.module)
        for _, placer in self.placers:
            placer.place(op, self.specs)
        self._append(TracedOp(op, item.segment, item.backward))

    def _merged(self, item: TracedOp) -> bool:
        """A partial sum that is added to a sum over ranks is summed with it: True where that was done."""
        op = item.op
        if op.target != ADD or op.kwargs or len(op.uses) != 2 or len(op.args) != 2:
            return False
        for total, partial_sum in (op.uses, op.uses[::-1]):
            at = self.at.get(total)
            if at is None or self.made[at].op.target != WAIT or self.uses[total] != 1 or total in self.roots:
                continue
            start = self.made[self.at[self.made[at].op.args[0].name]].op
            source = start.args[0].name
            kinds = {placer.of(name).kind for _, placer in self.placers for name in (source, partial_sum)}
            plain = self.specs[source].shape == self.specs[partial_sum].shape
            if (
                start.target != ALL_REDUCE.target
                or start.args[1:3] != ("sum", AXIS)
                or kinds != {"sum"}
                or not plain
            ):
                continue
            spec = TensorSpec(self.specs[source].shape, self.specs[source].dtype)
            both = f"{op.name}_parts"
            maker = self.made[self.at[partial_sum]]
            self._new(maker, Op(both, ADD, (Ref(source), Ref(partial_sum)), (), (spec,)))
            name = f"{op.name}_sum"
            self._new(maker, Op(name, start.target, (Ref(both), *start.args[1:]), (), (spec,)))
            self._new(maker, Op(op.name, WAIT, (Ref(name),), (), (spec,), name))
            self.gone |= {start.name, total}
            return True
        return False

    def _compare(self, item: TracedOp) -> None:
        """The shape in the model alone is that of a rank with what is sharded."""
        op, full = item.op, item.full
        spec = self.specs[op.name]
        assert full is not None
        left = list(full)
        if len(left) != len(spec.shape):
            raise self._shape_refusal(item)
        for number, (size, placer) in enumerate(self.placers):
            resident = placer.of(op.name)
            if resident.kind in ("local", "stacked"):
                return
            last = number == len(self.placers) - 1
            if resident.kind == "part":
                fits = [
                    (d, b)
                    for d, b in resident.at
                    if left[d] % max(spec.shape[d] * size, 1) == 0
                    and (not last or left[d] == spec.shape[d] * size)
                ]
                if not fits and resident.free and tuple(left) == spec.shape:
                    placer.values[op.name] = SUM  # it was summed over, where a rank has one element
                    continue
                if not fits:
                    raise self._shape_refusal(item)
                left[fits[0][0]] //= size
                placer.values[op.name] = Placement("part", tuple(fits))
            elif resident.kind == "equal":
                one = {d for d, n in enumerate(spec.shape) if n == 1} if item.repeated else set()
                for d in resident.uniform | one:
                    factor = left[d] // max(spec.shape[d], 1)
                    # One number everywhere, of a part's size: a slice of what the model alone has there.
                    if left[d] == spec.shape[d] * factor and (
                        factor == self.size or (factor == size and (last or size != self.placers[-1][0]))
                    ) and factor > 1:  # fmt: skip
                        left[d] //= size
                        placer.values[op.name] = part(d)
                        break
        if tuple(left) != spec.shape or not self._in_order(op):
            raise self._shape_refusal(item)

    def _in_order(self, op: Op) -> bool:
        """Where a dim is sharded along both axes of an axis with copies, the shards are the outer ones: what
        became one dim had them before the copies."""
        if len(self.placers) < 2 or op.target not in VIEW_OPS:
            return True
        outer, inner = (placer.of(op.args[0].name) for _, placer in self.placers)
        now = [placer.of(op.name) for _, placer in self.placers]
        if (
            any(resident.kind != "part" for resident in (outer, inner, *now))
            or now[0].at[0][0] != now[1].at[0][0]
        ):
            return True
        return outer.at[0][0] <= inner.at[0][0]

    # --- step 4 -------------------------------------------------------------------------------------------

    def _full(self, what: str, value: str) -> None:
        now = self._now(value)
        kinds = {placer.of(now).kind for _, placer in self.placers}
        if kinds == {"equal"}:
            return
        where = "the loss" if what == "loss" else f"buffer {what.removeprefix('buffer/')!r}"
        item = self.made[self.at[now]]
        if kinds != {"sum"} or self.on_meshes:
            if all(placer.of(now) == UNKNOWN for _, placer in self.placers):
                return
            resident = next(p for _, placer in self.placers if (p := placer.of(now)).kind != "equal")
            raise CaptureError(
                f"{where} differs between {AXIS} ranks: it is {resident} ({_made_in(item)}). Name the module "
                "whose output it takes 'colwise_gather_output', or leave it out of tp_plan"
            )
        self.renamed[now] = self._summed(replace(item), (now,))(now)

    def _partial_sums(self, value: str) -> tuple[str, ...]:
        now = self._now(value)
        resident = [placer.of(now) for _, placer in self.placers]
        if all(one.kind == "equal" or one == UNKNOWN for one in resident):
            return ()
        if all(one.kind == "sum" or one == LOCAL or is_thin(one, self.specs[now].shape) for one in resident):
            return (AXIS,)
        raise CaptureError(
            f"{_made_in(self.made[self.at[now]])} observes what is {resident[0]} on {AXIS} ranks: observe "
            "a sum "
            "over what is spread"
        )

    def _partial(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        for name, value in self.gradients.items():
            if value is None:
                continue
            now = self._now(value)
            resident = [placer.of(now) for _, placer in self.placers]
            shard = self.shards.get(name)
            wanted = [part(shard.dim, shard.blocks) if shard is not None else None for _ in resident]
            if shard is not None and shard.copies > 1:
                wanted[-1] = None
            kinds = set()
            for have, want in zip(resident, wanted, strict=True):
                if want is None and have == UNKNOWN:
                    kinds.add("equal")
                elif want is None and (is_thin(have, self.specs[now].shape) or have == LOCAL):
                    kinds.add("sum")
                elif want is None and have.kind in ("equal", "sum"):
                    if not have.zero:
                        kinds.add(have.kind)
                elif want is None or not (
                    have.kind == "local" or have.zero or (have.kind == "part" and want.at[0] in have.at)
                ):
                    item = self.made[self.at[now]] if now in self.at else None
                    raise CaptureError(
                        f"the gradient of parameter {name!r} is {have}, where the parameter is "
                        f"{'full' if want is None else want} ({_made_in(item)}): give its module the style "
                        "that its use needs in tp_plan ('colwise', 'rowwise'), or leave the modules around "
                        "it out"
                    )
            if kinds == {"sum"}:
                yield name, (AXIS,)
            elif len(kinds) > 1 or (shard is not None and shard.copies > 1 and kinds == {"equal"}):
                raise CaptureError(
                    f"the gradient of parameter {name!r} is a sum over some {AXIS} ranks and not over "
                    "others: leave its module out of tp_plan"
                )

    # --- words --------------------------------------------------------------------------------------------

    def _refusal(self, item: TracedOp, what: str) -> CaptureError:
        fix = (
            "Reshard it to [Replicate()] before"
            if self.on_meshes
            else "Communicate what all ranks have in full: gather it before"
            if item.op.target in STARTS
            else "Give the modules that make the two sides styles that agree in tp_plan (both 'colwise', or "
            "the sharded one 'colwise_gather_output'), or leave the sharded one out of it"
        )
        return CaptureError(
            f"{_made_in(item)} cannot be computed in parts ({item.op.name}, {item.op.target}): "
            f"{self._said(what)}. {fix}"
        )

    def _said(self, what: str) -> str:
        for name in what.replace(",", " ").split():
            at = self.at.get(name)
            module = self.made[at].op.module if at is not None else ""
            if module:
                return what.replace(name, f"{name} (of {module})", 1)
        return what

    def _shape_refusal(self, item: TracedOp) -> CaptureError:
        op = item.op
        resident = ", ".join(str(placer.of(op.name)) for _, placer in self.placers)
        return CaptureError(
            f"{_made_in(item)} makes a tensor of shape {list(item.full or ())} in the model alone, and "
            f"{list(self.specs[op.name].shape)} on each of {self.size} {AXIS} ranks, where it is {resident} "
            f"({op.name}, {op.target}): the code counts what is sharded otherwise than tp_plan spreads it. "
            "Divide the count by the style 'attributes:NAME', write -1 for it, or leave the module out of "
            "tp_plan"
        )


def _made_in(item: TracedOp | None) -> str:
    return (
        "the model" if item is None else item.op.module or ("the backward" if item.backward else "the loss")
    )


_CONTIGUOUS = (("memory_format", Const("memory_format", "contiguous_format")),)
