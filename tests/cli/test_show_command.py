"""`stretto show`: the ops of a phase with shapes, lanes, times and what happens to their memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.report import communications_of, show
from stretto.errors import UsageError
from stretto.ir.action import ONCE, ONCE_PHASES, Phase
from stretto.ir.plan import Plan
from stretto.ir.program import Job, Stage
from stretto.ir.serialize import save_plan
from stretto.ir.timeline import SpanKind
from stretto.report.detail import runs_of
from stretto.report.ops import program_lines, totals_of
from stretto.report.perfetto import laid_ops
from stretto.schedule.families import make_schedule
from stretto.simulating import simulate
from tests.parallelize.zero import ZeroCell
from tests.synthetic_comm import ACTIVATION, WEIGHT, make_comm_plan


def plan_with_modules() -> Plan:
    """Two stages of two blocks, tp=2; ops of block b belong to module `layers.<b>.mlp`."""
    plan = make_comm_plan(make_schedule("1f1b", 2, 4), blocks=2, collective_us=50.0)
    return replace(plan, job=_named(plan.job))


def _named(job: Job) -> Job:
    stages = tuple(
        Stage(
            stage.index,
            {
                phase: tuple(
                    replace(op, module=f"layers.{op.name.split('.')[1][0]}.mlp") if "." in op.name else op
                    for op in ops
                )
                for phase, ops in stage.ops.items()
            },
        )
        for stage in job.stages
    )
    return replace(job, stages=stages)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("show") / "plan.json"
    save_plan(plan_with_modules(), path)
    return path


def test_a_forward_says_what_is_saved_and_what_is_sent() -> None:
    lines = {line.row.op.name: line for line in program_lines(plan_with_modules(), 0, Phase.F)}
    # A block: product, all_reduce of it, its wait, the sum with the input.
    assert list(lines)[:4] == ["fm0.0", "fr0.0", "fr0.0_w", "fy0.0"]
    # The product is read by the sum over tp alone, and the sum by the addition, through the wait.
    assert lines["fr0.0"].freed == (("fm0.0", ACTIVATION.nbytes),)
    assert lines["fy0.0"].freed == (("fr0.0", ACTIVATION.nbytes),)
    assert lines["fr0.0_w"].row.op.nbytes == 0
    # The next block's weight gradient reads what the first block makes.
    assert lines["fy0.0"].saved_for == (Phase.W,)
    assert lines["y0"].sent == ("e0 to stage 1",)
    assert lines["y0"].saved_for == (Phase.I,)
    assert lines["fr0.0"].collective_us == 50.0
    assert lines["fr0.0"].row.op.lane == "tp"


def test_what_is_freed_adds_up() -> None:
    """What F and the received gradient bring, and B makes, is freed by the end of B, but for what leaves."""
    plan = plan_with_modules()
    forward, backward = program_lines(plan, 1, Phase.F), program_lines(plan, 1, Phase.B)
    made = sum(totals_of(lines)["bytes"] for lines in (forward, backward))
    freed = sum(totals_of(lines)["freed_bytes"] for lines in (forward, backward))
    arrives = sum(edge.spec.nbytes for edge in plan.job.edges if edge.target == 1)
    leaves = sum(edge.spec.nbytes for edge in plan.job.edges if edge.source == 1)
    grads = sum(p.spec.nbytes for p in plan.job.parameters if 1 in p.stages)
    assert 2 * WEIGHT.nbytes < grads
    assert freed == made + arrives - leaves - grads - plan.job.loss_spec.nbytes


def test_the_table_and_the_json_say_the_same(path: Path) -> None:
    arguments = [str(path), "--stage", "0", "--phase", "I"]
    table = CliRunner().invoke(show, arguments)
    assert table.exit_code == 0, table.output
    for words in ("br0.1", "comm.all_reduce", "float32[256,512]", "frees", "saved for W", "in 2 collectives"):
        assert words in table.output
    found = json.loads(CliRunner().invoke(show, [*arguments, "--json"]).output)
    names = [op["name"] for op in found["ops"]]
    assert found["totals"]["ops"] == len(names)
    assert all(name in table.output for name in names)
    started = next(op for op in found["ops"] if op["name"] == "br0.1")
    assert (started["lane"], started["collective_us"], started["dtype"]) == ("tp", 50.0, "float32")


@pytest.mark.parametrize("pattern", ["layers.1", "*.1.mlp"])
def test_a_pattern_picks_modules(path: Path, pattern: str) -> None:
    arguments = [str(path), "--stage", "0", "--phase", "F", "--module", pattern, "--json"]
    found = json.loads(CliRunner().invoke(show, arguments).output)
    assert [op["name"] for op in found["ops"]] == ["fm0.1", "fr0.1", "fr0.1_w", "fy0.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "2", "--phase", "F"], "--stage 2: the plan has stages 0 to 1"),
        (["--stage", "-1", "--phase", "F"], "--stage -1: the plan has stages 0 to 1"),
    ],
)
def test_wrong_usage(path: Path, arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(show, [str(path), *arguments]).exception
    assert isinstance(error, UsageError)
    assert str(error) == message


@pytest.fixture(scope="module")
def rows_plan() -> Plan:
    """Two pipeline ranks whose data-parallel ranks keep rows of parameters."""
    return ZeroCell(1, pp=2, tied=True).plan()


@pytest.mark.parametrize("phase", ONCE_PHASES)
def test_what_runs_once_a_step_is_listed_in_its_order(rows_plan: Plan, phase: Phase, tmp_path: Path) -> None:
    program = rows_plan.job.stages[1].ops[phase]
    lines = program_lines(rows_plan, 1, phase)
    assert sorted(line.row.op.name for line in lines) == sorted(op.name for op in program)
    at = {line.row.op.name: k for k, line in enumerate(lines)}
    assert all(at[used] < k for k, line in enumerate(lines) for used in line.row.op.uses if used in at)
    known = {f"{what} {p.name}" for p in rows_plan.job.parameters for what in ("param", "grad")}
    results = {result for line in lines for result in line.result}
    assert len(results & known) > 5
    assert results <= known | {"step loss"}
    assert all(line.collective_us for line in lines if line.row.op.collective is not None)
    save_plan(rows_plan, tmp_path / "plan.json")
    arguments = [str(tmp_path / "plan.json"), "--stage", "1", "--phase", phase.value]
    shown = CliRunner().invoke(show, arguments).output
    assert f"1{phase}: {phase.meaning} of pipeline rank 1, once a step" in shown


def test_a_program_that_a_plan_lacks_is_refused_with_the_stages_that_have_it(rows_plan: Plan) -> None:
    with pytest.raises(UsageError, match="stage 0 has no such program; nor has another"):
        program_lines(plan_with_modules(), 0, Phase.UNSHARD)
    stages = list(rows_plan.job.stages)
    stages[1] = Stage(1, {phase: ops for phase, ops in stages[1].ops.items() if phase not in ONCE_PHASES})
    without = replace(rows_plan, job=replace(rows_plan.job, stages=tuple(stages)))
    with pytest.raises(UsageError, match=r"stage 1 has no such program; .*: 0"):
        program_lines(without, 1, Phase.UNSHARD)


def test_ops_that_run_once_a_step_are_drawn_inside_their_spans(rows_plan: Plan) -> None:
    timeline = simulate(rows_plan)
    for rank, runs in enumerate(runs_of(rows_plan, timeline)):
        once = {run.window: run.spans for run in runs if run.microbatches == (ONCE,)}
        assert once.keys() == {f"{rank}UNSHARD", f"{rank}REDUCE_GRAD"}
    nested, around = laid_ops(rows_plan, timeline)
    for span in timeline.spans:
        if span.phase in ONCE_PHASES and span.duration_us:
            assert {op.row.phase for op in nested[id(span)]} == {span.phase}
    gathers = [s for s in timeline.spans if s.kind is SpanKind.MESSAGE and "unshard" in s.name]
    assert gathers
    assert all((span.rank, None, None, span.name) in around for span in gathers)


def test_each_communication_is_priced_as_the_kind_that_it_is(rows_plan: Plan) -> None:
    """Alone on its links none takes longer than in the step."""
    rows = {
        (row["axis"], row["kind"]): row for row in communications_of(rows_plan, simulate(rows_plan), None)
    }
    for kind, collective in (("parameters", "all_gather"), ("gradients", "reduce_scatter")):
        row = rows["dp", kind]
        assert row["alone_us"] == rows_plan.costs.collectives["dp", collective].curve.us(row["nbytes"])
        assert row["alone_us"] <= row["each_us"] + 1e-6
