"""The tensor race: PyTorch's eager tensor parallelism and ours, with and without overlap, on one network.

A GPT over tp = 2, alone or in a pipeline of two stages; float32, one thread a rank. A worker (`run_worker`,
once on each host):

    1. captures the step and measures its costs on this network, once; all plans are made from them;
    2. runs every system once: gradients and loss must be those of the plain model, and ours must be bitwise
       equal to each other, or the race is void;
    3. lets the systems take turns (`stretto.bench.race`), and keeps the timeline of each of ours; costs are
       measured again after the last (`stretto.bench.kept`).

What is hidden, and of what, is defined in `stretto.bench.tensor_result`.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stretto
from stretto.bench.kept import keep_run, prediction_of, with_costs
from stretto.bench.race import SAME, compare, drop_gradients, fresh, is_first, race, say_on_first
from stretto.bench.tensor_result import MODES, TORCH, Setup, make_result
from stretto.bench.torch_tensor import TorchTensor
from stretto.bench.work import Batch, work_of
from stretto.errors import RunError
from stretto.ir.timeline import Timeline
from stretto.measure.measured import measured_costs
from stretto.models.gpt import GPT, next_token_loss
from stretto.planning.make_plan import choose_schedule, make_plan
from stretto.runtime.shards import part_of

PROBE = "probe"

WARM_UPS = 1
"""Turns that do not count; the comparison of gradients was one more."""


def run_worker(setup: Setup, kept: str = "") -> Any:
    """One rank of the race. kept: where rank 0 keeps what ran, a folder for each mode; or `PROBE`, where the
    work of each place is all that is wanted. Raises RunError when gradients disagree."""
    say_on_first("capturing, and measuring this network")
    model, batch = setup.build()
    job = setup.capture(model, batch, split=[f"blocks.{cut}" for cut in setup.cuts] or "auto")
    costs = measured_costs(job, choose_schedule(job))
    if kept == PROBE:
        return [asdict(work_of(job, costs, [stage])) for stage in range(setup.pp)]
    # 1. All plans from the same costs.
    runners: dict[str, stretto.Runner] = {}
    for mode in MODES:
        plan = make_plan(job, costs, overlap=mode)
        runners[mode] = stretto.Runner(plan, model, shares=runners.get("off"))
        say_on_first(f"{mode}: predicted {prediction_of(plan).step_us / 1e6:.3f} s")
    theirs = TorchTensor(
        model, setup.cuts, setup.tp, setup.microbatches, sequence_parallel=setup.sequence_parallel
    )
    # 2. The same numbers.
    error = _check_equal(setup, model, batch, runners, theirs)
    # 3. In turn.
    systems = {TORCH: fresh(theirs.parameters(), partial(theirs.step, batch))}
    for name, runner in runners.items():
        systems[name] = fresh(runner.parameters(), partial(runner.step, batch))
    timelines: dict[str, list[Timeline]] = {name: [] for name in runners}

    def after(name: str) -> None:
        if name in runners:
            timelines[name].append(runners[name].timeline())

    times = race(systems, setup.rounds, after=after, say=say_on_first, warm_ups=WARM_UPS)
    off = runners["off"].plan
    costs = measured_costs(off.job, off.schedule)
    if not is_first():
        return None
    plans = {mode: runner.plan for mode, runner in runners.items()}
    known = {mode: with_costs(plan, costs) for mode, plan in plans.items()}
    result = make_result(setup, plans, known, times, timelines)
    result["setup"]["worst_error_vs_plain"] = error
    if kept:
        for name, plan in plans.items():
            keep_run(Path(kept) / name, plan, known[name], timelines[name])
    return result


def _check_equal(
    setup: Setup, model: GPT, batch: Batch, runners: dict[str, stretto.Runner], theirs: TorchTensor
) -> float:
    """Step 2. Returns the worst relative error of a gradient against the plain model's."""
    plain = _plain(setup, model, batch, runners["off"])
    found: dict[str, tuple[float | None, Batch]] = {}
    for mode, runner in runners.items():
        dist.barrier()
        loss = float(runner.step(batch))
        grads = {n: p.grad.clone() for n, p in runner.named_parameters() if p.grad is not None}
        drop_gradients(runner.parameters())
        found[mode] = loss, grads
    dist.barrier()
    theirs_loss = theirs.step(batch)
    found[TORCH] = (
        None if theirs_loss is None else float(theirs_loss.detach()),
        {name: grad.clone() for name, grad in theirs.grads()},
    )
    drop_gradients(theirs.parameters())
    worst = max(compare(name, grads, plain, "the plain model") for name, (_, grads) in found.items())
    for mode in runners:
        differs = [key for key, grad in found[mode][1].items() if not torch.equal(grad, found["off"][1][key])]
        if differs or found[mode][0] != found["off"][0]:
            raise RunError(
                f"{mode} must be bitwise equal to off, and differs in {', '.join(differs) or 'the loss'}"
            )
    ours, other = found["off"][0], found[TORCH][0]
    if ours is not None and other is not None and abs(other / ours - 1.0) > SAME:
        raise RunError(f"the loss of torch is {other}, ours {ours}")
    return worst


def _plain(setup: Setup, model: GPT, batch: Batch, runner: stretto.Runner) -> Batch:
    """This rank's parts of the plain model's gradients, by parameter; every rank computes them all."""
    for rows in range(0, len(batch["labels"]), setup.microbatch):
        some = {name: leaf[rows : rows + setup.microbatch] for name, leaf in batch.items()}
        (next_token_loss(model, some) / setup.microbatches).backward()  # type: ignore[no-untyped-call]
    whole = dict(model.named_parameters())
    known = {parameter.name: parameter for parameter in runner.plan.job.parameters}
    parts: Batch = {}
    for name, _ in runner.named_parameters():
        grad = whole[name].grad
        assert grad is not None
        parts[name] = part_of(grad, known[name], runner.plan.job, runner.coordinates).clone()
    drop_gradients(whole.values())
    return parts
