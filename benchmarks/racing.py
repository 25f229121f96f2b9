"""A fair race: systems take turns in the same processes, every turn is timed from a barrier to the last rank.

    1. Every system takes some turns that do not count.
    2. In each round every system takes one turn; the order rotates, so that none always follows the same.
    3. A turn's time is the longest of all ranks. Medians over rounds are quoted, all times are kept.

*Exposed* is the time in which a rank's compute lane waits for communication that counts. A system that waits
for each at once exposes all the time that it takes. *Hidden* is the share of the one that another does not
expose. A machine that others use has another speed every minute, so costs are measured once more after the
steps, and the plan is predicted again with them; its order stays.
"""

from __future__ import annotations

import copy
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.errors import RunError
from stretto.ir.collectives import Kind
from stretto.ir.costs import Costs, Prediction
from stretto.ir.plan import Plan
from stretto.ir.serialize import save_plan
from stretto.ir.timeline import Span, SpanKind, Timeline
from stretto.report.files import save_json
from stretto.runtime.rank_tensors import part_of
from stretto.runtime.runner import Runner
from stretto.simulating import predict

WARM_UPS = 2
"""Turns before the rounds: first messages open connections, first steps fill caches."""

TURNS_BEFORE = 1
"""The same of plans: the comparison of gradients was one more."""

SAME = 1e-5
"""Relative error up to which float32 losses and gradients of different orders of reduction are the same.
Measured: 2e-6 at most."""

Row = dict[str, Any]
Batch = dict[str, Tensor]

Loss = Callable[[nn.Module, Batch], Tensor]
"""Of a model and some rows of a batch, the mean over them."""

StepResult = tuple[float, Batch]
"""A step's loss and its gradients, by parameter."""

RaceStep = Callable[[], Tensor | None]
"""One step of a system; its loss, on ranks that have it."""


@dataclass(frozen=True, slots=True)
class Times:
    """A system's step times in seconds, one a round, the longest of all ranks."""

    rounds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds)


def race(
    systems: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    after: Callable[[str], None] = lambda name: None,
    say: Callable[[str], None] = lambda text: None,
    warm_ups: int = WARM_UPS,
) -> dict[str, Times]:
    """Time one step of each system, `rounds` times in turn. Every rank calls it with equal names in order.

    after(name): called after each counted turn, outside the clock. say: takes the progress. warm_ups:
    turns of each system that do not count.
    """
    names = list(systems)
    taken_s: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        for _ in range(warm_ups):
            timed(systems[name])
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            taken_s[name].append(timed(systems[name]))
            after(name)
        say(f"round {number + 1} of {rounds}")
    return {name: Times(tuple(times)) for name, times in taken_s.items()}


def timed(step: Callable[[], object]) -> float:
    """Seconds of one turn, of the rank that takes longest."""
    gc.collect()  # so that no turn pays for the one before
    if not dist.is_initialized():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    step()
    longest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """As `zero_grad` does."""
    for parameter in parameters:
        parameter.grad = None


def fresh(
    parameters: Iterable[nn.Parameter], step: Callable[[], Tensor | None]
) -> Callable[[], Tensor | None]:
    """A step that begins without gradients."""
    kept = list(parameters)

    def run() -> Tensor | None:
        drop_gradients(kept)
        return step()

    return run


def compare(
    name: str, found: Mapping[str, Tensor], known: Mapping[str, Tensor], whose: str, same: float = SAME
) -> float:
    """The largest relative error of a system's loss and gradients against those of another, by name.

    Raises RunError where one is missing, or differs by more than `same`: the race is void.
    """
    if found.keys() != known.keys():
        raise RunError(f"{name} has other gradients than {whose}: {sorted(found.keys() ^ known.keys())}")
    worst = 0.0
    for key, value in known.items():
        error = float((found[key] - value).norm() / value.norm().clamp_min(1e-30))
        worst = max(worst, error)
        if error > same:
            raise RunError(f"{name} differs from {whose} in {key} by {error:.1e}")
    return worst


@contextmanager
def running(world: int, threads: int = 1) -> Iterator[bool]:
    """Around what a worker does: its process group, where there are several ranks. Gives whether this is the
    first rank."""
    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group("gloo")
    yield is_first()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this is the first rank."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say_on_first(text: str) -> None:
    """Print progress to standard error, on the first rank alone."""
    if is_first():
        print(text, file=sys.stderr, flush=True)


def race_json(
    setup: Any,
    times: Mapping[str, Times],
    bases_s: Mapping[str, float],
    bound: Prediction,
    own: Mapping[str, Row],
    **more: Any,
) -> Row:
    """The JSON of a race: {"setup", "rows"}; medians, with every round's time beside them.

    bases_s: steps that others are compared with, by their names. bound: the prediction whose bound is the
    race's. own: more of a plan's row. more: of the setup.
    """
    bound_s = bound.bound_us / 1e6
    rows = [
        {
            "system": name,
            "step_s": took.median_s,
            **{f"speedup_vs_{base}": base_s / took.median_s for base, base_s in bases_s.items()},
            "ratio_to_bound": took.median_s / bound_s,
            "rounds_s": list(took.rounds),
            **own.get(name, {}),
        }
        for name, took in times.items()
    ]
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    known = {"bound_s": bound_s, "binds": bound.binds}
    return {"setup": {**asdict(setup), **versions, **known, **more}, "rows": rows}


Counts = Callable[[Span], bool]
"""Whether what a span waits for is communication that counts."""


def exposed_s(lines: Sequence[Timeline], counts: Counts = lambda span: True) -> list[float]:
    """By pipeline rank, the median over steps."""
    return [statistics.median(column) / 1e6 for column in zip(*(_exposed_us(line, counts) for line in lines))]


def exposed_by_s(plan: Plan, lines: Sequence[Timeline], kind: Kind) -> float:
    """How long the only pipeline rank waits for collectives of a kind."""
    labels = {op.label for stage in plan.job.stages for op in stage.all_ops if op.kind is kind}
    (result,) = exposed_s(lines, lambda span: span.name in labels)
    return result


def _exposed_us(line: Timeline, counts: Counts) -> list[float]:
    result = [0.0] * line.ranks
    for span in line.spans:
        if span.kind is SpanKind.EXPOSED and counts(span):
            result[span.rank] += span.duration_us
    return result


def hidden(mine_s: Sequence[float], all_s: Sequence[float]) -> list[float | None]:
    """By pipeline rank, the share of what waits at once expose (`all_s`) that is not exposed; None where
    that is nothing."""
    return [1.0 - mine / all_ if all_ else None for mine, all_ in zip(mine_s, all_s, strict=True)]


def with_costs(plan: Plan, costs: Costs) -> Plan:
    """The plan as it is, with these costs and what they predict."""
    made = replace(plan, costs=costs)
    return replace(made, prediction=predict(made))


def prediction_of(plan: Plan) -> Prediction:
    """What is predicted of a plan that was made with costs."""
    assert plan.prediction is not None
    return plan.prediction


def keep_run(folder: Path, planned: Plan, plan: Plan, timelines: Sequence[Timeline]) -> None:
    """Write the folder, which is made if it is not there. timelines: of all counted steps, at least one."""
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(planned, folder / "planned.json")
    save_plan(plan, folder / "plan.json")
    by_time = sorted(timelines, key=lambda timeline: timeline.step_us)
    save_json(by_time[len(by_time) // 2], folder / "measured.json")


def start_runners(plans: Mapping[str, Plan], model: nn.Module) -> dict[str, Runner]:
    """A Runner of each plan, all of which share what the first has; what is predicted is printed. The model
    stays the plain one that they are compared with."""
    runners: dict[str, Runner] = {}
    own = copy.deepcopy(model)
    for name, plan in plans.items():
        runners[name] = Runner(plan, own, shares=next(iter(runners.values()), None))
        say_on_first(f"{name}: predicted {prediction_of(plan).step_us / 1e6:.3f} s")
    return runners


def check_steps(
    runners: Mapping[str, Runner], batch: Batch, plain: Batch, loss: float, same: float = SAME
) -> float:
    """One step of each against the plain model's. Returns the worst relative error of a gradient."""
    worst = 0.0
    for name, runner in runners.items():
        result, grads = one_step(runner, batch)
        worst = max(worst, compare(name, grads, plain, "the plain model", same))
        check_loss(name, result, loss)
    return worst


def one_step(runner: Runner, batch: Batch) -> StepResult:
    """What one step finds; no gradients are left."""
    dist.barrier()
    loss = float(runner.step(batch))
    return loss, taken_gradients(runner)


def taken_gradients(trained: nn.Module | Runner) -> Batch:
    """The gradients that a step left, by parameter; they are dropped."""
    grads = {name: p.grad.clone() for name, p in trained.named_parameters() if p.grad is not None}
    drop_gradients(trained.parameters())
    return grads


def plain_step(model: nn.Module, batch: Batch, loss: Loss, pieces: int) -> StepResult:
    """The plain model's loss and gradients, of a batch in equal pieces; each rank computes some of them,
    and has at least one."""
    rows = next(iter(batch.values())).shape[0] // pieces
    total = torch.zeros((), dtype=torch.float64)
    for piece in range(dist.get_rank(), pieces, dist.get_world_size()):
        own = {name: leaf[piece * rows : (piece + 1) * rows] for name, leaf in batch.items()}
        part = loss(model, own) / pieces
        part.backward()  # type: ignore[no-untyped-call]
        total += part.detach()
    dist.all_reduce(total)
    grads = taken_gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
    return float(total), grads


def check_loss(name: str, found: float, plain: float) -> None:
    """Raises RunError where a system's loss is not the plain model's."""
    if abs(found / plain - 1.0) > SAME:
        raise RunError(f"the loss of {name} is {found}, the plain model's {plain}")


def check_bitwise(name: str, found: StepResult, base_name: str, base: StepResult) -> None:
    """Raises RunError where a step found anything else than another."""
    differs = [key for key, grad in found[1].items() if not torch.equal(grad, base[1][key])]
    if differs or found[0] != base[0]:
        raise RunError(
            f"{name} must be bitwise equal to {base_name}, and differs in {', '.join(differs) or 'the loss'}"
        )


def own_parts(runner: Runner, full: Mapping[str, Tensor]) -> Batch:
    """This rank's part of each of a plain model's gradients, by parameter."""
    job = runner.plan.job
    known = {parameter.name: parameter for parameter in job.parameters}
    return {
        name: part_of(full[name], known[name], job, runner.coordinates).clone()
        for name, _ in runner.named_parameters()
    }


def take_turns(
    runners: Mapping[str, Runner], others: Mapping[str, RaceStep], batch: Batch, rounds: int
) -> tuple[dict[str, Times], dict[str, list[Timeline]]]:
    """The times of all systems, `others` first, and the timelines of the runners' counted steps."""
    systems = dict(others)
    for name, runner in runners.items():
        systems[name] = fresh(runner.parameters(), partial(runner.step, batch))
    timelines: dict[str, list[Timeline]] = {name: [] for name in runners}

    def after(name: str) -> None:
        if name in runners:
            timelines[name].append(runners[name].timeline())

    times = race(systems, rounds, after=after, say=say_on_first, warm_ups=TURNS_BEFORE)
    return times, timelines


def plans_of(runners: Mapping[str, Runner]) -> dict[str, Plan]:
    """By name, what runs."""
    return {name: runner.plan for name, runner in runners.items()}


def keep_runs(kept: str, runners: Mapping[str, Runner], timelines: Mapping[str, Sequence[Timeline]]) -> None:
    """What ran of each plan, as a run that `stretto report` shows, where `kept` names a folder."""
    for name, runner in runners.items() if kept else ():
        folder = Path(kept) / name.replace(",", "").replace(" ", "-")
        keep_run(folder, runner.plan, runner.plan, timelines[name])
