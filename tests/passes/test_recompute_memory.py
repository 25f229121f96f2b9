"""Memory falls as is promised: predicted and measured peaks, limits, and what users are reported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import stretto
from stretto.capturing import capture
from stretto.cli.main import app
from stretto.config import Parallel
from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import OVERLAP_MODES, Job, OverlapMode
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.passes.recompute import is_repeated
from stretto.passes.recompute_choice import recompute
from stretto.passes.step import Step
from stretto.planning import make_plan as make_plan_module
from stretto.planning.choose import begins
from stretto.planning.make_plan import make_plan, variants_of
from stretto.planning.peaks import Peaks
from stretto.planning.schedules import choose_schedule
from stretto.schedule.once import with_once
from tests.cells import slow
from tests.clusters import cores, cores_file
from tests.order.test_order_equality import costs_of
from tests.runtime.equality import made_up_costs
from tests.runtime.test_memory import peaks_with_adamw
from tests.train.tiny import write_settings

CONFIG = GPTConfig(vocab_size=64, layers=4, hidden=64, heads=4, context=64)
MODEL = GPT(CONFIG, seed=3)
BATCH = torch.randint(0, 64, (8, 65), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def job() -> Job:
    return capture(MODEL, BATCH, next_token_loss, Parallel(pp=2, microbatches=4))


def plan_of(job: Job, choice: str | int, schedule: str = "1f1b") -> Plan:
    return make_plan(replace(job, recompute=choice), made_up_costs(job), schedule=schedule)


def peaks(plan: Plan) -> tuple[int, ...]:
    assert plan.prediction is not None
    return plan.prediction.peak_bytes


@pytest.mark.parametrize("schedule", ["1f1b", slow("zb-h1")])
def test_predicted_peaks_fall_and_are_the_measured_ones(job: Job, schedule: str) -> None:
    last: tuple[int, ...] | None = None
    for choice in ("none", "selective", "full"):
        plan = plan_of(job, choice, schedule)
        measured = peaks_with_adamw(plan, MODEL, BATCH)
        for rank, predicted in enumerate(peaks(plan)):
            assert measured[rank] == pytest.approx(predicted, rel=0.01), f"{choice} rank {rank}"
        if last is not None:
            assert peaks(plan)[0] < 0.97 * last[0], f"{choice} saves nothing where most is live"
        last = peaks(plan)


def test_a_limit_is_kept_with_little_added_time(job: Job) -> None:
    none, full = plan_of(job, "none"), plan_of(job, "full")
    limit = (max(peaks(none)) + max(peaks(full))) // 2
    made = plan_of(job, limit)
    assert max(peaks(made)) <= limit
    assert 0 < max(made.again_us) < max(full.again_us)
    assert made.again_us[1] == 0, "rank 1 has one microbatch live, and room"
    stretto.verify(made)


def test_a_limit_that_is_no_limit_changes_no_op(job: Job) -> None:
    made = plan_of(job, 2**40)
    assert made.job == with_once(replace(job, recompute=2**40), made.schedule)
    assert "recompute        to keep at most 1,099,511,627,776 bytes: nothing needs to" in str(made)


def test_a_limit_that_cannot_be_kept_says_what_can(job: Job) -> None:
    with pytest.raises(PlanError, match="cannot keep recompute = 100,000 bytes a rank: 2 faults") as caught:
        plan_of(job, 100_000)
    least = [
        int(text.replace(",", "")) for text in re.findall(r"needs at least ([\d,]+) bytes", str(caught.value))
    ]
    made = plan_of(job, max(least) + 2 * 2**18)
    assert max(peaks(made)) <= max(least) + 2 * 2**18


@pytest.mark.parametrize("tp", [1, slow(2)])
def test_a_limit_that_overlap_cannot_keep_is_kept_by_waiting_at_once(tp: int) -> None:
    """Overlap is an upper limit: what `off` can keep, every mode can."""
    model = GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=2, context=16), seed=0)
    batch = torch.zeros(4, 17, dtype=torch.int64)
    job = capture(model, batch, next_token_loss, Parallel(pp=2, tp=tp, microbatches=4))
    costs = costs_of(job)

    def within(limit: int, mode: OverlapMode) -> Plan:
        made = replace(job, recompute=limit)
        return make_plan(made, costs, schedule="eager-1f1b", overlap=mode, order="captured")

    def least(mode: OverlapMode) -> int:
        with pytest.raises(PlanError, match=r"cannot keep recompute = 1,000 bytes a rank") as caught:
            within(1000, mode)
        told = re.findall(r"needs at least ([\d,]+) bytes", str(caught.value))
        return max(int(text.replace(",", "")) for text in told)

    limit = least("off")
    assert limit == least("window"), "the least is what a plan can keep"
    off = within(limit, "off")
    assert off.overlap_why == ""
    for mode in OVERLAP_MODES[1:]:
        made = within(limit, mode)
        assert max(peaks(made)) <= limit
        assert made == replace(off, overlap_why=f"overlap has more than recompute = {limit:,} bytes a rank")
        assert f"overlap          off: {made.overlap_why}" in str(made)
    assert "has more than" not in within(2 * limit, "local").overlap_why, "there is room for it"


def test_a_limit_counts_what_sharded_state_keeps() -> None:
    """With parameters, gradients and state in parts there is room for more of what the forward made."""
    shape = GPTConfig(vocab_size=512, layers=4, hidden=256, heads=4, context=256)
    with torch.device("meta"):
        model = GPT(shape)
    batch = torch.empty(8, 257, dtype=torch.int64, device="meta")
    limit = 55_000_000
    cluster = cores(link_gbps=50.0, latency_us=5.0)
    repeats: dict[int, int] = {}
    for zero in (1, 3):
        job = capture(model, batch, next_token_loss, Parallel(dp=4, zero=zero, recompute=limit))
        step = variants_of(job, cluster, "list").step(begins()[0])
        repeats[zero] = sum(is_repeated(op) for _, op in step.job.all_ops)
        assert max(peaks(stretto.plan(job, cluster, order="list"))) <= limit
    assert 0 < 2 * repeats[3] < repeats[1]


def test_what_messages_need_beyond_a_limit_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of messages are live for longer than was reckoned: no reason to wait for everything at once."""
    model = GPT(GPTConfig(vocab_size=64, layers=4, hidden=32, heads=2, context=16), seed=0)
    batch = torch.zeros(4, 17, dtype=torch.int64)
    job = capture(model, batch, next_token_loss, Parallel(pp=2, tp=2, microbatches=4))
    costs = costs_of(job)

    def within(choice: str | int) -> Plan:
        return make_plan(replace(job, recompute=choice), costs, overlap="local")

    limit = (max(peaks(within("none"))) + max(peaks(within("full")))) // 2
    said: list[bool] = []

    class Fewer(Peaks):
        def __call__(self, step: Step, about: bool = False) -> Sequence[int]:
            said.append(about)
            return [peak * 99 // 100 for peak in super().__call__(step, about)]

    monkeypatch.setattr(make_plan_module, "Peaks", Fewer)
    made = within(limit)
    assert made.overlap == "local"
    assert max(peaks(made)) <= limit
    assert said.count(False) < said.count(True), "most of the search for a limit simulates nothing"


def test_a_limit_is_found_in_few_steps(job: Job) -> None:
    costs = made_up_costs(job)
    asked: list[Job] = []

    def kept(made: Job, about: bool) -> list[int]:
        """As if every rank had all that is not repeated, of four microbatches."""
        asked.append(made)
        repeated = [{op.repeats for op in stage.all_ops if is_repeated(op)} for stage in made.stages]
        return [
            4 * sum(op.nbytes for op in stage.ops[Phase.F] if op.name not in again)
            for stage, again in zip(made.stages, repeated, strict=True)
        ]

    schedule = choose_schedule(job, schedule="1f1b")
    most, least = (max(kept(recompute(job, word, costs, schedule, kept), True)) for word in ("none", "full"))
    for limit in (least + (most - least) * part // 8 for part in range(1, 8)):
        asked.clear()
        made = recompute(job, limit, costs, schedule, kept)
        assert len(asked) < 10
        assert max(kept(made, True)) <= limit


def test_the_plan_command_tells_it(tmp_path: Path) -> None:
    config = write_settings(tmp_path)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(cores_file(link_gbps=0.0125))

    def peak(choice: str) -> tuple[float, str]:
        command = ["plan", str(config), "-o", str(tmp_path / f"{choice}.json"), "--cluster", str(cluster)]
        result = CliRunner().invoke(app, [*command, "--set", f"parallel.recompute={choice}"])
        assert result.exit_code == 0, result.output
        plan = stretto.load_plan(tmp_path / f"{choice}.json")
        stretto.verify(plan)
        return peaks(plan)[0], result.output

    none, told = peak("none")
    assert "recompute" not in told
    full, told = peak("full")
    assert full < none
    assert re.search(r"  recompute        full: [\d.]+ ms of the compute by rank", told)
