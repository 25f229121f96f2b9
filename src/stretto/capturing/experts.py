"""In the place of a module of experts, which is one op in what was traced, the ops of one rank.

1. The module's forward on one rank, and its backward, are traced for the shapes that the op has: of equal
   modules and equal shapes once. With expert parallelism ranks send each other the rows
   (`stretto.parallelize.experts`).
2. Each `mixture` becomes the ops of the forward, and its `mixture_backward` those of the backward, under
   names of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from stretto.backend.specs import empty_of
from stretto.capturing import torch_adapter
from stretto.capturing.convert import convert
from stretto.capturing.equal import differing
from stretto.capturing.graph import GRAD, LOSS, SEEN, UPDATE, Traced
from stretto.capturing.outputs import observed_of
from stretto.errors import CaptureError, UsageError
from stretto.ir.axes import EP
from stretto.ir.metrics import Metric
from stretto.ir.op_names import MIXTURE, MIXTURE_BACKWARD
from stretto.ir.program import GETITEM, Constant, Op, Ref, Shard, TensorSpec
from stretto.parallelize.expert_trial import weighed
from stretto.parallelize.experts import ExpertParallel, other_arguments, sharded_experts, states_how
from stretto.parallelize.layout import RankLayout, part_shapes
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.emit import Emitter
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, sharded
from stretto.passes.layout.program import Origin, StepProgram
from stretto.passes.layout.rules import Choice, OpGiven
from stretto.passes.layout.shard import PARAM, AxisRules, ShardedProgram, shard
from stretto.passes.rewrite import with_uses

TOKENS, CHOSEN, WEIGHTS, TANGENT = "batch/0", "batch/1", "batch/2", "tangent"
"""Names of a call's inputs, besides those of parameters and buffers."""

BUFFER, CONST = "buffer/", "const/"


@dataclass(frozen=True, slots=True)
class _Call:
    """A module's call and its backward, traced. parameters: names within the module, in the op's order;
    roots: the result and gradients."""

    ops: tuple[tuple[Op, Origin], ...]
    parameters: tuple[str, ...]
    roots: Mapping[str, str]
    seen: tuple[Metric, ...]
    constants: tuple[Constant, ...]


@dataclass(slots=True)
class ExpertCalls:
    """Traces calls of a model's modules of experts. kept: a module, the specs of what it was given, the
    parameters of which gradients are asked, the call."""

    model: nn.Module
    layout: RankLayout
    traced: Traced
    kept: list[tuple[str, tuple[TensorSpec, ...], frozenset[str], _Call]] = field(default_factory=list)

    def of(self, name: str, specs: tuple[TensorSpec, ...], asked: frozenset[int]) -> _Call:
        """specs: of tokens, choices and weights. asked: numbers of the parameters of which gradients are."""
        module = self.model.get_submodule(name)
        keys = [key for key, _ in module.named_parameters()]
        trained = frozenset(keys[k] for k in asked)
        for like, given, gradients, call in self.kept:
            other = self.model.get_submodule(like)
            has_state = next(module.buffers(), None) is not None
            alike = like == name or (not has_state and differing(other, module, like, name) == set())
            if given == specs and gradients == trained and alike:
                return call
        call = self._traced(module, name, specs, trained)
        self.kept.append((name, specs, trained, call))
        return call

    def _traced(
        self, module: nn.Module, name: str, specs: Sequence[TensorSpec], trained: frozenset[str]
    ) -> _Call:
        job, experts = self.traced.job, self.layout.experts
        absent = job.device == "cuda" and not torch.cuda.is_available()
        device = torch.device("cpu" if absent else job.device)
        dtype = None if job.param_dtype is None else getattr(torch, job.param_dtype)
        mode = torch_adapter.fake_mode()
        with mode:
            leaves = [empty_of(spec, device) for spec in specs]
        for leaf in leaves:
            leaf.requires_grad_(leaf.is_floating_point())
        parts = part_shapes(self.model, experts)
        way = ""
        if experts is not None and not states_how(module):
            way = weighed(self.model, name, experts.size, specs[0].shape, specs[1].shape)
        with (
            torch_adapter.fake_state(module, mode, device, dtype, parts),
            nullcontext() if experts is None else sharded_experts(module, experts, way),
        ):
            for key, parameter in module.named_parameters():
                parameter.requires_grad_(key in trained)  # of a value that is made of it, maybe
            joint = torch_adapter.export_call(module, leaves, mode)
        program, constants = convert(joint, "012")
        left, seen = observed_of(program.ops)
        for root in program.roots:
            if root.startswith(UPDATE):
                key = root.removeprefix(UPDATE)
                raise CaptureError(f"{name} writes into its buffer {key!r}, and experts may write into none")
        parameters = tuple(f"{PARAM}{key}" for key, _ in module.named_parameters())
        return _Call(left, parameters, program.roots, seen, constants)


def with_experts(
    program: StepProgram, model: nn.Module, layout: RankLayout, traced: Traced
) -> tuple[StepProgram, Traced]:
    """See the module. Returns the step with what it lets see and its constants besides. traced: whose step
    the program is."""
    if not any(op.target == MIXTURE for op, _ in program.ops):
        return program, traced
    return _Walk(program, ExpertCalls(model, layout, traced)).run()


BEFORE_PARAMETERS = 2
"""Results of a backward before those of parameters: of tokens and weights."""


def _call_of(op: Op, given: Sequence[Ref]) -> tuple[str, ...]:
    """By what calls differ. given: tokens, choices, weights."""
    return (*(arg.name for arg in given), op.module)


class _Walk:
    """now: value that is gone -> the one in its place. results: of a backward, by number. forwards: by what
    they read, with the names of the step for those of what was traced. asked: by the same, of which
    parameters the step needs gradients."""

    def __init__(self, program: StepProgram, calls: ExpertCalls) -> None:
        self.program, self.calls = program, calls
        self.out = Emitter("", 1, program.given, [op.name for op, _ in program.ops])
        self.now: dict[str, str] = {}
        self.results: dict[str, list[str]] = {}
        self.forwards: dict[tuple[str, ...], tuple[_Call, dict[str, str]]] = {}
        self.seen: list[Metric] = []
        self.constants: list[Constant] = []
        backwards = {op.name: op for op, _ in program.ops if op.target == MIXTURE_BACKWARD}
        self.asked: dict[tuple[str, ...], set[int]] = defaultdict(set)
        for op, _ in program.ops:
            of = backwards.get(op.args[0].name) if op.target == GETITEM else None
            if of is not None and op.args[1] >= BEFORE_PARAMETERS:
                self.asked[_call_of(of, of.args[1:4])].add(op.args[1] - BEFORE_PARAMETERS)

    def run(self) -> tuple[StepProgram, Traced]:
        for op, origin in self.program.ops:
            self.out.origin, self.out.module = origin, op.module
            if op.target == GETITEM and op.args[0].name in self.results:
                self.now[op.name] = self.results[op.args[0].name][op.args[1]]
                continue
            asked = self.asked[_call_of(op, op.args[:3])] if op.target == MIXTURE else set[int]()
            op = with_uses(op, self._now)
            if op.target == MIXTURE:
                self._forward(op, origin, frozenset(asked))
            elif op.target == MIXTURE_BACKWARD:
                self._backward(op, origin)
            else:
                self.out.keep(op, origin)
        traced, job = self.calls.traced, self.calls.traced.job
        roots = {root: self._now(value) for root, value in self.program.roots.items()}
        roots |= {f"{SEEN}{k}": one.value for k, one in enumerate(self.seen, len(job.metrics))}
        given = {**self.program.given, **{f"{CONST}{one.name}": one.spec for one in self.constants}}
        program = replace(self.program, ops=tuple(self.out.ops), roots=roots, given=given)
        job = replace(job, metrics=(*job.metrics, *self.seen), constants=(*job.constants, *self.constants))
        return program, replace(traced, job=job)

    def _now(self, name: str) -> str:
        return self.now.get(name, name)

    def _forward(self, op: Op, origin: Origin, asked: frozenset[int]) -> None:
        tokens, chosen, weights = (arg.name for arg in op.args[:3])
        specs = tuple(self.out.specs[name] for name in (tokens, chosen, weights))
        call = self.calls.of(op.module, specs, asked)
        names = {TOKENS: tokens, CHOSEN: chosen, WEIGHTS: weights}
        names |= {own: ref.name for own, ref in zip(call.parameters, op.args[3], strict=True)}
        for constant in call.constants:
            own = replace(constant, name=f"{op.name}_{constant.name}")
            names[f"{CONST}{constant.name}"] = f"{CONST}{own.name}"
            self.constants.append(own)
        self._copied(call, names, op, origin)
        self.now[op.name] = self.out.contiguous(names[call.roots[LOSS]])
        self.seen += [replace(one, module=op.module, value=names[one.value]) for one in call.seen]
        self.forwards[_call_of(op, op.args[:3])] = call, names

    def _backward(self, op: Op, origin: Origin) -> None:
        call, names = self.forwards[_call_of(op, op.args[1:4])]
        names[TANGENT] = op.args[0].name
        self._copied(call, names, op, origin)
        wanted = {name: f"{GRAD}{name.removeprefix(PARAM)}" for name in (TOKENS, WEIGHTS, *call.parameters)}
        self.results[op.name] = [
            self.out.contiguous(names[call.roots[root]])
            if root in call.roots
            else self.out.emit("aten.zeros_like.default", Ref(names[name]), name=f"{op.name}_none")
            for name, root in wanted.items()
        ]

    def _copied(self, call: _Call, names: dict[str, str], op: Op, origin: Origin) -> None:
        """Step 2. names: of what was traced -> of the step; those of its ops come to it."""
        for inner, at in call.ops:
            if at.backward is not (op.target == MIXTURE_BACKWARD):
                continue
            for used in inner.uses:
                if used.startswith(BUFFER):
                    names[used] = f"{BUFFER}{op.module}.{used.removeprefix(BUFFER)}"
            own = with_uses(inner, lambda name: names.get(name, name))
            names[inner.name] = fresh = self.out.fresh(inner.name)
            self.out.keep(replace(own, name=fresh, module=op.module), origin)


def along_experts(
    program: StepProgram, how: ExpertParallel, model: nn.Module
) -> tuple[ExpertParallel, ShardedProgram]:
    """Parameters of experts become those of a rank's experts, and so do those of which adapters make changes
    of these. Returns what is sharded besides. Raises UsageError for a module that is no `mixture`, and for
    changes that a rank cannot make of its experts alone."""
    of_tokens = {name for name in program.given if not name.startswith((PARAM, BUFFER, CONST))}
    for op, origin in program.ops:
        if not of_tokens.isdisjoint(op.uses) or not op.uses:
            of_tokens.add(op.name)
            name = next((n for n in how.modules if f"{op.module}.".startswith(f"{n}.")), None)
            known = origin.backward or op.target in (MIXTURE, MIXTURE_BACKWARD, GETITEM)
            if name is not None and not known:
                raise other_arguments(model.get_submodule(name))
    placed = {f"{PARAM}{name}": sharded(of.dim) for name, of in how.shards.items()}
    own = {name: len(list(model.get_submodule(name).parameters(recurse=False))) for name in how.modules}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    placed |= _placed_within(program, how, own, trained)
    shards = {name.removeprefix(PARAM): Shard(EP.name, at.dim, at.blocks) for name, at in placed.items()}

    def of_own_experts(op: Op, given: OpGiven) -> Iterator[Choice]:
        """Ranks send each other tokens, as `with_experts` says."""
        of_experts = (sharded(0),) * own[op.module]
        of_all = (REPLICATED,) * (len(op.args[-2]) - len(of_experts))
        before = (REPLICATED,) * (len(given.placements) - len(op.args[-2]))
        results = (REPLICATED,) * (BEFORE_PARAMETERS if len(op.outputs) > 1 else 1)
        grads = (*of_experts, *of_all) if len(op.outputs) > 1 else ()
        yield Choice((*before, *of_experts, *of_all), (*results, *grads))

    rules = dict.fromkeys((MIXTURE, MIXTURE_BACKWARD), of_own_experts)
    return replace(how, shards=shards), shard(
        program, EP.name, how.size, placed, {}, own=AxisRules(rules=rules)
    )


def _placed_within(
    program: StepProgram, how: ExpertParallel, own: Mapping[str, int], trained: Collection[str]
) -> dict[str, AxisPlacement]:
    """Placements of parameters of which experts' are made, so that a rank makes those of its own experts.
    own: how many parameters the modules themselves have. trained: names."""
    ahead = Ahead(program, how.size, dict(program.given))
    calls = [op for op, _ in program.ops if op.target == MIXTURE]
    modules = {ref.name: op.module for op in calls for ref in op.args[3][: own[op.module]]}
    wanted = dict.fromkeys(modules, sharded(0))
    for op, _ in reversed(program.ops):
        if op.name not in wanted:
            continue
        before = dict(ahead.before(op, wanted[op.name]))
        for name in op.uses:
            modules.setdefault(name, modules[op.name])
            at = wanted.setdefault(name, before.get(name, REPLICATED))
            fits = name in before and at == before[name]
            if name.removeprefix(PARAM) in trained and not fits:
                raise UsageError(
                    f"{name.removeprefix(PARAM)} changes experts of {modules[name]} by {op.target}, of which "
                    f"{EP.name} = {how.size} ranks cannot compute the change of their own experts alone: "
                    f"adapt modules instead (target_modules), or give {EP.name} = 1 and use pp or dp"
                )
    return {name: at for name, at in wanted.items() if name.startswith(PARAM) and at.is_sharded}


def by_chunk(program: StepProgram) -> StepProgram:
    """Experts with a capacity serve the tokens of each chunk by themselves."""
    ops = (
        (replace(op, args=(*op.args[:-1], True)) if op.target in (MIXTURE, MIXTURE_BACKWARD) else op, origin)
        for op, origin in program.ops
    )
    return replace(program, ops=tuple(ops))
