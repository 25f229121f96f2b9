"""Op times of a job's programs, measured on the device that will run them.

    1. Inputs are made up from their specs: small random numbers, the real shapes and layouts. Integers say
       what they say in a step (`ir.integers`), or they are zeros. A norm's weights are about one: about
       zero, a router would send all tokens to the same experts.
    2. F, I and W of a stage run one after the other, op by op with a clock around each, several times.
    3. The same programs run without clocks inside; the op times are scaled so that each program's sum is
       that time. Rounds of several visits count together, so that one bad moment does not decide.
    4. Stages whose ops are equal (target, arguments' specs) are measured once.
    5. A collective's start makes the buffer of its result (an all-reduce works in place, so it copies), its
       wait gives that on, and counts as nothing. `axis.*` ops give the values of the rank at coordinate 0.
    6. Gradients are added up as the runtime adds them: a product that is a gradient and nothing else is added
       while it is multiplied, which takes less than a product and a sum.
    7. Under a quota (`stretto.processor`) an op's share is its thread's time: the clock has stops in it.
    8. On an accelerator all clocks are events. The device is first kept busy for as long as the host takes to
       queue a phase, so that no op waits for its launch, as in a step where the host is ahead.

Ops run under `no_grad`, as in the runtime.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from stretto.backend.dispatch_adapter import add_product, resolve
from stretto.backend.process_memory import keep_freed_memory
from stretto.backend.specs import constants_of, decoded
from stretto.ir.action import Phase
from stretto.ir.collectives import BY_TARGET, Kind
from stretto.ir.flow import PHASES, inputs_of, is_external
from stretto.ir.integers import Says, rows_named, what_integers_say
from stretto.ir.prices import signature, specs_of
from stretto.ir.program import CHUNK, GETITEM, INDEX, WAIT, Job, Op, Ref, Stage, TensorSpec
from stretto.ir.storage import PartialSum, partial_sums
from stretto.measure.stopwatch import DeviceStopwatch, HostStopwatch, Rounds, Stopwatch, repeats
from stretto.price.shared import FREE


def function_of(target: str, device: torch.device) -> Callable[..., Any]:
    """The function that computes an op: the dispatcher's own, or one of these."""
    if target in BY_TARGET:
        return partial(_started, BY_TARGET[target])
    result: dict[str, Callable[..., Any]] = {
        GETITEM: lambda parts, index: parts[index],
        WAIT: lambda started: started,
        INDEX: lambda axis, size: torch.zeros((), dtype=torch.int64, device=device),
        CHUNK: lambda x, dim, axis, size: x.narrow(dim, 0, x.shape[dim] // size),
    }
    return result[target] if target in result else resolve(target)


def _started(kind: Kind, x: torch.Tensor, *how_axis_size: Any) -> torch.Tensor:
    if kind.in_place:
        return x.clone(memory_format=torch.contiguous_format)
    how = how_axis_size[0] if kind.reductions else ""
    shape = kind.shape(x.shape, how_axis_size[-1], how)
    assert shape is not None, f"{kind.name} of a tensor of shape {list(x.shape)}"
    made = x.new_empty(shape)
    if not x.is_floating_point() and x.numel():
        flat = x.flatten()
        made.view(-1).copy_(flat.repeat(math.ceil(made.numel() / x.numel()))[: made.numel()])
    return made


ROUNDS = 5
"""Counted rounds after one warm-up, in each visit."""

FEWEST_ROUNDS = 3
"""Of programs whose rounds are long: they have more ops, and what disturbs one is a smaller part of them. Of
fewer the median shows nothing."""

ENOUGH_US = 1_000_000.0
"""From there on a visit's rounds, without clocks, are enough, if there are `FEWEST_ROUNDS`. Assumed."""

STOLEN = 2.0
"""A round that took more than this many times the median does not count: something else had the processor.
All others do. A step is a sum of what rounds take, fast and slow; of the faster three quarters alone, a
machine whose speed goes up and down by a tenth would promise steps 6 to 9 % too fast."""

LEAST_ROUND_US = 20_000.0
"""Shorter rounds are repeated more often, up to `MOST_ROUNDS`, so that noise averages out."""

MOST_ROUNDS = 25


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of one job on one device. op_us[(stage, op name)]; rounds: by stage, what they were made from."""

    op_us: Mapping[tuple[int, str], float]
    rounds: Mapping[int, Rounds] = field(default_factory=dict, repr=False)


def profile(
    job: Job,
    device: torch.device,
    stages: Sequence[int] | None = None,
    before: Profile | None = None,
) -> Profile:
    """Measure the ops of `stages` (all by default) on `device`, with the memory of one microbatch of one
    stage at a time. before: of the same job, stages and device; its rounds count as much as the new ones."""
    if device.type == "cpu":
        keep_freed_memory()  # as the step does
    op_us: dict[tuple[int, str], float] = {}
    rounds: dict[int, Rounds] = {}
    done: dict[tuple[tuple[Phase, str], ...], tuple[int, list[str]]] = {}
    specs = specs_of(job)
    for index in stages if stages is not None else range(len(job.stages)):
        stage = job.stages[index]
        key = tuple((phase, signature(op, specs)) for phase in PHASES for op in stage.ops[phase])
        names = [op.name for phase in PHASES for op in stage.ops[phase]]
        if key in done:
            like, like_names = done[key]
            for name, other in zip(names, like_names, strict=True):
                op_us[index, name] = op_us[like, other]
            continue
        done[key] = (index, names)
        # Dropout draws; the user's generator must not notice.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            rounds[index] = deepcopy(before.rounds[index]) if before is not None else Rounds()
            measured = _measure(job, stage, device, rounds[index])
        op_us.update(((index, name), us) for name, us in measured.items())
    return Profile(op_us, rounds)


def device_name(device: torch.device) -> str:
    """What the device calls itself, with the threads that compute on a processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"this processor, {threads} thread{'s' if threads != 1 else ''}"


def _measure(job: Job, stage: Stage, device: torch.device, rounds: Rounds) -> dict[str, float]:
    made = make_inputs(job, stage, device)
    calls = make_calls(job, stage, device)
    grads: dict[str, torch.Tensor] = {}
    clock: Stopwatch = HostStopwatch() if device.type == "cpu" else DeviceStopwatch(device)
    with torch.no_grad():
        if device.type != "cpu":
            _run(calls, made, grads, clock, None)  # kernels are looked for, and memory is taken
        warm_us = sum(_run(calls, made, grads, clock, None).values())
        for _ in range(_rounds(warm_us)):
            _run(calls, made, grads, clock, rounds)
            for phase, us in _run(calls, made, grads, clock, None).items():
                rounds.totals[phase].append(us)
    result: dict[str, float] = {}
    found = rounds.thread_shares or rounds.shares
    for phase in PHASES:
        shares = {
            # A device does nothing for a view: what its events are apart is their own cost.
            op.name: 0.0
            if device.type != "cpu" and (op.alias is not None or op.target in FREE)
            else typical(found[op.name])
            for op in stage.ops[phase]
        }
        total = sum(shares.values())
        scale = typical(rounds.totals[phase]) / total if total else 0.0
        result |= {name: us * scale for name, us in shares.items()}
        result |= {op.name: 0.0 for op in stage.ops[phase] if op.target == WAIT}
    return result


def _rounds(round_us: float) -> int:
    """How many rounds of that length a visit has."""
    if round_us >= LEAST_ROUND_US:
        return repeats(round_us, ENOUGH_US, FEWEST_ROUNDS, ROUNDS)
    return repeats(round_us, ROUNDS * LEAST_ROUND_US, 1, MOST_ROUNDS)


def typical(times: Sequence[float]) -> float:
    """The mean of the times that count (`STOLEN`), which need not be microseconds."""
    most = STOLEN * statistics.median(times)
    return statistics.fmean(took for took in times if took <= most)


def make_inputs(job: Job, stage: Stage, device: torch.device) -> dict[str, torch.Tensor]:
    """Step 1: every value that the stage reads and does not make."""
    specs = specs_of(job)
    constants = constants_of(job, device)
    made_here = {op.name for ops in stage.ops.values() for op in ops}
    vectors = (p.name for p in job.parameters if len(p.spec.shape) == 1)
    scales = {f"param/{name}" for name in vectors if name.rpartition(".")[2] == "weight"}
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator(device="cpu").manual_seed(0)
    says: dict[str, Says] = {}
    for op in (op for ops in stage.ops.values() for op in ops):
        for name, new in what_integers_say(op, specs).items():
            says[name] = min(says.get(name, new), new, key=lambda one: one.rows)
    says |= {f"batch/{name}": Says(count) for name, count in rows_named(job).items()}
    for phase in PHASES:
        for name in inputs_of(stage, phase):
            if name in made or name in made_here:
                continue
            if name == "tangent":
                dtype = getattr(torch, job.loss_spec.dtype)
                made[name] = torch.tensor(job.tangent, dtype=dtype, device=device)
            elif name in constants:
                made[name] = constants[name]
            else:
                made[name] = made_up_tensor(specs[name], generator, device, says.get(name))
                if name in scales:
                    made[name] += 1.0
    return made


def made_up_tensor(
    spec: TensorSpec, generator: torch.Generator, device: torch.device, says: Says | None
) -> torch.Tensor:
    """A made-up value: small random numbers; integers that say what they say in a step, zeros
    where nothing is known of them."""
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        value = (torch.randn(spec.shape, generator=generator) * 0.02).to(device, dtype)
    elif says is None:
        value = torch.zeros(spec.shape, dtype=dtype, device=device)
    elif says.ends:
        groups = torch.arange(1, math.prod(spec.shape) + 1)
        value = (groups * says.rows // len(groups)).view(spec.shape).to(device, dtype)
    else:
        value = torch.randint(0, says.rows, spec.shape, generator=generator).to(device, dtype)
    if spec.stride is None or 0 in spec.stride:
        return value
    return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device).copy_(value)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One op, ready to be called on a table of values. dead: what nothing after it reads."""

    op: Op
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dead: tuple[str, ...]
    partial_sums: tuple[PartialSum, ...]

    def run(self, values: dict[str, Any], grads: dict[str, torch.Tensor]) -> None:
        """Call it, keep what it makes, and drop what is dead then. Step 6: an op that makes a gradient, or
        several, which are added to `grads`."""
        arguments = [value_of(a, values) for a in self.args]
        kept = grads.get(self.op.name)
        if kept is not None and self.partial_sums[0].product:
            made = add_product(kept, *arguments)
        else:
            made = self.function(*arguments, **{key: value_of(a, values) for key, a in self.kwargs})
            if kept is not None:
                kept.add_(made)
            elif self.partial_sums:
                dtype = getattr(torch, self.partial_sums[0].dtype)
                grads[self.op.name] = made.to(dtype, copy=True) if self.partial_sums[0].copied else made
        values[self.op.name] = made
        for name in self.dead:
            values.pop(name, None)


def value_of(arg: Any, values: Mapping[str, Any]) -> Any:
    """What an argument is, on a table of values."""
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, list):
        return [value_of(item, values) for item in arg]
    return arg


def make_calls(job: Job, stage: Stage, device: torch.device) -> dict[Phase, list[OpCall]]:
    """The stage's programs with what dies after each op: what nothing later in the stage reads."""
    last: dict[str, str] = {}
    for phase in PHASES:
        for op in stage.ops[phase]:
            last[op.name] = op.name
            for name in op.uses:
                last[name] = op.name
    dying: dict[str, list[str]] = {}
    for name, reader in last.items():
        if not is_external(name):
            dying.setdefault(reader, []).append(name)
    grads = partial_sums(job, stage.index)
    result: dict[Phase, list[OpCall]] = {}
    for phase in PHASES:
        result[phase] = [
            OpCall(
                op,
                function_of(op.target, device),
                tuple(decoded(a, Ref, device) for a in op.args),
                tuple((key, decoded(a, Ref, device)) for key, a in op.kwargs),
                tuple(dying.get(op.name, ())),
                grads.get(op.name, ()),
            )
            for op in stage.ops[phase]
        ]
    return result


def _run(
    calls: Mapping[Phase, Sequence[OpCall]],
    given: Mapping[str, torch.Tensor],
    grads: dict[str, torch.Tensor],
    clock: Stopwatch,
    rounds: Rounds | None,
) -> dict[Phase, float]:
    """Steps 2, 3, 7 and 8: one microbatch through F, I and W; microseconds of each phase. Values are dropped
    after their last use, as in the runtime. rounds: where the op times go; None to run without clocks
    inside."""
    values: dict[str, Any] = dict(given)
    result: dict[Phase, float] = {}
    for phase in PHASES:
        clock.begin(phase)
        for call in calls[phase]:
            if rounds is not None:
                clock.op(call.op.name)
            call.run(values, grads)
        result[phase] = clock.end(rounds)
    return result
