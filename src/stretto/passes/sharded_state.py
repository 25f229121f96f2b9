"""Sharded state that is full for no longer than an action: parameters that ranks keep in rows are gathered
where ops read them, and gradients are scattered where ops make them (Rajbhandari et al., "ZeRO", 2020, stages
2 and 3; Zhao et al., "PyTorch FSDP", 2023).

What is not done here is done once a step: parameters are gathered before their first use
and stay, gradients are added up in full and scattered after the last addition.

    1. A program (F, I or W) gathers what it reads: large parameters by themselves, small ones together, each
       before the first op that reads it. What is gathered goes with its last use in the program, as any value
       does. A view of a parameter that the forward has left for the backward is made there again.
    2. The parts of a gradient that a program makes are added up, and scattered behind the last of them, small
       ones together; what is added over microbatches is this rank's rows. They are added in the parameter's
       own dtype.

Starts and waits are ops of the microbatch, ordered as all others are. With `zero = 2` gradients are scattered
so, with `zero = 3` parameters are gathered so as well. With `zero = "auto"` planning tries both, and neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.kept import part_count
from stretto.ir.parameters import Parameter, Zero
from stretto.ir.program import PARAM, Const, Job, Op, Ref, Stage, TensorSpec
from stretto.passes.flat import ADD, scattered
from stretto.passes.rewrite import stage_of, with_uses
from stretto.passes.rows import CAST, buckets_of, gathered
from stretto.passes.step import Context, LeftOutError, Step


def sharded_state(step: Step, context: Context) -> Step:
    """The step whose programs scatter gradients, and gather parameters, as its `zero` asks for."""
    zero = step.job.zero
    return replace(step, job=in_programs(step.job, gathers=zero == 3)) if zero in (2, 3) else step


def auto_scattered(step: Step, context: Context) -> Step:
    """The step whose programs scatter gradients, where it is open whether they do."""
    return _tried(step, 2)


def auto_gathered(step: Step, context: Context) -> Step:
    """The step whose programs also gather parameters, where it is open whether they do."""
    return _tried(step, 3)


def _tried(step: Step, zero: Zero) -> Step:
    if step.job.zero != "auto":
        raise LeftOutError
    return replace(step, job=replace(in_programs(step.job, gathers=zero == 3), zero=zero))


def in_programs(job: Job, gathers: bool) -> Job:
    """Step 2, and where it gathers step 1, of all parameters that are kept in rows."""
    made = _Programs(job, gathers)
    stages = tuple(made.stage(stage) for stage in job.stages)
    return replace(job, stages=stages, parameters=tuple(map(made.parameter, job.parameters)))


class _Programs:
    """Both steps of one job."""

    def __init__(self, job: Job, gathers: bool) -> None:
        self.job = job
        self.gathers = gathers
        kept = {p.name: p for p in job.parameters if p.kept}
        self.read = {PARAM + name: parameter for name, parameter in kept.items()} if gathers else {}
        self.grads: dict[tuple[int, Phase], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        """(stage, phase) -> parameter -> values that are parts of its gradient."""
        for parameter in kept.values():
            for stage, phase, value in parameter.grads:
                self.grads[stage, phase][parameter.name].append(value)
        self.kept = kept
        self.scattered: dict[str, list[tuple[int, Phase, str]]] = defaultdict(list)

    def parameter(self, parameter: Parameter) -> Parameter:
        """The parameter with the gradients that are there now."""
        if parameter.name not in self.scattered:
            return parameter
        return replace(parameter, grads=tuple(self.scattered[parameter.name]), scattered=True)

    def stage(self, stage: Stage) -> Stage:
        ops = {op.name: op for phase in PHASES for op in stage.ops[phase]}
        programs = dict(stage.ops)
        for phase in PHASES:
            program = list(stage.ops[phase])
            if self.gathers:
                program = list(self._gathered(stage.index, phase, program, ops))
            programs[phase] = tuple(self._scattered(stage.index, phase, program))
        return stage_of(stage.index, programs)

    # 1. Gathers.

    def _gathered(
        self, stage: int, phase: Phase, program: Sequence[Op], ops: Mapping[str, Op]
    ) -> Iterator[Op]:
        program = list(self._with_views(phase, program, ops))
        first: dict[str, int] = {}
        for at, op in enumerate(program):
            for name in op.uses:
                if name in self.read:
                    first.setdefault(self.read[name].tied_to, at)
        groups: dict[str, list[Parameter]] = defaultdict(list)
        for name in dict.fromkeys(name for op in program for name in op.uses if name in self.read):
            groups[self.read[name].tied_to].append(self.read[name])
        before: dict[int, list[Op]] = defaultdict(list)
        renamed: dict[str, str] = {}
        for number, bucket in enumerate(buckets_of(list(groups.values()))):
            axis = bucket[0][0].kept[-1]
            made = gathered(self.job, f"{axis}.unshard.{stage}{phase}.{number}", bucket, writes=False)
            names = [PARAM + parameter.name for tied in bucket for parameter in tied]
            renamed.update(zip(names, made.values, strict=True))
            before[min(first[tied[0].tied_to] for tied in bucket)] += made.tail
        for at, op in enumerate(program):
            yield from before[at]
            yield with_uses(op, lambda name: renamed.get(name, name))

    def _with_views(self, phase: Phase, program: Sequence[Op], ops: Mapping[str, Op]) -> Iterator[Op]:
        """The program with views of parameters that an earlier one has made."""
        here = {op.name for op in program}
        new: dict[str, str] = {}

        def made(name: str) -> Iterator[Op]:
            view = ops.get(name)
            if name in here or name in new or view is None or view.alias not in self.read:
                return
            for used in view.uses:
                yield from made(used)
            new[name] = f"{name}_{phase}"
            yield replace(with_uses(view, lambda used: new.get(used, used)), name=new[name])

        for op in program:
            for name in op.uses:
                yield from made(name)
            yield with_uses(op, lambda name: new.get(name, name))

    # 2. Scatters.

    def _scattered(self, stage: int, phase: Phase, program: Sequence[Op]) -> Iterator[Op]:
        grads = self.grads.get((stage, phase), {})
        places = {op.name: at for at, op in enumerate(program)}
        ends = {name: max(places[value] for value in values) for name, values in grads.items()}
        specs = {op.name: op.spec for op in program}
        behind: dict[int, list[Op]] = defaultdict(list)
        in_turn = sorted(grads, key=lambda name: ends[name])
        for number, bucket in enumerate(buckets_of([[self.kept[name]] for name in in_turn])):
            parameters = [parameter for [parameter] in bucket]
            here: list[Op] = []
            values: list[str] = []
            for parameter in parameters:
                where = f"{parameter.kept[0]}.full.{stage}{phase}.{parameter.name}"
                added = list(self._added(where, parameter, grads[parameter.name], specs))
                here += added
                values.append(added[-1].name if added else grads[parameter.name][0])
            given = [parameter.grad_spec for parameter in parameters]
            parts = part_count(self.job, parameters[0])
            for axis in parameters[0].kept:
                size, start = self.job.size(axis), f"{axis}.scatter.{stage}{phase}.{number}"
                made = scattered(start, axis, size, parts, values, given, [()] * len(values))
                here += [*made.lead, *made.tail]
                values, given, parts = made.values, made.specs, parts // size
            behind[max(ends[parameter.name] for parameter in parameters)] += here
            for parameter, value in zip(parameters, values, strict=True):
                self.scattered[parameter.name].append((stage, phase, value))
        for at, op in enumerate(program):
            yield op
            yield from behind[at]

    def _added(
        self, made: str, parameter: Parameter, values: Sequence[str], specs: Mapping[str, TensorSpec | None]
    ) -> Iterator[Op]:
        """The sum of the parts of a gradient, in its own dtype; nothing where it is there."""
        spec = parameter.grad_spec
        total = ""
        for number, value in enumerate(values):
            given = specs[value]
            if given is not None and given.dtype != spec.dtype:
                dtype = (("dtype", Const("dtype", spec.dtype)),)
                yield Op(f"{made}.{number}.cast", CAST, (Ref(value),), dtype, (spec,))
                value = f"{made}.{number}.cast"
            if total:
                yield Op(f"{made}.{number}", ADD, (Ref(total), Ref(value)), (), (spec,))
                value = f"{made}.{number}"
            total = value
