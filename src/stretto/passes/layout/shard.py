"""From a step at global shapes to one rank's step, along one axis of the mesh.

    1. Ops are walked once, in order. Of each op there are choices (`choices`), of which the one is taken that
       moves fewest bytes. Partial sums stay so as long as ops are linear and make them no larger. What is
       made in full on every rank counts a little.
    2. Conversions are emitted before the op (`values`); sizes in the op's arguments become local ones. An op
       may be taken apart where its parts can be computed on slices (`decomposed`); a cross-entropy over a
       sharded vocabulary is made in one (`losses`).
    3. At the end roots have the placements that are wanted of them: gradients those of their parameters, all
       else replicated. A gradient of a replicated parameter may stay partial; it is summed once a step.

An op that cannot be computed on parts is computed in full, behind a gather: that is slow, and right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stretto.ir.dims import operands
from stretto.ir.program import GETITEM, Arg, Op, Ref
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.choices import OpChoices
from stretto.passes.layout.decomposed import DECOMPOSED, Sub
from stretto.passes.layout.emit import Emitter, MisfitError
from stretto.passes.layout.losses import LOG_SOFTMAX, NLL, TokenLoss, token_losses
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, local_spec, sharded
from stretto.passes.layout.program import SAME_DATA, StepProgram
from stretto.passes.layout.rules import Choice, Rule, emit_op
from stretto.passes.layout.values import Values

GRAD, PARAM = "grad/", "param/"

MEMORY = 1e-4
"""What a byte counts that every rank makes in full. Below that of a slice, so that nothing is cut for it. Of
63 steps (Llama, GPT, GPT-2, Qwen2, Gemma2, mixtures, with tp 2 and 4, the sequence or not; random networks)
4 times as much changes none, a quarter one, and 0 changes 17, whose ranks then make in full what they have
slices of. What an op computes would count besides, and changed none."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """An op that cannot be computed on the slices that ranks have. nbytes: what is gathered for it; of them
    of_parameters: of parameters."""

    op: Op
    nbytes: int
    of_parameters: int


@dataclass(frozen=True, slots=True)
class ShardedProgram:
    """placed: of all values of the global program. local: of local values. forms: of a value, by placement
    the local values that it is. gathered: what was computed in full for want of a rule; flops_in_full: of
    that, and of what follows of it alone. partial: roots that are partial sums still."""

    program: StepProgram
    placed: Mapping[str, AxisPlacement]
    local: Mapping[str, AxisPlacement]
    forms: Mapping[str, Mapping[AxisPlacement, str]]
    gathered: tuple[Gathered, ...]
    flops_in_full: int
    partial: frozenset[str]


@dataclass(frozen=True, slots=True)
class AxisRules:
    """What an axis has of its own. parts: value that all ranks have -> how its parts are read where these are
    enough. best: value -> how it is read later. rules: of ops. mirrored: as of an `Emitter`. of_time: whether
    one rank walks its members, so that what draws draws in full."""

    parts: Mapping[str, AxisPlacement] = field(default_factory=dict)
    best: Mapping[str, AxisPlacement] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    mirrored: bool = False
    of_time: bool = False


PLAIN = AxisRules()


def shard(
    program: StepProgram,
    axis: str,
    size: int,
    placed: Mapping[str, AxisPlacement],
    wishes: Mapping[str, AxisPlacement],
    may_be_partial: frozenset[str] = frozenset(),
    own: AxisRules = PLAIN,
) -> ShardedProgram:
    """See the module. placed: of parameters and leaves that are sharded. wishes: value -> its placement, as
    soon as it is made. may_be_partial: roots beside gradients. Raises MisfitError."""
    return _Walk(program, axis, size, placed, wishes, own).run(may_be_partial)


class _Walk:
    """stored: placements of what no op makes. parts: of an op with several results, the values that they are.
    taken: (op, number of a result) -> the value as which it is read. inputs: placements of operands of ops
    with several results."""

    def __init__(
        self,
        program: StepProgram,
        axis: str,
        size: int,
        placed: Mapping[str, AxisPlacement],
        wishes: Mapping[str, AxisPlacement],
        own: AxisRules,
    ) -> None:
        self.program, self.size, self.asked, self.in_parts = program, size, dict(wishes), own.parts
        self.stored = {name: placed.get(name, REPLICATED) for name in program.given}
        fixed = {n: None for n, at in self.stored.items() if n.startswith(PARAM) and at.is_sharded}
        local = {name: local_spec(self.stored[name], spec, size) for name, spec in program.given.items()}
        self.out = Emitter(axis, size, local, mirrored=own.mirrored)
        specs = dict(program.given)
        ahead = Ahead(program, size, specs)
        self.values = Values(self.out, ahead.made, specs, dict(self.stored), fixed)
        roots = {value: self._wanted(root) for root, value in program.roots.items()}
        self.wanted = ahead.wanted({value: at for value, at in roots.items() if at.is_sharded}) | dict(
            own.best
        )
        partial = [value for root, value in program.roots.items() if self._may_be_partial(root)]
        later = ahead.copied_to(partial)
        self.choices = OpChoices(
            self.values, ahead, self.asked, self.wanted, later, size, own.rules, own.of_time
        )
        self.losses = token_losses((op for op, _ in program.ops), ahead.uses)
        self.parts: dict[str, list[str]] = {}
        self.taken = {(op.args[0].name, op.args[1]): op.name for op, _ in program.ops if op.target == GETITEM}
        self.gathered: list[Gathered] = []
        self.in_full: set[str] = set()
        self.flops_in_full = 0
        self.inputs: dict[str, dict[str, AxisPlacement]] = {}

    def run(self, may_be_partial: frozenset[str]) -> ShardedProgram:
        loss = self.program.roots.get("loss", "")
        for op, origin in self.program.ops:
            self.out.origin, self.out.module = origin, op.module
            self._process(op)
            if op.name == loss:
                self.values.place(loss, REPLICATED)
        roots, partial = self._roots(may_be_partial)
        given = {name: self.out.specs[name] for name in self.program.given}
        made = replace(self.program, ops=tuple(self.out.ops), given=given, roots=roots)
        values = self.values
        return ShardedProgram(
            made,
            dict(values.placed),
            values.local,
            values.forms,
            tuple(self.gathered),
            self.flops_in_full,
            partial,
        )

    # --- step 1 -------------------------------------------------------------------------------------------

    def _process(self, op: Op) -> None:
        if op.target == GETITEM:
            if op.args[0].name in self.in_full:
                self.in_full.add(op.name)
            if op.name not in self.values.placed:
                self.values.same(op.name, self.parts[op.args[0].name][op.args[1]])
            return
        if op.name in self.losses and self._of_split_loss(op, self.losses[op.name]):
            return
        names = operands(op)
        for name in set(names) & self.in_parts.keys():
            self.values.place(name, self.in_parts[name])
        choices = self._as_forward(op, names, list(self.choices.of(op, names)))
        priced = [(self._cost(op, names, choice), choice) for choice in choices]
        reason = MisfitError(f"{op.target} ({op.module}) reads what ranks share in another way")
        possible = [item for item in sorted(priced, key=lambda item: item[0]) if item[0] < math.inf]
        for _, choice in possible:
            sends = op.target in DECOMPOSED and self.values.sends(names, choice.inputs)
            if sends and self._decomposed(op, names):
                return
            gathered = self._gathered_for(op, names, choice) if choice is possible[-1][1] else None
            try:
                self._emit(op, names, choice)
                self._note_full(op, names, choice, gathered)
                return
            except MisfitError as error:
                reason = error
        raise reason

    def _as_forward(self, op: Op, names: Sequence[str], choices: list[Choice]) -> list[Choice]:
        """An op that works back from what another has saved reads what that has read, placed alike."""
        if "_backward" not in op.target:
            return choices
        parts = (self.values.made[name] for name in names if name in self.values.made)
        known = [self.inputs.get(part.args[0].name) for part in parts if part.target == GETITEM]
        before = next((inputs for inputs in known if inputs is not None), {})
        alike = [
            choice
            for choice in choices
            if all(before.get(name, at) == at for name, at in zip(names, choice.inputs, strict=True))
        ]
        return alike or choices

    def _cost(self, op: Op, names: Sequence[str], choice: Choice) -> float:
        pairs = dict.fromkeys(zip(names, choice.inputs, strict=True))
        cost = sum(self.values.cost(name, at) for name, at in pairs)
        if not any(at.is_sharded for at in (*choice.inputs, *choice.outputs)):
            bytes_made = sum(spec.nbytes for spec in op.outputs if spec is not None)
            cost += MEMORY * bytes_made
        want = self.wanted.get(op.name) if len(op.outputs) == 1 else None
        spec = op.outputs[0] if op.outputs else None
        if want is not None and spec is not None:
            cost += min(self.out.cost_bytes(choice.outputs[0], want, spec.nbytes), 1e30)
        return cost

    # --- step 2 -------------------------------------------------------------------------------------------

    def _emit(self, op: Op, names: Sequence[str], choice: Choice) -> None:
        values = self.values
        local = [values.form(name, at) for name, at in zip(names, choice.inputs, strict=True)]
        for name, at in zip(names, choice.inputs, strict=True):
            if values.placed[name].is_partial and not at.is_partial:
                values.place(name, at)  # a sum is taken once; what comes later adds to it
        made = (choice.emit or emit_op(choice, self.size))(self.out, op, local)
        if len(op.outputs) != 1 or (op.name, 0) in self.taken:  # a list of one
            self.inputs[op.name] = dict(zip(names, choice.inputs, strict=True))
            self._several(op, made, choice.outputs)
            return
        values.add(op.name, op.outputs[0], made[0], choice.outputs[0])
        if op.target in SAME_DATA and names[0] in values.fixed:
            values.fixed[op.name] = None
        if self._as_asked(op.name):
            return
        if choice.at_once and choice.outputs[0].is_partial:
            scattered = self.choices.wish(op.name) if choice.outputs[0].is_sum else None
            values.place(op.name, scattered or REPLICATED)

    def _as_asked(self, name: str) -> bool:
        """What reads a stream reads its slices; what enters a mixture is gathered once."""
        wish = self.asked.get(name)
        if wish is None or self.values.placed[name].is_partial:
            return False
        self.values.place(name, wish, only=True)
        return True

    def _gathered_for(self, op: Op, names: Sequence[str], choice: Choice) -> Gathered | None:
        """What is gathered for an op for which there is no other choice."""
        values = self.values
        if any(at != REPLICATED for at in choice.inputs):
            return None
        slices = [
            n for n in dict.fromkeys(names) if values.placed[n].is_sharded and values.cost(n, REPLICATED)
        ]
        fixed = sum(values.spec[name].nbytes for name in slices if name in values.fixed)
        return Gathered(op, sum(values.spec[n].nbytes for n in slices), fixed) if slices else None

    def _note_full(self, op: Op, names: Sequence[str], choice: Choice, gathered: Gathered | None) -> None:
        """What follows of a value alone that is computed in full is so, too."""
        if gathered is not None:
            self.gathered.append(gathered)
        made = [name for name in names if not name.startswith(PARAM)]
        follows = made and all(name in self.in_full for name in made)
        if gathered is not None or (follows and all(at == REPLICATED for at in choice.inputs)):
            self.in_full.add(op.name)
            self.flops_in_full += op.flops

    def _several(self, op: Op, made: Sequence[str], outputs: Sequence[AxisPlacement]) -> None:
        self.parts[op.name] = []
        for k, (spec, at) in enumerate(zip(op.outputs, outputs, strict=True)):
            name = self.taken.get((op.name, k), "")
            if name and spec is not None:
                one = made[k] if len(made) > 1 else self.out.emit(GETITEM, Ref(made[0]), k, name=name)
                self.values.add(name, spec, one, at)
                self._as_asked(name)
            self.parts[op.name].append(name)

    def _decomposed(self, op: Op, names: Sequence[str]) -> bool:
        made = DECOMPOSED[op.target](op, [self.values.spec[name] for name in names], self._sub(op))
        if made is None:
            return False
        if len(op.outputs) == 1:
            self.values.same(op.name, made[0])
        else:
            self.parts[op.name] = list(made)
        return True

    def _sub(self, op: Op) -> Sub:
        """Emits one op of a decomposition at global shapes, and shards it."""
        probe, values = Emitter(self.out.axis, 1, {}), self.values
        result = op.outputs[0] if len(op.outputs) == 1 else None

        def sub(target: str, *args: Arg, **kwargs: Arg) -> str:
            for name in (arg.name for arg in args if isinstance(arg, Ref)):
                probe.specs.setdefault(name, values.spec[name])
                alike = result is not None and values.spec[name].shape == result.shape
                if values.placed[name].is_partial and alike:
                    values.spec.setdefault(op.name, values.spec[name])
                    wish = self.choices.wish(op.name)  # what its result will meet
                    if wish is not None:
                        self.asked[name] = wish
            like = self.out.fresh(f"{op.name}_{target.split('.')[1]}")
            made = probe.emit(target, *args, name=like, kwargs=kwargs)
            self._process(probe.ops[-1][0])
            return made

        return sub

    def _of_split_loss(self, op: Op, loss: TokenLoss) -> bool:
        """A cross-entropy of logits that are sharded along the vocabulary; False for others."""
        values = self.values
        if op.target == LOG_SOFTMAX:
            loss.is_split = values.placed[loss.logits] == sharded(1)
        if not loss.is_split:
            return False
        if op.target == NLL:
            columns, target = values.form(loss.logits, sharded(1)), values.form(loss.target, REPLICATED)
            self.parts[op.name] = []
            for k, local in enumerate(loss.forward(self.out, columns, target)):
                name = self.taken.get((op.name, k), "")
                if name:
                    values.add(name, op.outputs[k], local, REPLICATED)
                self.parts[op.name].append(name)
        elif op is loss.logits_grad:
            assert loss.nll_grad is not None
            grad = values.form(loss.nll_grad.args[0].name, REPLICATED)
            local = loss.backward(self.out, grad, values.spec[loss.target])
            values.add(op.name, op.outputs[0], local, sharded(1))
        return True

    # --- step 3 -------------------------------------------------------------------------------------------

    def _wanted(self, root: str) -> AxisPlacement:
        if not root.startswith(GRAD):
            return REPLICATED
        at = self.stored.get(f"{PARAM}{root.removeprefix(GRAD)}", REPLICATED)
        return replace(at, adds=at.copies > 1)

    def _may_be_partial(self, root: str) -> bool:
        return root.startswith(GRAD) and self._wanted(root) == REPLICATED

    def _roots(self, may_be_partial: frozenset[str]) -> tuple[dict[str, str], frozenset[str]]:
        """The local roots, and which of them are partial sums. Gradients of one tensor are alike in that."""
        program, placed = self.program, self.values.placed
        kinds: dict[str, set[str]] = {}
        for root, value in program.roots.items():
            kinds.setdefault(self._tensor_of(root), set()).add(placed[value].kind)
        roots: dict[str, str] = {}
        partial: set[str] = set()
        for root, value in program.roots.items():
            want = self._wanted(root)
            allowed = root in may_be_partial or self._may_be_partial(root)
            if allowed and placed[value].is_sum and kinds[self._tensor_of(root)] == {"partial"}:
                want = placed[value]
            if want.is_sum or want.adds:
                partial.add(root)
            if self.out.cost_bytes(self.values.source(value, want), want, 1) == math.inf:
                raise MisfitError(f"{root} is {placed[value]}, and is to be {want}")
            self.out.origin, self.out.module = self.values.origins.get(
                value, (self.out.origin, self.out.module)
            )
            roots[root] = self.values.form(value, want)
        return roots, frozenset(partial)

    def _tensor_of(self, root: str) -> str:
        """The tied group of a gradient; another root by itself."""
        return self.program.ties.get(root.removeprefix(GRAD), root) if root.startswith(GRAD) else root
