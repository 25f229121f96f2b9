"""A real run of tp = 2 whose trace says what ran under what: the plans, what each rank does, and the reading.

The trace is the file that a run leaves behind; nothing is taken from the plan or from memory. A rank walks
the step with everything waited for at once (`off`) and in pairs (`window`), and saves what it measured.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.plan import Plan
from stretto.ir.program import WAIT
from stretto.ir.serialize import load_plan
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.runtime.runner import Runner
from tests.report.test_trace import Decoded

MODES = ("off", "window")
ROWS, SEQUENCE, MICROBATCHES = 8, 128, 4
STEPS = 5
"""Steps of which each leaves a trace, after one that opens connections and fills caches."""

LARGE_BYTES = 100_000
"""Smaller collectives take no longer than it takes to start them."""

FLOPS_PER_US = 20_000.0
"""Assumed of one slow core; only the order of work depends on it."""


def model() -> nn.Module:
    return GPT(GPTConfig(vocab_size=512, layers=2, hidden=512, heads=4, context=SEQUENCE), seed=3)


def batch() -> Tensor:
    return torch.randint(0, 512, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(5))


def make_plans(folder: Path, bytes_per_us: float, modes: Sequence[str] = MODES) -> None:
    """The plans of all modes, as files. bytes_per_us: of a collective, as the links are believed to be."""
    job = capture(model(), batch(), next_token_loss, Parallel(tp=2, microbatches=MICROBATCHES))
    op_us = {
        (stage.index, op.name): 20.0 + op.flops / FLOPS_PER_US
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
        if op.alias is None and op.target != WAIT
    }
    cost = CollectiveCost(Curve(((0.0, 200.0), (1e6, 200.0 + 1e6 / bytes_per_us))), source="assumed")
    collectives = {("tp", kind): cost for kind in ("all_reduce", "all_gather", "reduce_scatter")}
    costs = Costs(op_us, {}, Link(200.0, bytes_per_us), 20.0, "assumed", collectives)
    for mode in modes:
        plan = make_plan(job, costs, overlap=mode)
        assert plan.overlap == mode, plan.overlap_why
        replace(plan, prediction=None).save(folder / f"{mode}.json")


def launched(folder: Path, modes: Sequence[str]) -> None:
    """What each process does: a mode after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for mode in modes:
        runner = Runner(load_plan(folder / f"{mode}.json"), model())
        runner.step(batch())
        for step in range(STEPS):
            runner.step(batch())
            timeline = runner.timeline()
            if dist.get_rank() == 0:
                timeline.save(trace_of(folder, mode, step))
        grads = {name: p.grad for name, p in runner.named_parameters() if p.grad is not None}
        torch.save(grads, gradients_of(folder, mode, dist.get_rank()))
        runner.close()
    dist.destroy_process_group()


def trace_of(folder: Path, mode: str, step: int) -> Path:
    return folder / f"{mode}.{step}.perfetto-trace"


def gradients_of(folder: Path, mode: str, rank: int) -> Path:
    return folder / f"{mode}.{rank}.gradients"


def assert_equal_bits(folder: Path, ranks: int = 2) -> None:
    """All modes left the same gradients on each rank."""
    for rank in range(ranks):
        off, *others = (torch.load(gradients_of(folder, mode, rank)) for mode in MODES)
        assert off
        for found in others:
            assert found.keys() == off.keys()
            assert all(torch.equal(grad, off[name]) for name, grad in found.items())


@dataclass(frozen=True)
class Collective:
    """One of the program on rank 0's tp lane. under_us: how long of its time that rank computed."""

    time_us: float
    under_us: float

    @property
    def share(self) -> float:
        return self.under_us / self.time_us


def collectives_in(path: Path) -> list[Collective]:
    """The large collectives of a trace."""
    decoded = Decoded(path.read_bytes())
    assert decoded.processes == ["ranks 0-1 (measured)"]
    compute = [
        (s["start"], s["end"])
        for s in decoded.slices["ranks 0-1 (measured) compute"]
        if s["category"] in ("F", "I", "W", "B")
    ]
    assert compute
    found = []
    for s in decoded.slices["ranks 0-1 (measured) tp"]:
        # `tp all_reduce NAME`; a bucket of gradients has no kind.
        if len(s["name"].split()) == 3 and s["details"]["bytes"] >= LARGE_BYTES:
            assert s["category"] == "message"
            under_ns = sum(max(0, min(s["end"], end) - max(s["start"], start)) for start, end in compute)
            found.append(Collective((s["end"] - s["start"]) / 1000, under_ns / 1000))
    return found


def large_collectives(plan: Plan) -> int:
    """How many a step's programs have."""
    asked = (op.collective for stage in plan.job.stages for ops in stage.ops.values() for op in ops)
    return plan.job.microbatches * sum(one is not None and one.nbytes >= LARGE_BYTES for one in asked)


def read(folder: Path, mode: str) -> list[list[Collective]]:
    """By step, all large collectives of the plan."""
    wanted = large_collectives(load_plan(folder / f"{mode}.json"))
    traces = [collectives_in(trace_of(folder, mode, step)) for step in range(STEPS)]
    assert wanted > 0
    assert all(len(found) == wanted for found in traces), "every collective is in the trace"
    return traces


def assert_compute_under_collectives(folder: Path) -> None:
    """In `window` at least half of the collectives have compute under a quarter of their time or more. A busy
    machine can spoil a step's trace, never make it better: the best counts."""
    medians = [statistics.median(one.share for one in found) for found in read(folder, "window")]
    assert max(medians) >= 1 / 4, medians


def assert_none_under_collectives_when_off(folder: Path) -> None:
    """In `off` nothing runs under collectives but the rest of the call that starts them."""
    shares = [
        sum(one.under_us for one in found) / sum(one.time_us for one in found)
        for found in read(folder, "off")
    ]
    assert min(shares) < 0.08, shares


if __name__ == "__main__":
    launched(Path(sys.argv[1]), sys.argv[2:] or MODES)
