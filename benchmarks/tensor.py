"""The tensor race: PyTorch's eager tensor parallelism and ours, with and without overlap, on one network.

A GPT over tp = 2, alone or in a pipeline of two stages; float32, one thread a rank. A worker (`run_worker`,
once on each host):

    1. captures the step and measures its costs on this network, once; all plans are made from them;
    2. runs every system once: gradients and loss must be those of the plain model, and ours must be bitwise
       equal to each other, or the race is void;
    3. lets the systems take turns (`benchmarks.racing`), and keeps the timeline of each of ours; costs are
       measured again after the last (`benchmarks.racing`).

What is hidden, and of what, is defined in `benchmarks.tensor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import stretto
from benchmarks.labs import PROBE
from benchmarks.racing import (
    Times,
    check_bitwise,
    check_loss,
    compare,
    drop_gradients,
    exposed_s,
    fresh,
    hidden,
    is_first,
    keep_run,
    one_step,
    own_parts,
    plain_step,
    plans_of,
    prediction_of,
    race_json,
    say_on_first,
    start_runners,
    take_turns,
    with_costs,
)
from benchmarks.torch_tensor import TorchTensor
from benchmarks.work import AXIS, Batch, GPTWork, work_of
from stretto.ir.plan import Plan
from stretto.ir.program import OverlapMode
from stretto.ir.timeline import Timeline
from stretto.measure.measured import measured_costs
from stretto.models.gpt import GPT, next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.planning.schedules import choose_schedule

TORCH = "torch"
MODES: tuple[OverlapMode, ...] = ("off", "local", "window")


@dataclass(frozen=True, slots=True)
class TensorRace(GPTWork):
    """One race."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """The blocks with which stages after the first begin: equal numbers, the last stage has the fewest,
        since it has the output head."""
        each = -(-self.layers // self.pp)
        return tuple(each * stage for stage in range(1, self.pp))

    def __str__(self) -> str:
        return f"hidden {self.hidden}, {self.layout}, {self.rate}"


def make_result(
    setup: TensorRace,
    planned: Mapping[str, Plan],
    plans: Mapping[str, Plan],
    times: Mapping[str, Times],
    timelines: Mapping[str, Sequence[Timeline]],
    **more: Any,
) -> dict[str, Any]:
    """The JSON of the race.

    planned: the plans by mode, as they were made. plans: with costs measured again after the race; all but
    `planned_s` is from these.
    """
    off = plans["off"]
    binding = min((prediction_of(plan) for plan in plans.values()), key=lambda one: one.bound_us)
    bases_s = {"off": times["off"].median_s, "torch": times[TORCH].median_s}
    exposed = {mode: exposed_s(lines, lambda span: span.axis == AXIS) for mode, lines in timelines.items()}
    own = {}
    for name, plan in plans.items():
        predicted_s = prediction_of(plan).step_us / 1e6
        own[name] = {
            "overlap": plan.overlap,
            "overlap_why": plan.overlap_why,
            "planned_s": prediction_of(planned[name]).step_us / 1e6,
            "predicted_s": predicted_s,
            "measured_over_predicted": times[name].median_s / predicted_s,
            "exposed_s": exposed[name],
            "hidden": hidden(exposed[name], exposed["off"]),
            "peak_bytes": list(timelines[name][-1].peak_bytes),
        }
    work = [work_of(off.job, off.costs, off.schedule.stages_of(rank)) for rank in range(off.schedule.ranks)]
    return race_json(
        setup,
        times,
        bases_s,
        binding,
        own,
        microbatch_work=[asdict(each) for each in work],
        communication_over_compute=max(each.ratio for each in work),
        costs=off.costs.source,
        **more,
    )


WORKER = "tensor"
"""The module of this room that every rank runs."""

SHAPES = {
    1024: TensorRace(hidden=1024, heads=16, layers=3, microbatch=2),
    2048: TensorRace(hidden=2048, heads=32, layers=2, microbatch=1),
}
"""Hidden size -> the GPT of that size. With Gloo a megabyte all-reduced takes about 8 ms of the processor, so
smaller models would measure the processor and not the overlap."""


def races(
    rates: Sequence[str], hidden: Sequence[int], pps: Sequence[int], *, sequence_parallel: bool, rounds: int
) -> list[TensorRace]:
    """The races of all combinations, layouts outermost."""
    return [
        replace(SHAPES[size], rate=rate, pp=pp, sequence_parallel=sequence_parallel, rounds=rounds)
        for pp in pps
        for size in hidden
        for rate in rates
    ]


def run_worker(setup: TensorRace, kept: str = "") -> Any:
    """One rank of the race. kept: where rank 0 keeps what ran, a folder for each mode; or `PROBE`, where the
    work of each place is all that is wanted. Raises RunError when gradients disagree."""
    say_on_first("capturing, and measuring this network")
    model, batch = setup.build()
    job = setup.capture(model, batch, split=[f"blocks.{cut}" for cut in setup.cuts] or "auto")
    costs = measured_costs(job, choose_schedule(job))
    if kept == PROBE:
        return [asdict(work_of(job, costs, [stage])) for stage in range(setup.pp)]
    # 1. All plans from the same costs.
    runners = start_runners({mode: make_plan(job, costs, overlap=mode) for mode in MODES}, model)
    theirs = TorchTensor(
        model, setup.cuts, setup.tp, setup.microbatches, sequence_parallel=setup.sequence_parallel
    )
    # 2. The same numbers.
    error = _check_equal(setup, model, batch, runners, theirs)
    # 3. In turn.
    torchs = {TORCH: fresh(theirs.parameters(), partial(theirs.step, batch))}
    times, timelines = take_turns(runners, torchs, batch, setup.rounds)
    off = runners["off"].plan
    costs = measured_costs(off.job, off.schedule)
    if not is_first():
        return None
    plans = plans_of(runners)
    known = {mode: with_costs(plan, costs) for mode, plan in plans.items()}
    for name, plan in plans.items() if kept else ():
        keep_run(Path(kept) / name, plan, known[name], timelines[name])
    return make_result(setup, plans, known, times, timelines, worst_error_vs_plain=error)


def _check_equal(
    setup: TensorRace, model: GPT, batch: Batch, runners: dict[str, stretto.Runner], theirs: TorchTensor
) -> float:
    """Step 2. Returns the worst relative error of a gradient against the plain model's."""
    loss, full = plain_step(model, batch, next_token_loss, setup.microbatches)
    plain = own_parts(runners["off"], full)
    steps = {mode: one_step(runner, batch) for mode, runner in runners.items()}
    dist.barrier()
    theirs_loss = theirs.step(batch)
    grads_of = {mode: grads for mode, (_, grads) in steps.items()}
    grads_of[TORCH] = {name: grad.clone() for name, grad in theirs.grads()}
    drop_gradients(theirs.parameters())
    worst = max(compare(name, grads, plain, "the plain model") for name, grads in grads_of.items())
    for mode in runners:
        check_bitwise(mode, steps[mode], "off", steps["off"])
    check_loss("off", steps["off"][0], loss)
    if theirs_loss is not None:
        check_loss(TORCH, float(theirs_loss.detach()), loss)
    return worst


SETUP = TensorRace
"""What a worker of this module takes."""
