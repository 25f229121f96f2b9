"""The tensor race: PyTorch's eager tensor parallelism and ours, with and without overlap, on one network.

A GPT over tp = 2, alone or in a pipeline of two stages; float32, one thread a rank. A worker (`run_worker`,
once on each host):

    1. captures the step and measures its costs on this network, once; all plans are made from them;
    2. runs every system once: gradients and loss must be those of the plain model, and ours must be bitwise
       equal to each other, or the race is void;
    3. lets the systems take turns (`benchmarks.race`), and keeps the timeline of each of ours; costs are
       measured again after the last (`benchmarks.kept`).

What is hidden, and of what, is defined in `benchmarks.tensor_result`.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import stretto
from benchmarks.kept import keep_run, prediction_of, with_costs
from benchmarks.race import SAME, compare, drop_gradients, fresh, is_first, say_on_first
from benchmarks.raced import check_bitwise, one_step, own_parts, plans_of, take_turns
from benchmarks.races import PROBE
from benchmarks.tensor_result import MODES, TORCH, Setup, make_result
from benchmarks.torch_tensor import TorchTensor
from benchmarks.work import Batch, work_of
from stretto.errors import RunError
from stretto.measure.measured import measured_costs
from stretto.models.gpt import GPT, next_token_loss
from stretto.planning.choose import choose_schedule
from stretto.planning.make_plan import make_plan


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
    torchs = {TORCH: fresh(theirs.parameters(), partial(theirs.step, batch))}
    times, timelines = take_turns(runners, torchs, batch, setup.rounds)
    off = runners["off"].plan
    costs = measured_costs(off.job, off.schedule)
    if not is_first():
        return None
    plans = plans_of(runners)
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
    found = {mode: one_step(runner, batch) for mode, runner in runners.items()}
    dist.barrier()
    theirs_loss = theirs.step(batch)
    other = None if theirs_loss is None else float(theirs_loss.detach())
    grads_of = {mode: grads for mode, (_, grads) in found.items()}
    grads_of[TORCH] = {name: grad.clone() for name, grad in theirs.grads()}
    drop_gradients(theirs.parameters())
    worst = max(compare(name, grads, plain, "the plain model") for name, grads in grads_of.items())
    for mode in runners:
        check_bitwise(mode, found[mode], "off", found["off"])
    ours = found["off"][0]
    if other is not None and abs(other / ours - 1.0) > SAME:
        raise RunError(f"the loss of torch is {other}, ours {ours}")
    return worst


def _plain(setup: Setup, model: GPT, batch: Batch, runner: stretto.Runner) -> Batch:
    """This rank's parts of the plain model's gradients, by parameter; every rank computes them all."""
    for rows in range(0, len(batch["labels"]), setup.microbatch):
        some = {name: leaf[rows : rows + setup.microbatch] for name, leaf in batch.items()}
        (next_token_loss(model, some) / setup.microbatches).backward()  # type: ignore[no-untyped-call]
    parts = own_parts(runner, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    drop_gradients(model.parameters())
    return parts
