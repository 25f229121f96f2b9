"""The calibration file, and jobs priced from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import stretto
from stretto.ir.costs import CollectiveCost, Link
from stretto.ir.curve import Curve
from stretto.ir.flow import PHASES
from stretto.ir.mesh import Mesh
from stretto.ir.prices import signature, specs_of
from stretto.ir.program import WAIT, Op, Ref, TensorSpec
from stretto.ir.timeline import SpanKind
from stretto.measure.time_ops import distinct_ops
from stretto.price.calibration import (
    Calibration,
    Calls,
    GroupTiming,
    LinkTiming,
    Machine,
    Timing,
    line_through,
    load_calibration,
    save_calibration,
)
from stretto.price.priced import CalibratedPricer, find_group, find_link, priced_costs
from stretto.price.shared import sharing
from stretto.schedule.families import make_schedule
from stretto.simulating import simulate
from tests.price.comm_job import comm_job, costs_on
from tests.simulating.test_engine import schedule
from tests.synthetic_comm import make_comm_plan

HERE = Machine("a device", "2.13.0", 1)


def group(kind: str, members: int, stride: int = 1, hosts: int = 1, us: float = 100.0) -> GroupTiming:
    curve = Curve(((0.0, us), (1_000_000.0, us + 1000.0)))
    cost = CollectiveCost(curve, 7.0, 0.0, "measured: c.json", 0.75)
    return GroupTiming(kind, members, stride, hosts, cost, Calls(3.0, 0.0, 20.0, 4.0), 0.1)


def calibration() -> Calibration:
    job = comm_job(2)
    found = Calibration(HERE, "c.json")
    for at, (key, (op, _)) in enumerate(distinct_ops([job]).items()):
        found.ops[key] = Timing(10.0 + at, 0.01, op.flops, 1000)
    found.collectives = [group(k, 2) for k in ("all_reduce", "all_gather", "reduce_scatter")]
    found.links = [
        LinkTiming(1, 1, *(Link(us, rate, 2.0, "measured: c.json") for us, rate in ((20, 500), (25, 400)))),
        LinkTiming(4, 2, Link(90.0, 12.0, 4.0, "measured: c.json"), spread=0.125),
    ]
    found.traced = {"aten::mm float32 [2,3] [3,4]": 4.5}
    return found


def test_a_file_comes_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    save_calibration(calibration(), path)
    assert load_calibration(path) == calibration()
    first = path.read_bytes()
    save_calibration(load_calibration(path), path)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda d: d.pop("format"), "format"),
        (lambda d: d.update(version=2), "version 12"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d["machine"].update(kind="tpu"), "machine.kind"),
        (lambda d: d["collectives"][0].update(kind="all"), r"collectives\[0\].kind"),
        (lambda d: d["collectives"][0].update(members=1), r"collectives\[0\].members"),
        (lambda d: d["collectives"][0]["cost"].update(curve={"points": [[1, 2], [1, 3]]}), "cost.curve"),
        (lambda d: d["links"][1]["link"].update(bytes_per_us=0), r"links\[1\].link.bytes_per_us"),
        (lambda d: d["links"][1].pop("stride"), "stride"),
        (lambda d: next(iter(d["ops"].values())).update(us=-1), "us: "),
        (lambda d: d["traced"].update(x=-1), "traced.x"),
        (lambda d: d["links"][0]["back"].update(bytes_per_us=0), r"links\[0\].back.bytes_per_us"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, change, key: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.json"
    save_calibration(calibration(), path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(stretto.UsageError, match=f"c.json: .*{key}"):
        load_calibration(path)


def test_a_plan_from_the_file_looks_every_op_up(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    save_calibration(calibration(), path)
    job = comm_job(2)
    specs = specs_of(job)
    costs = costs_on(job, make_schedule("1f1b", 2, 2), str(path))
    known = calibration().ops
    for stage in job.stages:
        for op in (op for ops in stage.ops.values() for op in ops):
            us = costs.op_us[stage.index, op.name]
            if op.target == "comm.wait":
                started = next(o for made in stage.ops.values() for o in made if o.name == op.uses[0])
                assert started.collective is not None
                finish_us = 4.0 + 20.0 * started.collective.nbytes / 1e6
                assert us == pytest.approx(finish_us), "what it has left to do"
            elif op.collective is not None:
                assert us == known[signature(op, specs)].us + 3.0, "the start costs the transport's call too"
            else:
                assert us == known[signature(op, specs)].us
    assert costs.source == "calibration c.json of a device, PyTorch 2.13.0, 1 thread: ops 28 measured"
    assert costs.collectives["tp", "all_gather"].processor_us_per_mb == 7.0
    assert costs.link(0, 1).bytes_per_us == 500.0, "places are two ranks apart: as neighbours, not as four"
    assert costs.link(1, 0).bytes_per_us == 400.0, "the other way"
    assert costs.shared == ()
    assert set(costs.op_how.values()) == {"measured"}
    plan = stretto.plan(job, cluster=str(path))
    assert plan.prediction is not None
    # Of what runs once a step, starts are priced as those that are known, and a copy by its bytes.
    once = {(rank, op.name) for rank in range(plan.ranks) for op in plan.once(rank)}
    assert {key: us for key, us in plan.costs.op_us.items() if key not in once} == costs.op_us
    assert {key for key in once if plan.costs.op_us.get(key, 0.0) > 0.0} == {(0, "pp.loss"), (1, "pp.loss")}
    assert replace(plan.costs, op_us={}, op_how={}) == replace(costs, op_us={}, op_how={})


def mm(m: int, n: int, k: int) -> tuple[Op, dict[str, TensorSpec]]:
    specs = {"a": TensorSpec((m, k), "float32"), "b": TensorSpec((k, n), "float32")}
    made = (TensorSpec((m, n), "float32"),)
    return Op("y", "aten.mm.default", (Ref("a"), Ref("b")), (), made, flops=2 * m * n * k), specs


def price(found: Calibration, op: Op, specs: dict[str, TensorSpec]) -> tuple[float, str]:
    priced = CalibratedPricer(found).price(op, specs)
    return priced.us, priced.how


def test_an_op_between_two_sizes_lies_between_their_times() -> None:
    found = Calibration(HERE)
    for side, us in ((64, 10.0), (256, 320.0)):
        op, specs = mm(side, side, side)
        found.ops[signature(op, specs)] = Timing(us, 0.0, op.flops, 3 * 4 * side * side)
    us, how = price(found, *mm(128, 128, 128))
    assert how == "interpolated"
    # Half way on both logarithmic scales.
    assert us == pytest.approx((10.0 * 320.0) ** 0.5)
    assert price(found, *mm(32, 64, 64)) == (pytest.approx(10.0), "interpolated"), (
        "less work may be all overhead"
    )
    us, how = price(found, *mm(512, 256, 256))
    assert (us, how) == (pytest.approx(640.0), "interpolated"), "a little more goes at the same rate"
    us, how = price(found, *mm(2560, 256, 256))
    assert (us, how) == (pytest.approx(3200.0), "roofline"), "much more at the best rate"


def test_other_dtypes_and_targets_are_not_alike() -> None:
    found = Calibration(HERE)
    op, specs = mm(64, 64, 64)
    found.ops[signature(op, specs)] = Timing(10.0, 0.0, op.flops, 49_152)
    half = {name: TensorSpec(spec.shape, "bfloat16") for name, spec in specs.items()}
    assert price(found, op, half)[1] == "roofline"
    other = Op("y", "aten.add.Tensor", op.args, (), op.outputs)
    us, how = price(found, other, specs)
    assert how == "roofline"
    assert us == pytest.approx(10.0), "never faster than the shortest op"


def test_a_traced_op_is_taken_where_none_was_measured() -> None:
    found = Calibration(HERE, traced={"aten::mm float32 [2,3] [3,4]": 4.5})
    assert price(found, *mm(2, 4, 3)) == (4.5, "traced")
    with pytest.raises(stretto.UsageError, match=r"no time of any op .*run `stretto calibrate`"):
        price(found, *mm(2, 4, 5))


def test_an_axis_takes_the_group_most_like_it() -> None:
    found = Calibration(HERE, "c.json")
    found.collectives = [
        group("all_reduce", 2),
        group("all_reduce", 2, stride=4, hosts=2, us=900.0),
        group("all_reduce", 4),
    ]
    mesh = Mesh((("pp", 1), ("dp", 2), ("tp", 4)))
    assert find_group(found, mesh, "dp", "all_reduce").cost.curve.us(0) == 900.0
    assert find_group(found, mesh, "dp", "all_reduce").hosts == 2
    assert find_group(found, mesh, "tp", "all_reduce").cost == found.collectives[2].cost
    eight = find_group(found, Mesh((("pp", 1), ("tp", 8))), "tp", "all_reduce").cost
    # A ring of 8 has 7 steps where one of 4 has 3, and moves 7/8 where that moves 3/4.
    assert eight.curve.us(0) == pytest.approx(100.0 * 7 / 3)
    assert eight.curve.us(10**6) - eight.curve.us(0) == pytest.approx(1000.0 * (7 / 8) / (3 / 4))
    assert "scaled to 8 ranks" in eight.source
    apart = find_group(found, Mesh((("pp", 1), ("dp", 2), ("tp", 2))), "dp", "all_reduce").cost
    assert "ranks 1 apart for 2" in apart.source or "ranks 4 apart for 2" in apart.source


def test_what_is_missing_is_said() -> None:
    found = calibration()
    found.collectives = []
    with pytest.raises(stretto.UsageError, match=r"has no .*which the job has on tp"):
        priced_costs(comm_job(2), make_schedule("1f1b", 2, 2), found)
    with pytest.raises(stretto.UsageError, match="has no messages, which a pipeline needs"):
        find_link(Calibration(HERE), 1)


def test_who_shares_a_card() -> None:
    axes = ("dp", "tp")
    assert sharing(axes, {"pp", "dp", "tp"}, pipelined=True) == ("dp", "tp")
    assert sharing(axes, {"pp", "dp"}, pipelined=True) == ("dp",)
    assert sharing(axes, {"dp", "tp"}, pipelined=True) == (), "messages stay inside a host"
    assert sharing(axes, {"dp", "tp"}, pipelined=False) == ("dp", "tp")
    assert sharing(axes, {"dp"}, pipelined=False) == (), "nothing to share it with"
    assert sharing(axes, {"pp"}, pipelined=True) == ()


def test_another_kind_of_device_is_refused() -> None:
    found = calibration()
    found.machine = replace(HERE, kind="cuda")
    with pytest.raises(stretto.UsageError, match=r"c.json is of a cuda device .*capture with device='cuda'"):
        priced_costs(comm_job(2), make_schedule("1f1b", 2, 2), found)


def test_starts_lie_on_a_line_that_never_falls() -> None:
    assert line_through([(1_000_000, 30.0), (0, 10.0)]) == pytest.approx((10.0, 20.0))
    assert line_through([(4_000_000, 50.0), (2_000_000, 30.0), (3_000_000, 99.0)]) == pytest.approx(
        (10.0, 10.0)
    )
    assert line_through([(1_000, 30.0), (2_000, 20.0)]) == (30.0, 0.0)
    assert line_through([(1_000, 30.0)]) == (30.0, 0.0)
    assert line_through([(1_000, 1.0), (2_000, 9.0)]) == pytest.approx((0.0, 8_000.0))


def test_what_a_wait_has_left_to_do_is_computing() -> None:
    plan = make_comm_plan(schedule("0F0 0B0"), op_us=100, start_us=3, collective_us=150)
    waits = {
        (stage.index, op.name): 40.0
        for stage in plan.job.stages
        for phase in PHASES
        for op in stage.ops[phase]
        if op.target == WAIT
    }
    longer = replace(plan, costs=replace(plan.costs, op_us={**plan.costs.op_us, **waits}))
    before, after = simulate(plan), simulate(longer)
    extra_us = 40.0 * len(waits)
    assert len(waits) == 2
    assert after.total_us(SpanKind.COMPUTE, 0) == pytest.approx(
        before.total_us(SpanKind.COMPUTE, 0) + extra_us
    )
    assert after.total_us(SpanKind.EXPOSED, 0) <= before.total_us(SpanKind.EXPOSED, 0)
