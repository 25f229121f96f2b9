"""Sharded state that is full for no longer than an action: parameters that ranks keep in rows are gathered
where ops read them, and gradients are scattered where ops make them (Rajbhandari et al., "ZeRO", 2020, stages
2 and 3; Zhao et al., "PyTorch FSDP", 2023).

What is not done here is done once a step: parameters are gathered before their first use and stay, gradients
are added up in full and scattered after the last addition.

    1. A program (F, I or W) gathers what it reads: large parameters by themselves, small ones together, each
       before the first op that reads it. What is gathered goes with its last use in the program, as any value
       does. A view of a parameter that the forward has left for the backward is made there again. What
       `Stays` names is gathered once a step instead, or by the forward for the backward too.
    2. The parts of a gradient that a program makes are added up, and scattered behind the last of them, small
       ones together; what is added over microbatches is this rank's rows. They are added in the parameter's
       own dtype. Not so those that `Stays` names.

Starts and waits are ops of the microbatch, ordered as all others are. With `zero = 2` gradients are scattered
so, with `zero = 3` parameters are gathered so as well. With `zero = "auto"` planning tries both, and neither.
What stays, where there is memory for it, `stretto.passes.stays` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.kept import part_count, rows_shape
from stretto.ir.parameters import Parameter, Zero, gathers, scatters
from stretto.ir.program import PARAM, Const, Job, Op, Ref, Stage, TensorSpec
from stretto.passes.flat import ADD, scattered
from stretto.passes.rewrite import stage_of, with_uses
from stretto.passes.rows import CAST, buckets_of, gathered
from stretto.passes.step import Context, LeftOutError, Step


@dataclass(frozen=True, slots=True)
class Stays:
    """What stays for longer than a program. step: (stage, tied group) that is gathered once a step. backward:
    (stage, tied group) that the forward gathers for the backward too. gradients: tied groups that are added
    up in full, and scattered once a step."""

    step: Collection[tuple[int, str]] = ()
    backward: Collection[tuple[int, str]] = ()
    gradients: Collection[str] = ()


def sharded_state(step: Step, context: Context) -> Step:
    """The step whose programs scatter gradients, and gather parameters, as its `zero` asks for; where it is
    still open what that is, neither."""
    if step.job.zero == "auto":
        return replace(step, job=replace(step.job, zero=1))
    return replace(step, job=in_programs(step.job))


def auto_scattered(step: Step, context: Context) -> Step:
    """The step whose programs are to scatter gradients, where it is open whether they do."""
    return _tried(step, 2)


def auto_gathered(step: Step, context: Context) -> Step:
    """The step whose programs are to gather parameters too, where it is open whether they do."""
    return _tried(step, 3)


def _tried(step: Step, zero: Zero) -> Step:
    if step.job.zero != "auto":
        raise LeftOutError
    return replace(step, job=replace(step.job, zero=zero))


def in_programs(job: Job, stays: Stays = Stays()) -> Job:
    """Step 2, and where microbatches gather step 1, of all parameters that are kept in rows but for what
    `stays`; the job itself where its microbatches do not scatter."""
    if not scatters(job.zero):
        return job
    made = _Programs(job, stays)
    stages = tuple(made.stage(stage) for stage in job.stages)
    return replace(job, stages=stages, parameters=tuple(map(made.parameter, job.parameters)))


class _Programs:
    """Both steps of one job."""

    def __init__(self, job: Job, stays: Stays) -> None:
        self.job = job
        self.stays = stays
        kept = {p.name: p for p in job.parameters if p.kept and not p.scattered}
        self.gathers = [p for p in kept.values() if gathers(job.zero)]
        kept = {name: p for name, p in kept.items() if p.tied_to not in stays.gradients}
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
        stays = self.stays
        read = {PARAM + p.name: p for p in self.gathers if (stage.index, p.tied_to) not in stays.step}
        made: dict[str, str] = {}
        """Parameter (`param/a`) -> what the forward has gathered of it for the backward."""
        for phase in PHASES:
            here = {name: parameter for name, parameter in read.items() if name not in made}
            program = list(self._with_views(phase, stage.ops[phase], ops, here))
            gathers, renamed = self._gathers(stage.index, phase, program, here)
            names = made | renamed
            if phase is Phase.F:
                made = {n: v for n, v in renamed.items() if (stage.index, read[n].tied_to) in stays.backward}
            program = list(_with_gathers(program, gathers, names))
            programs[phase] = tuple(self._scattered(stage.index, phase, program))
        return stage_of(stage.index, programs)

    # 1. Gathers.

    def _gathers(
        self, stage: int, phase: Phase, program: Sequence[Op], read: Mapping[str, Parameter]
    ) -> tuple[Mapping[int, Sequence[Op]], dict[str, str]]:
        """Op's place -> the gathers before it; parameter (`param/a`) -> what is gathered of it."""
        first: dict[str, int] = {}
        groups: dict[str, dict[str, Parameter]] = defaultdict(dict)
        for at, op in enumerate(program):
            for name in op.uses:
                if name in read:
                    first.setdefault(read[name].tied_to, at)
                    groups[read[name].tied_to][name] = read[name]
        before: dict[int, list[Op]] = defaultdict(list)
        renamed: dict[str, str] = {}
        for number, bucket in enumerate(buckets_of([[*group.values()] for group in groups.values()])):
            axis = bucket[0][0].kept[-1]
            made = gathered(self.job, f"{axis}.unshard.{stage}{phase}.{number}", bucket, writes=False)
            names = [PARAM + parameter.name for tied in bucket for parameter in tied]
            renamed.update(zip(names, made.values, strict=True))
            before[min(first[tied[0].tied_to] for tied in bucket)] += made.tail
        return before, renamed

    def _with_views(
        self, phase: Phase, program: Sequence[Op], ops: Mapping[str, Op], read: Mapping[str, Parameter]
    ) -> Iterator[Op]:
        """The program with views of these parameters that an earlier one has made."""
        here = {op.name for op in program}
        new: dict[str, str] = {}

        def made(name: str) -> Iterator[Op]:
            view = ops.get(name)
            if name in here or name in new or view is None or view.alias not in read:
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
            given = [
                replace(parameter.grad_spec, stride=spec.stride if (spec := specs.get(value)) else None)
                for parameter, value in zip(parameters, values, strict=True)
            ]
            shapes: Sequence[Sequence[int]] = [rows_shape(self.job, parameter) for parameter in parameters]
            parts = part_count(self.job, parameters[0])
            for axis in parameters[0].kept:
                size, start = self.job.size(axis), f"{axis}.scatter.{stage}{phase}.{number}"
                made = scattered(start, axis, size, parts, values, given, shapes, [()] * len(values))
                here += [*made.lead, *made.tail]
                values, given, parts = made.values, made.specs, parts // size
                shapes = [spec.shape for spec in given]
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


def _with_gathers(
    program: Sequence[Op], gathers: Mapping[int, Sequence[Op]], names: Mapping[str, str]
) -> Iterator[Op]:
    """The program with these before the ops at these places, and other values under these names."""
    for at, op in enumerate(program):
        yield from gathers.get(at, ())
        yield with_uses(op, lambda name: names.get(name, name))
