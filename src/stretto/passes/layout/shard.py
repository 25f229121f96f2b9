"""From a step at global shapes to one rank's step, along one axis of the mesh.

    1. Ops are walked once, in order. Of each op there are choices: how operands may be placed, and how results
       are then. They come from the table by which layouts are proved (`stretto.ir.dims`), from what views do to
       slices, and from rules of this room.
    2. The choice that moves fewest bytes is taken. Partial sums stay so as long as ops are linear and make
       them no larger. What is computed in full on every rank counts by its flops.
    3. Conversions are emitted before the op, once for a value, and where its value was made; sizes in the op's
       arguments become local ones.
    4. At the end roots have the placements that are wanted of them: gradients those of their parameters, all
       else replicated. A gradient of a replicated parameter may stay partial; it is summed once a step.

An op that cannot be computed on parts is computed in full, behind a gather: that is slow, and right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.ir.dim_rules import SUMMED, Dims, results_along
from stretto.ir.dims import operands
from stretto.ir.placed_by_rule import VIEW_OPS
from stretto.ir.program import GETITEM, Arg, Op, Ref, TensorSpec
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.decomposed import DECOMPOSED, Sub
from stretto.passes.layout.emit import Emitter, MisfitError
from stretto.passes.layout.lookups import LOOKUPS
from stretto.passes.layout.losses import LOG_SOFTMAX, NLL, SplitLoss, TokenLoss, token_losses
from stretto.passes.layout.op_groups import KEEP_PARTIAL, SAME_DATA
from stretto.passes.layout.placement import (
    PARTIAL,
    REPLICATED,
    AxisPlacement,
    fits,
    local_shape,
    local_spec,
    sharded,
    viewed,
)
from stretto.passes.layout.program import Origin, StepProgram
from stretto.passes.layout.rules import RULES, Choice, Given, emit_op, full, rule_of
from stretto.passes.layout.shared_heads import SHARED, along_shared, along_two

GRAD, PARAM = "grad/", "param/"

STAYS = 1e6
"""What a byte of a sharded parameter counts when it is gathered: parameters stay, activations move."""

FLOPS_A_BYTE = 1000
"""What is computed in the time in which a byte is sent (an H100 computes 990 TFLOP/s and sends 450 GB/s to its
neighbours: 2,200)."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """An op that has no rule for slices, and is computed in full. nbytes: gathered for it."""

    op: Op
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardedProgram:
    """placed: of all values of the global program. gathered: what was computed in full for want of a rule.
    partial: roots that are partial sums still."""

    program: StepProgram
    placed: Mapping[str, AxisPlacement]
    gathered: tuple[Gathered, ...]
    partial: frozenset[str]


def shard(
    program: StepProgram,
    axis: str,
    size: int,
    placed: Mapping[str, AxisPlacement],
    wishes: Mapping[str, AxisPlacement],
    may_be_partial: frozenset[str] = frozenset(),
) -> ShardedProgram:
    """See the module. placed: of parameters and leaves that are sharded. wishes: value of the forward -> its
    placement, as soon as it is made. may_be_partial: roots beside gradients."""
    return _Walk(program, axis, size, placed, wishes).run(may_be_partial)


class _Walk:
    """spec, placed: global spec and placement of each value; forms: placement -> the local value."""

    def __init__(
        self,
        program: StepProgram,
        axis: str,
        size: int,
        placed: Mapping[str, AxisPlacement],
        wishes: Mapping[str, AxisPlacement],
    ) -> None:
        self.program, self.size, self.asked = program, size, dict(wishes)
        self.spec: dict[str, TensorSpec] = dict(program.given)
        self.placed = {name: placed.get(name, REPLICATED) for name in program.given}
        self.stored = dict(self.placed)
        local = {name: local_spec(self.placed[name], spec, size) for name, spec in program.given.items()}
        self.out = Emitter(axis, size, local)
        self.forms = {name: {at: name} for name, at in self.placed.items()}
        self.parts: dict[str, list[str]] = {}
        self.origins: dict[str, tuple[Origin, str]] = {}
        self.fixed = {n: None for n, at in self.placed.items() if n.startswith(PARAM) and at.is_sharded}
        self.gathered: list[Gathered] = []
        self.ahead = Ahead(program, size, self.spec)
        self.want = self.ahead.wanted(
            {value: self._wanted(root) for root, value in program.roots.items() if self._wanted(root).is_sharded}
        )
        self.losses = token_losses((op for op, _ in program.ops), self.ahead.uses)
        self.split: dict[str, SplitLoss] = {}
        self.taken = {
            (op.args[0].name, op.args[1]): op.name for op, _ in program.ops if op.target == GETITEM
        }

    def run(self, may_be_partial: frozenset[str]) -> ShardedProgram:
        loss = self.program.roots.get("loss", "")
        for op, origin in self.program.ops:
            self.out.origin, self.out.module = origin, op.module
            self._process(op)
            if op.name == loss:
                self.place(loss, REPLICATED)
        roots, partial = self._roots(may_be_partial)
        given = {name: self.out.specs[name] for name in self.program.given}
        made = replace(self.program, ops=tuple(self.out.ops), given=given, roots=roots)
        return ShardedProgram(made, dict(self.placed), tuple(self.gathered), partial)

    # --- step 1 -------------------------------------------------------------------------------------------

    def _process(self, op: Op) -> None:
        if op.target == GETITEM:
            if op.name not in self.placed:
                self._same(op.name, self.parts[op.args[0].name][op.args[1]])
            return
        if op.name in self.losses and self._of_split_loss(op, self.losses[op.name]):
            return
        names = operands(op)
        choices = sorted(
            ((self._cost(op, names, choice), at, choice) for at, choice in enumerate(self._choices(op, names))),
            key=lambda item: item[:2],
        )
        reason = MisfitError(f"{op.target} ({op.module}) has operands that ranks share")
        for cost, _, choice in choices:
            if cost == math.inf:
                break
            if op.target in DECOMPOSED and self._moves(names, choice) and self._decomposed(op, names):
                return
            try:
                self._emit(op, names, choice)
                return
            except MisfitError as error:
                reason = error
        raise reason

    def _choices(self, op: Op, names: Sequence[str]) -> Iterator[Choice]:
        yield full(op)
        if not names:
            return
        given = Given(tuple(self.placed[n] for n in names), tuple(self.spec[n] for n in names), self.size)
        for rules in (LOOKUPS, RULES, SHARED):
            if op.target in rules:
                yield from rules[op.target](op, given)
        if op.target in VIEW_OPS:
            yield from self._view(op, names[0])
            return
        rule = rule_of(op, given.specs)
        if rule is not None:
            yield from self._partial(op, rule, given)
            yield from along_two(op, rule, given)
            for label, blocks, copies in dict.fromkeys(self._labels(op, names, rule)):
                if copies > 1:
                    yield from along_shared(op, rule, given, label, blocks, copies)
                else:
                    yield from self._along(op, rule, given, label, blocks)

    def _view(self, op: Op, name: str) -> Iterator[Choice]:
        made = op.outputs[0]
        assert made is not None
        for at in dict.fromkeys((self.placed[name], *self._wishes(name))):
            after = viewed(at, self.spec[name].shape, made.shape, self.size)
            if after is not None:
                yield Choice((at,), (after,))

    def _partial(self, op: Op, rule: Dims, given: Given) -> Iterator[Choice]:
        """Partial sums of operands in which the op is linear make partial sums."""
        same = all(spec is None or spec.dtype == given.specs[0].dtype for spec in op.outputs)
        if op.target not in KEEP_PARTIAL or not same:  # sums are taken in the dtype of what is added
            return
        for together in rule.linear:
            if any(given.placements[k] == PARTIAL for k in together):
                inputs = tuple(PARTIAL if k in together else REPLICATED for k in range(len(given.specs)))
                yield Choice(inputs, (PARTIAL,) * len(op.outputs))

    def _along(self, op: Op, rule: Dims, given: Given, label: int, blocks: int) -> Iterator[Choice]:
        """Slices along one label of the op's rule."""
        made = results_along(rule, label)
        if label in rule.full or (label in rule.summed and rule.added) or made is None:
            return
        inputs = tuple(
            sharded(labels.index(label), blocks) if label in labels else REPLICATED for labels in rule.inputs
        )
        outputs = tuple(
            sharded(dim, blocks) if isinstance(dim, int) else PARTIAL if dim == SUMMED else REPLICATED
            for dim in made
        )
        of_inputs = zip(inputs, given.specs, strict=True)
        of_outputs = zip(outputs, op.outputs, strict=True)
        if all(fits(at, spec.shape, self.size) for at, spec in of_inputs) and all(
            spec is None or fits(at, spec.shape, self.size) for at, spec in of_outputs
        ):
            yield Choice(inputs, outputs)

    def _labels(self, op: Op, names: Sequence[str], rule: Dims) -> Iterator[tuple[int, int, int]]:
        """Those along which operands are sharded, or may be where a sum is scattered, or the result is
        wanted."""
        for name, labels in zip(names, rule.inputs, strict=True):
            known = self._wishes(name) if self.placed[name].is_partial else iter(self.forms[name])
            for at in known:
                one = at.is_sharded and at.within is None and at.dim < len(labels)
                label = labels[at.dim] if one else None
                if label is not None:
                    yield label, at.blocks, at.copies
        want = self.want.get(op.name)
        if want is not None and len(rule.outputs) == 1:
            label = rule.outputs[0][want.dim]
            if label is not None and want.copies == 1:
                yield label, want.blocks, 1

    def _wishes(self, name: str) -> Iterator[AxisPlacement]:
        """How a partial sum may be scattered."""
        if self.placed[name] == PARTIAL:
            wish = self._wish(name)
            if wish is not None and fits(wish, self.spec[name].shape, self.size):
                yield wish

    def _wish(self, name: str) -> AxisPlacement | None:
        return self.asked.get(name) or self.ahead.best(name, self.placed, self.asked, self.fixed)

    # --- step 2 -------------------------------------------------------------------------------------------

    def _cost(self, op: Op, names: Sequence[str], choice: Choice) -> float:
        cost = self._moved(names, choice)
        if not any(at.is_sharded for at in (*choice.inputs, *choice.outputs)):
            cost += op.flops / FLOPS_A_BYTE
        want = self.want.get(op.name) if len(op.outputs) == 1 else None
        spec = op.outputs[0] if op.outputs else None
        if want is not None and spec is not None:
            cost += min(self.out.cost_bytes(choice.outputs[0], want, spec.nbytes), 1e30)
        return cost

    def _moved(self, names: Sequence[str], choice: Choice) -> float:
        pairs = dict.fromkeys(zip(names, choice.inputs, strict=True))
        return sum(self._conversion(name, at) for name, at in pairs)

    def _moves(self, names: Sequence[str], choice: Choice) -> bool:
        """Whether ranks send anything for it."""
        pairs = dict.fromkeys(zip(names, choice.inputs, strict=True))
        return any(
            self._conversion(name, at) > 0 and self._source(name, at) != REPLICATED for name, at in pairs
        )

    def _conversion(self, name: str, at: AxisPlacement) -> float:
        base: str | None = name
        while at == REPLICATED and base is not None and REPLICATED not in self.forms[base]:
            base = self._viewed_from(base)
        if at == REPLICATED and base is not None:
            return 0.0  # it is a view of what was gathered
        source = self._source(name, at)
        cost = self.out.cost_bytes(source, at, self.spec[name].nbytes)
        return cost * STAYS if name in self.fixed and source != at else cost

    def _source(self, name: str, at: AxisPlacement) -> AxisPlacement:
        nbytes = self.spec[name].nbytes
        return min(self.forms[name], key=lambda source: self.out.cost_bytes(source, at, nbytes))

    def _viewed_from(self, name: str) -> str | None:
        """What a sharded value is a view of, where that is sharded as well."""
        op = self.ahead.made.get(name)
        if op is None or op.target not in SAME_DATA or len(op.outputs) != 1:
            return None
        base = operands(op)[0]
        at = self.placed.get(base)
        return base if at is not None and at.is_sharded and base not in self.fixed else None

    # --- step 3 -------------------------------------------------------------------------------------------

    def _emit(self, op: Op, names: Sequence[str], choice: Choice) -> None:
        local = [self.form(name, at) for name, at in zip(names, choice.inputs, strict=True)]
        for name, at in zip(names, choice.inputs, strict=True):
            if self.placed[name].is_partial and not at.is_partial:
                self.place(name, at)  # a sum is taken once; what comes later adds to it
        made = (choice.emit or emit_op(choice, self.size))(self.out, op, local)
        if all(at == REPLICATED for at in choice.inputs) and self._moves_slices(names):
            nbytes = sum(self.spec[name].nbytes for name in names if self.placed[name].is_sharded)
            self.gathered.append(Gathered(op, nbytes))
        if len(op.outputs) != 1:
            self._several(op, made[0], choice)
            return
        self._made(op.name, op.outputs[0], made[0], choice.outputs[0])
        if op.target in SAME_DATA and names[0] in self.fixed:
            self.fixed[op.name] = None
        wish = self.asked.get(op.name)
        if wish is not None and not self.placed[op.name].is_partial:
            self.place(op.name, wish)
        elif choice.at_once and choice.outputs[0].is_partial:
            at = self._wish(op.name) if choice.outputs[0] == PARTIAL else None
            self.place(op.name, at if at and fits(at, self.spec[op.name].shape, self.size) else REPLICATED)

    def _moves_slices(self, names: Sequence[str]) -> bool:
        return any(self.placed[name].is_sharded and not name.startswith(PARAM) for name in names)

    def _several(self, op: Op, made: str, choice: Choice) -> None:
        """The results of an op with several; each that is read has the name by which it is."""
        self.parts[op.name] = []
        for k, (spec, at) in enumerate(zip(op.outputs, choice.outputs, strict=True)):
            name = self.taken.get((op.name, k), "")
            if name and spec is not None:
                local = self.out.emit(GETITEM, Ref(made), k, name=name)
                self._made(name, spec, local, at)
            self.parts[op.name].append(name)

    def _made(self, value: str, spec: TensorSpec | None, local: str, at: AxisPlacement) -> None:
        assert spec is not None, f"{value} is no tensor"
        if self.out.specs[local].shape != local_shape(at, spec.shape, self.size):
            raise MisfitError(f"{value} is {self.out.specs[local]}, where {spec} is {at}")
        self.spec[value], self.placed[value], self.forms[value] = spec, at, {at: local}
        self.origins[value] = self.out.origin, self.out.module

    def _same(self, name: str, value: str) -> None:
        self.spec[name], self.placed[name] = self.spec[value], self.placed[value]
        self.forms[name], self.origins[name] = dict(self.forms[value]), self.origins[value]

    def form(self, name: str, at: AxisPlacement) -> str:
        """The local value that is `name` with this placement; made where there is none."""
        forms = self.forms[name]
        if at not in forms:
            now = self.out.origin, self.out.module
            maker, module = self.origins.get(name, now)
            # It belongs to where its value was made, and to the backward where only that needs it.
            self.out.origin, self.out.module = now[0]._replace(segment=maker.segment), module
            source = self._source(name, at)
            base = self._viewed_from(name) if at == REPLICATED and source.is_sharded else None
            if base is None:
                forms[at] = self.out.converted(forms[source], source, at, self.spec[name].shape)
            else:  # gathered once for all its views
                (forms[at],) = emit_op(full(self.ahead.made[name]), self.size)(
                    self.out, self.ahead.made[name], [self.form(base, REPLICATED)]
                )
            self.out.origin, self.out.module = now
        return forms[at]

    def place(self, name: str, at: AxisPlacement) -> None:
        """From now on the value is placed so; a sum that is taken is no partial sum any more."""
        was = self.placed[name]
        self.form(name, at)
        self.placed[name] = at
        if was.is_partial and was != at:
            del self.forms[name][was]
        elif was != at and self.asked.get(name) == at:
            del self.forms[name][was]  # what reads a stream reads its slices

    def _decomposed(self, op: Op, names: Sequence[str]) -> bool:
        made = DECOMPOSED[op.target](op, [self.spec[name] for name in names], self._sub(op))
        if made is None:
            return False
        if len(op.outputs) == 1:
            self._same(op.name, made[0])
        else:
            self.parts[op.name] = list(made)
        return True

    def _sub(self, op: Op) -> Sub:
        """Emits one op of a decomposition at global shapes, and shards it."""
        probe = Emitter(self.out.axis, 1, {})

        def sub(target: str, *args: Arg, **kwargs: Arg) -> str:
            for name in (arg.name for arg in args if isinstance(arg, Ref)):
                probe.specs.setdefault(name, self.spec[name])
                same = len(op.outputs) == 1 and op.outputs[0] is not None
                if self.placed[name].is_partial and same and self.spec[name].shape == op.outputs[0].shape:  # type: ignore[union-attr]
                    wish = self._wish(op.name)  # what its result will meet
                    if wish is not None:
                        self.asked[name] = wish
            like = self.out.fresh(f"{op.name}_{target.split('.')[1]}")
            made = probe.emit(target, *args, name=like, kwargs=kwargs)
            self._process(probe.ops[-1][0])
            return made

        return sub

    def _of_split_loss(self, op: Op, loss: TokenLoss) -> bool:
        """A cross-entropy of logits that are sharded along the vocabulary; False for others."""
        if op.target == LOG_SOFTMAX and self.placed[loss.logits] == sharded(1):
            self.split[op.name] = SplitLoss(loss)
        state = self.split.get(loss.log_softmax.name)
        if state is None:
            return False
        if op.target == NLL:
            columns, target = self.form(loss.logits, sharded(1)), self.form(loss.target, REPLICATED)
            self.parts[op.name] = []
            for k, local in enumerate(state.forward(self.out, columns, target)):
                name = self.taken.get((op.name, k), "")
                if name:
                    self._made(name, op.outputs[k], local, REPLICATED)
                self.parts[op.name].append(name)
        elif loss.backward is not None and op.name == loss.backward.name:
            assert loss.nll_backward is not None
            grad = self.form(loss.nll_backward.args[0].name, REPLICATED)
            local = state.backward(self.out, grad, self.spec[loss.target])
            self._made(op.name, op.outputs[0], local, sharded(1))
        return True

    # --- step 4 -------------------------------------------------------------------------------------------

    def _wanted(self, root: str) -> AxisPlacement:
        if not root.startswith(GRAD):
            return REPLICATED
        at = self.stored.get(f"{PARAM}{root.removeprefix(GRAD)}", REPLICATED)
        return replace(at, adds=at.copies > 1)

    def _roots(self, may_be_partial: frozenset[str]) -> tuple[dict[str, str], frozenset[str]]:
        program = self.program
        kinds: dict[str, set[str]] = {}  # of the gradients of one tensor
        for root, value in program.roots.items():
            if root.startswith(GRAD):
                first = program.ties.get(root.removeprefix(GRAD), root)
                kinds.setdefault(first, set()).add(self.placed[value].kind)
        roots: dict[str, str] = {}
        partial: set[str] = set()
        for root, value in program.roots.items():
            at, want = self.placed[value], self._wanted(root)
            first = program.ties.get(root.removeprefix(GRAD), root)
            alike = root.startswith(GRAD) and kinds[first] == {"partial"}
            if at == PARTIAL and want == REPLICATED and (alike or root in may_be_partial):
                partial.add(root)
                want = at
            if want.adds:
                partial.add(root)
            roots[root] = self.form(value, want)
        return roots, frozenset(partial)


def cost_of_full(gathered: Sequence[Gathered]) -> int:
    """Bytes that are gathered a step for want of rules."""
    return sum(one.nbytes for one in gathered)
