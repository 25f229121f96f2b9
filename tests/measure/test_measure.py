"""Measuring with real ops and real processes: figures are checked for sense and agreement, not for size."""

from __future__ import annotations

import json
from ast import literal_eval
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.moe import MoeRace
from typer.testing import CliRunner

import stretto
from stretto.cli.calibrate import calibrate as calibrate_app
from stretto.cli.report import cost as cost_app
from stretto.errors import StrettoError
from stretto.files.typed_file import from_text
from stretto.ir.action import Phase
from stretto.ir.collectives import BY_TARGET
from stretto.ir.costs import CollectiveCost, Costs, Link, Processor
from stretto.ir.curve import Curve
from stretto.ir.mesh import Mesh
from stretto.ir.prices import signature
from stretto.ir.program import CHUNK, INDEX, STARTS, WAIT, Op, Ref, TensorSpec
from stretto.measure import calibrate, measured, time_ops
from stretto.measure.local_processes import MOST_PROCESSES, fitting
from stretto.measure.measure_collectives import Measured
from stretto.measure.measured import skew_of, stretches, with_skew
from stretto.measure.profile import function_of, make_calls, make_inputs, profile, typical
from stretto.measure.time_ops import distinct_ops, linear_ops, sweep_ops, time_op
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.price.calibration import Calls, load_calibration
from stretto.price.shared import WantedCollective, scaled
from stretto.schedule.families import make_schedule
from stretto.schedule.once import with_once
from tests.clusters import cores
from tests.price.comm_job import comm_job
from tests.runtime.launch import launch

CPU = torch.device("cpu")

RANKS = """
import json, os, sys
import torch, torch.distributed as dist
from stretto.measure import contention
from stretto.measure.measured import measured_costs
from stretto.files.typed_file import to_line
from stretto.schedule.families import make_schedule
from tests.price.comm_job import comm_job

# That ranks agree does not hang on how long they measure.
contention.ALONE_S, contention.MOST_COLLECTIVES = 0.03, 6
torch.set_num_threads(1)
dist.init_process_group("gloo")
job = comm_job(2, tp=2, rows=32, hidden=64)
costs = measured_costs(job, make_schedule("1f1b", 2, 2))
text = to_line(costs)
gathered = [None] * 4
dist.all_gather_object(gathered, text)
if dist.get_rank() == 0:
    print(json.dumps([gathered[0], len(set(gathered))]))
dist.destroy_process_group()
"""


@pytest.mark.quiet
def test_running_ranks_agree_on_all_costs(tmp_path: Path) -> None:
    """Two places with two tensor-parallel ranks each: ops, messages, collectives, equal everywhere."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    first, *_ = launch(4, script)
    text, different = json.loads(first.strip().splitlines()[-1])
    assert different == 1, "ranks have different costs"
    costs = from_text(Costs, text, "costs")
    assert costs.source.endswith("4 ranks at once")
    assert costs.links.keys() == {(0, 1), (1, 0)}
    unsharded = 32 * 64 * 4
    assert costs.collectives.keys() == {("tp", "all_gather"), ("tp", "all_reduce"), ("tp", "reduce_scatter")}
    for one in costs.collectives.values():
        assert unsharded in [nbytes for nbytes, _ in one.curve.points]
        assert all(us > 1.0 for _, us in one.curve.points)
        assert one.source == "measured, 2 ranks, all groups at once"
    assert costs.shared == (), "ranks of one host share no network card"
    job = comm_job(2, tp=2, rows=32, hidden=64)
    for stage in job.stages:
        for op in (op for ops in stage.ops.values() for op in ops):
            us = costs.op_us[stage.index, op.name]
            assert us > 0, "a wait has a call to return from, a view a line to run"


@pytest.mark.slow
@pytest.mark.quiet
def test_one_process_measures_communication_between_others() -> None:
    plan = stretto.plan(comm_job(2, tp=2, rows=16, hidden=32), cluster="local")
    assert plan.costs.source.startswith("measured on this processor")
    found, link = plan.costs.collectives["tp", "all_reduce"], plan.costs.link(0, 1)
    assert found.source == "measured, 2 ranks, loopback"
    assert found.curve.us(16 * 32 * 4) > 1.0
    assert link.source == "measured, loopback"
    assert 1.0 < link.latency_us < 20_000
    assert 10 < link.bytes_per_us < 100_000
    assert plan.costs.processor is None


def test_communication_is_measured_once_for_all_forms_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, tuple[int, ...]]] = []
    cost = CollectiveCost(Curve(((0.0, 5.0), (1e9, 5.0))))

    def between(mesh: Mesh, wanted: list[WantedCollective], link: bool):
        asked.append({one.kind: one.sizes for one in wanted})
        return None, {(one.axis, one.kind): Measured(cost, Calls(1.0), 0.0) for one in wanted}

    monkeypatch.setattr(measured, "measure_between", between)
    jobs = [comm_job(1, tp=2, rows=rows, hidden=32) for rows in (16, 2048)]
    found = measured.measure_forms(jobs, [make_schedule("1f1b", 1, 2)] * 2)
    assert len(asked) == 1
    assert {16 * 32 * 4, 2048 * 32 * 4} <= set(asked[0]["all_reduce"])
    assert found[0].collectives == found[1].collectives
    totals = [sum(costs.op_us.values()) for costs in found]
    assert totals[1] > totals[0], "ops of each are measured"


def test_what_takes_far_longer_than_the_median_is_no_speed_of_the_machine() -> None:
    assert typical([1.0, 1.0, 1.6]) == pytest.approx(1.2)
    assert typical([1.0, 1.0, 1.6, 50.0]) == pytest.approx(1.2)


def test_ranks_of_a_place_are_as_far_apart_as_their_rounds() -> None:
    fast = {0: [[100.0, 200.0], [50.0, 50.0]]}
    slow = {0: [[120.0, 180.0], [50.0, 50.0]]}
    other = {1: [[70.0, 100.0], [50.0, 50.0]]}
    assert skew_of([fast, slow]) == pytest.approx(420 / 400 - 1)
    assert skew_of([fast, other]) == 0.0, "no two share a place"
    assert skew_of([fast, slow, other]) == pytest.approx((420 + 270) / (400 + 270) - 1)
    assert skew_of([]) == 0.0
    one, stolen = {0: [[50.0, 50.0, 60.0]]}, {0: [[50.0, 9000.0, 50.0]]}
    assert skew_of([one, stolen]) == pytest.approx(110 / 105 - 1), "something else had the processor"
    slow = {0: [[300.0, 250.0]]}
    ranks = [{0: [[100.0, 100.0]]}, {0: [[100.0, 100.0]]}, slow]
    assert skew_of(ranks) == pytest.approx(550 / 316.667 - 1, rel=1e-3), (
        "one that is always slow is not stolen from"
    )
    steady, stopped = {0: [[5.0, 5.0], [100.0, 100.0]]}, {0: [[5.0, 20.0], [100.0, 100.0]]}
    assert skew_of([steady, stopped]) == pytest.approx(225 / 217.5 - 1), "a quota's stop counts"


def test_under_a_quota_ranks_come_apart_by_what_they_compute_and_by_what_they_are_stopped_for() -> None:
    costs = Costs({}, {}, Link(0.0, 1.0), 0.0, "made up")
    assert with_skew(costs, 0.2, 0.05).skew == 0.2
    limited = with_skew(replace(costs, processor=Processor(100.0, 0.5)), 0.2, 0.05)
    assert limited.processor is not None
    assert limited.processor.skew == pytest.approx(0.15)
    assert limited.skew == 0.05
    # Threads that differ by more than the clock says: by no more than that.
    assert with_skew(limited, 0.1, 0.3).skew == 0.1


def test_a_stretch_lies_between_two_waits() -> None:
    job = comm_job(2, tp=2)
    ops = [op for made in job.stages[0].ops.values() for op in made]
    times = {op.name: [float(n), 10.0 * n] for n, op in enumerate(ops)}
    found = stretches(job, {0: times})
    waits = [float(n) for n, op in enumerate(ops) if op.target == WAIT]
    assert waits, "else nothing is cut"
    assert len(found[0]) > len(job.stages[0].ops), "programs are cut at their waits"
    assert sum(first for first, _ in found[0]) == sum(range(len(ops))) - sum(waits)
    assert all(second == 10.0 * first for first, second in found[0])
    planned = with_once(job, make_schedule("1f1b", 2, job.microbatches))
    assert Phase.REDUCE_GRAD in planned.stages[0].ops, "else nothing is left out"
    assert stretches(planned, {0: defaultdict(list, times)}) == found, (
        "sums run once a step, and are not timed"
    )


def test_under_a_quota_an_op_is_told_by_its_thread_and_its_program_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clock an op in which its rank was stopped seems ten times as long as its equals."""
    job = comm_job(1, tp=2)
    assert not profile(job, CPU).rounds[0].thread_shares
    monkeypatch.setattr("stretto.measure.stopwatch.quota_share", lambda: 0.5)
    found = profile(job, CPU)
    of = found.rounds[0]
    assert of.thread_shares.keys() == of.shares.keys()
    for phase, ops in job.stages[0].ops.items():
        names = [op.name for op in ops if op.target != WAIT]
        shares = {name: typical(of.thread_shares[name]) for name in names}
        waits = sum(typical(of.thread_shares[op.name]) for op in ops if op.target == WAIT)
        full_us = typical(of.totals[phase])
        for name, share in shares.items():
            assert found.op_us[0, name] == pytest.approx(
                full_us * share / (sum(shares.values()) + waits), rel=1e-6
            )


def test_large_axes_are_measured_small() -> None:
    assert fitting(Mesh((("dp", 8), ("tp", 8)))).world <= MOST_PROCESSES
    assert fitting(Mesh((("tp", 4),))).sizes == (("tp", 4),)
    assert fitting(Mesh((("dp", 64), ("tp", 2)))).sizes == (("dp", 4), ("tp", 2))
    cost = CollectiveCost(Curve(((0.0, 10.0), (100.0, 30.0))), 8.0, 0.0, "x")
    assert scaled(cost, "all_gather", 2, 2) is cost
    wide = scaled(cost, "all_gather", 2, 4)
    assert wide.curve.points == ((0.0, 30.0), (100.0, 60.0)), "3 steps for 1; 3/4 of the bytes for 1/2"
    assert wide.processor_us_per_mb == 12.0


@pytest.mark.parametrize("target", STARTS)
def test_starts_make_the_buffer_of_their_result(target: str) -> None:
    x = torch.randn(4, 3)
    kind = BY_TARGET[target]
    how = (*kind.reductions, "")[0]
    made = function_of(target, CPU)(x, *((how,) if how else ()), "tp", 2)
    assert made.shape == kind.shape(x.shape, 2, how)
    assert made.data_ptr() != x.data_ptr()


def test_others_are_taken_to_send_as_many_rows() -> None:
    counts = torch.tensor([[3, 1], [0, 4]])
    assert function_of("comm.all_to_all", CPU)(counts, "ep", 2).tolist() == [[3, 1], [0, 4]]
    assert function_of("comm.all_gather", CPU)(counts[0], "ep", 2).tolist() == [3, 1, 3, 1]


def test_dropless_experts_are_measured_with_rows_for_all() -> None:
    """And with a buffer that made-up routing may not fit."""
    ep = 4
    setup = MoeRace(
        ep=ep, routing="router", hidden=32, heads=2, layers=1, sequence=256, microbatches=1, ep_buffer=1.0
    )
    job = setup.capture(*setup.build())
    assert profile(job, CPU).op_us
    values = dict(make_inputs(job, job.stages[0], CPU))
    calls = make_calls(job, job.stages[0], CPU)[Phase.F]
    served: list[list[int]] = []
    for call in calls:
        if call.op.target == "stretto_moe.grouped_mm.default":
            served.append(
                values[call.op.args[2].name].diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
            )
        call.run(values, {})
    assert len(served) == 2
    even = 2 * 256 / 8 * ep  # rows of an expert: two of each token, of all ranks
    assert all(even / 4 < rows < 4 * even for rows in served[0]), served[0]


def test_a_rank_of_coordinate_0_stands_for_all() -> None:
    index = function_of(INDEX, CPU)("tp", 4)
    assert (index.item(), index.dtype, index.dim()) == (0, torch.int64, 0)
    x = torch.arange(12).reshape(2, 6)
    assert function_of(CHUNK, CPU)(x, 1, "tp", 3).tolist() == [[0, 1], [6, 7]]


def test_waits_are_counted_as_nothing_and_starts_as_their_buffer() -> None:
    job = comm_job(1, tp=2)
    times = profile(job, CPU).op_us
    assert times[0, "y0"] == 0.0
    assert times[0, "a0"] > 0.0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_sweep_makes_what_it_says(device: str) -> None:
    """Every op runs on its specs and gives its result's shape, on tensors without values."""
    meta = torch.device("meta")
    for op, specs in sweep_ops(device):
        given = {
            name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=meta)
            for name, spec in specs.items()
        }
        arguments = [given[arg.name] if isinstance(arg, Ref) else arg for arg in op.args]
        made = function_of(op.target, meta)(*arguments)
        made = made[0] if isinstance(made, tuple) else made
        assert op.outputs[0] is not None
        assert tuple(made.shape) == op.outputs[0].shape, signature(op, specs)


def test_the_sweep_has_linear_layers_as_autograd_lays_them_out() -> None:
    layer, x = torch.nn.Linear(16, 32, bias=False), torch.randn(8, 16, requires_grad=True)
    job = stretto.capture(
        torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), layer),
        x.detach(),
        loss=lambda model, mb: model(mb).sin().sum(),
        parallel=stretto.Parallel(microbatches=1),
    )
    swept = {signature(op, specs) for op, specs in linear_ops((8,), ((16, 32),), "float32")}
    assert len(swept) == 3
    assert swept < set(distinct_ops([job]))


def test_more_work_takes_longer() -> None:
    def product(side: int) -> float:
        spec = TensorSpec((side, side), "float32")
        op = Op("y", "aten.mm.default", (Ref("a"), Ref("b")), (), (spec,), flops=2 * side**3)
        timing = time_op(op, {"a": spec, "b": spec}, CPU)
        assert (timing.flops, timing.nbytes) == (2 * side**3, 3 * 4 * side**2)
        return timing.us

    assert product(32) < product(512)


E, R, D, M = 3, 16, 4, 5
ROWS = TensorSpec((R, D), "float32")
FEW = TensorSpec((R,), "int64")


@pytest.mark.parametrize(
    ("target", "args", "specs", "name", "said"),
    [
        ("stretto_moe.grouped_mm", "x w ends", {"w": TensorSpec((E, D, M), "float32")}, "ends", [5, 10, 16]),
        ("stretto_moe.grouped_mm_t", "x y ends", {"y": TensorSpec((R, M), "float32")}, "ends", [5, 10, 16]),
        ("aten.embedding", "x at", {}, "at", R),
        ("aten.index_select", "x 0 at", {}, "at", R),
        ("aten.gather", "x -1 at", {"at": TensorSpec((R, 1), "int64")}, "at", D),
        ("aten.embedding_dense_backward", "x at 7 -1 False", {}, "at", 7),
    ],
)
def test_integers_say_what_they_say_in_a_step(
    target: str,
    args: str,
    specs: dict[str, TensorSpec],
    name: str,
    said: int | list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of rows would have no rows, and rows would be one row."""
    specs = {"x": ROWS, "at": FEW, "ends": TensorSpec((E,), "int64"), **specs}
    given = [word if word in specs else literal_eval(word) for word in args.split()]
    resident = tuple(Ref(word) if word in specs else word for word in given)
    op = Op("z", f"{target}.default", resident, (), (ROWS,), flops=1)
    seen: list[torch.Tensor] = []

    def kept(target: str, device: torch.device) -> Callable[..., None]:
        function = function_of(target, device)

        def call(*values: Any) -> None:
            seen.append(values[given.index(name)])
            function(*values)

        return call

    monkeypatch.setattr(time_ops, "function_of", kept)
    monkeypatch.setattr(time_ops, "ROUND_US", 100.0)
    time_op(op, specs, CPU)
    if isinstance(said, list):
        assert seen[0].tolist() == said
    else:
        assert 0 <= int(seen[0].min()) < int(seen[0].max()) < said


def test_an_op_that_cannot_run_alone_is_said() -> None:
    spec = TensorSpec((2, 3), "float32")
    for name, args, specs in (("mm", "ab", {"a": spec, "b": spec}), ("neg", "t", {})):
        op = Op("y", f"aten.{name}.default", tuple(map(Ref, args)), (), (spec,))
        with pytest.raises(StrettoError, match=f"aten.{name}.default.* cannot be measured on its own"):
            time_op(op, specs, CPU)


def test_equal_ops_are_measured_once() -> None:
    job = comm_job(3, tp=2)
    found = distinct_ops([job, job])
    # Stages are equal but for the first, which reads the batch, and the last, which makes the loss.
    everything = sum(len(ops) for stage in job.stages for ops in stage.ops.values())
    assert len(found) < everything / 2
    assert not any(key.startswith(("comm.wait", "getitem")) for key in found)


def calibrate_into(path: Path, *arguments: str) -> tuple[int, str, BaseException | None]:
    done = CliRunner().invoke(calibrate_app, [*arguments, "--cluster-out", str(path), "--ops-only"])
    return done.exit_code, done.output, done.exception


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(time_ops, "ROUND_US", 100.0)
    path = tmp_path / "plan.json"
    stretto.plan(comm_job(1, tp=1, rows=8, hidden=16), cluster=cores()).save(path)
    return path


def test_calibrating_for_a_plan_prices_it_by_lookup(plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    status, text, _ = calibrate_into(out, str(plan_file))
    assert status == 0, text
    job = comm_job(1, tp=1, rows=8, hidden=16)
    assert set(load_calibration(out).ops) == set(distinct_ops([job]))
    plan = stretto.plan(job, cluster=str(out))
    assert plan.costs.source.endswith(
        f"ops {len([o for p in job.stages[0].ops.values() for o in p])} measured"
    )
    again, text, _ = calibrate_into(out, str(plan_file))
    assert again == 0
    assert "(0 measured now" in text, "what is kept is not measured again"
    again, text, _ = calibrate_into(out, str(plan_file), "--fresh")
    assert f"({len(load_calibration(out).ops)} measured now, 0 known)" in text


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "dp": 2, "tp": 2},
        *(pytest.param({axis: 2}, marks=pytest.mark.slow) for axis in ("pp", "dp", "tp")),
    ],
    ids=str,
)
def test_a_plan_whose_step_ends_in_sums_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int]
) -> None:
    """Sums of the loss and of gradients are programs of the plan that read no value of a microbatch."""
    monkeypatch.setattr(time_ops, "ROUND_US", 20.0)
    model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=8))
    parallel = stretto.Parallel(**layout, microbatches=2)
    job = stretto.capture(model, torch.zeros(4, 9, dtype=torch.int64), next_token_loss, parallel)
    stretto.plan(job, cluster=cores()).save(tmp_path / "plan.json")
    status, text, error = calibrate_into(tmp_path / "c.json", str(tmp_path / "plan.json"))
    assert status == 0, (text, error)
    assert all("rounds differ" in one for one in " ".join(text.split()).split("warning:")[1:])
    known = load_calibration(tmp_path / "c.json").ops
    assert any(key.startswith("aten.mm.default") for key in known)
    assert not any("grad/" in key or "?" in key for key in known)


def test_a_run_that_is_cut_short_keeps_what_is_there(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "c.json"
    calls: list[str] = []

    def some(op, specs, device):  # type: ignore[no-untyped-def]
        calls.append(op.target)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return time_op(op, specs, device)

    monkeypatch.setattr(calibrate, "time_op", some)
    status, _, error = calibrate_into(out, str(plan_file))
    assert status == 1
    assert isinstance(error, StrettoError)
    assert error.exit_status == 1
    assert "stopped before the end" in str(error)
    assert "run the same command" in str(error)
    assert len(load_calibration(out).ops) == 3
    status, text, _ = calibrate_into(out, str(plan_file))
    assert status == 0
    assert "3 known" in text
    assert set(load_calibration(out).ops) == set(distinct_ops([comm_job(1, tp=1, rows=8, hidden=16)]))


def test_a_run_that_fails_keeps_what_is_there(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StrettoError("the network is gone")

    out = tmp_path / "c.json"
    monkeypatch.setattr(calibrate, "calibrate_communication", fail)
    error = CliRunner().invoke(calibrate_app, [str(plan_file), "--cluster-out", str(out)]).exception
    assert isinstance(error, StrettoError)
    assert str(error) == "the network is gone"
    assert set(load_calibration(out).ops) == set(distinct_ops([comm_job(1, tp=1, rows=8, hidden=16)]))


def test_a_run_that_is_killed_has_written_a_part(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "c.json"
    seen: list[int] = []

    def look(op, specs, device):  # type: ignore[no-untyped-def]
        seen.append(len(load_calibration(out).ops))
        return time_op(op, specs, device)

    monkeypatch.setattr(calibrate, "time_op", look)
    assert calibrate_into(out, str(plan_file))[0] == 0
    assert seen == list(range(len(seen)))


def test_noise_is_told_with_the_op_when_it_is_measured_and_later(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "NOISY", -1.0)
    texts = [calibrate_into(tmp_path / "c.json", str(plan_file))[1].replace("\n", " ") for _ in range(2)]
    assert "warning: aten.mm.default(float32[8,16], float32[16,64]): rounds differ by" in texts[0]
    assert "rounds differed by" in texts[1]
    assert "--fresh measures it again" in texts[1]


def test_the_costliest_ops_and_communications_of_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = stretto.plan(comm_job(2, 4, tp=2, rows=256, hidden=512), cluster="h100x8")
    plan.save(path)
    short, full = (
        json.loads(CliRunner().invoke(cost_app, [str(path), "--json", "--top", top]).output)
        for top in ("3", "99")
    )
    assert [len(short[key]) for key in ("ops", "communications")] == [3, 3]
    first, reduce = short["ops"][0], short["communications"][0]
    assert (first["target"], first["source"]) == ("aten.mm.default", "roofline of h100x8 by shape")
    assert first["each_us"] * first["calls"] == pytest.approx(first["total_us"])
    assert (reduce["axis"], reduce["kind"], reduce["nbytes"]) == ("tp", "all_reduce", 256 * 512 * 4)
    assert reduce["count"] == 2 * 4, "one a stage and microbatch"
    curve = plan.costs.collectives["tp", "all_reduce"].curve
    assert reduce["alone_us"] == pytest.approx(curve.us(reduce["nbytes"]))
    assert sum(one["share"] for one in full["communications"]) == pytest.approx(1.0)


def test_a_trace_alone_is_input_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "c.json"
    with torch.profiler.profile(record_shapes=True) as recorded:
        torch.mm(torch.ones(8, 16), torch.ones(16, 4))
    recorded.export_chrome_trace(str(trace))
    status, text, _ = calibrate_into(out, "--from-profile", str(trace))
    assert status == 0, text
    found = load_calibration(out)
    assert found.ops == {}, "no sweep"
    assert found.collectives == [], "what is measured here says nothing of the machine that was traced"
    assert found.machine.kind == "cpu"
    assert "aten::mm float32 [8,16] [16,4]" in found.traced


def test_another_machines_file_is_not_added_to(plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    assert calibrate_into(out, str(plan_file))[0] == 0
    out.write_text(out.read_text().replace('"threads": ', '"threads": 9'))
    _, _, error = calibrate_into(out, str(plan_file))
    assert isinstance(error, stretto.UsageError)
    assert "is of another machine" in str(error)
    assert "--fresh" in str(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.txt"], r"x.txt: give a plan \(.json\) or settings \(.toml\)"),
        (["--cluster-out", "c.toml"], "a calibration is a .json file"),
        (["--cluster-out", "/nowhere/c.json"], "the folder .* does not exist"),
    ],
)
def test_wrong_usage_is_said(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(calibrate_app, arguments)
    assert isinstance(done.exception, stretto.UsageError)
    with pytest.raises(stretto.UsageError, match=message):
        raise done.exception
