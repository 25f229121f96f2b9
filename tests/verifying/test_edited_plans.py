"""A plan whose programs were edited: refused, unless the edit is declared; then all that can be proved is."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import stretto
from stretto.backend.dispatch_adapter import resolve
from stretto.cli.main import app
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.runtime import run_threads
from stretto.verifying.placements import placement_faults
from stretto.verifying.shapes import shape_faults
from tests.clusters import cores
from tests.verifying.edited_run import MADE, case_of, main, outcome, outcomes, wrong
from tests.verifying.job_edits import EDITS, extra, ops_of

Data = dict[str, Any]
Edit = Callable[[Data], Any]
pytestmark = pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")


def made(name: str) -> Data:
    model, batch, loss, parallel = MADE[name]()
    plan = stretto.plan(stretto.capture(model, batch, loss, parallel), cores(), order="list")
    found: Data = json.loads(plan_to_text(plan))
    return found


@pytest.fixture(scope="module")
def plans() -> dict[str, Data]:
    return {name: made(name) for name in ("chain", "tensor parallel", "batch norm", "counted", "dropout")}


def op(data: Data, target: str, *phases: str) -> list[Any]:
    found: list[Any] = next(op for op in ops_of(data, *phases) if op[1] == target)
    return found


def cubed(data: Data) -> None:
    """A step as sound as the plan's, of another loss."""
    op(data, "aten.pow.Tensor_Scalar")[2][1] = 3


def test_an_edited_program_is_read_only_by_who_says_so(plans: dict[str, Data], tmp_path: Path) -> None:
    data = copy.deepcopy(plans["chain"])
    cubed(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(stretto.UsageError, match=r"plan\.json: job\.stages\[1\]\.ops\.F is not what"):
        stretto.load_plan(path)
    plan = stretto.load_plan(path, edited=True)
    stretto.verify(plan)
    answer = CliRunner().invoke(app, ["verify", str(path)])
    assert isinstance(answer.exception, stretto.UsageError)
    assert "--edited on the command line, load_plan(path, edited=True)" in str(answer.exception)
    for command in (["verify"], ["simulate"], ["rehearse", "--rank", "0", "--steps", "1"]):
        assert CliRunner().invoke(app, [*command, str(path), "--edited"]).exit_code == 0
    plan.save(path)  # what was said once is not forgotten
    with pytest.raises(stretto.UsageError, match="the file was edited"):
        stretto.load_plan(path)
    assert stretto.load_plan(path, edited=True) == plan


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda job: job["parameters"][0].update(frozen=True), r"job \(all but stages\) is not"),
        (
            lambda job: job["constants"].append({"name": "c", "spec": "bool[1]", "data": [True]}),
            r"job \(all but stages\) is not",
        ),
        (lambda job: job.update(mean_over={"value": 2.0, "ops": []}), r"job \(all but stages\) is not"),
        (lambda job: job["stages"][0]["ops"]["W"][0][5].update(flops=1), r"stages\[0\]\.ops\.W is not"),
        (lambda job: job["stages"][0]["ops"]["REDUCE_GRAD"][0][5].update(flops=1), "REDUCE_GRAD is not"),
    ],
)
def test_all_that_says_what_is_computed_has_a_digest(plans: dict[str, Data], edit: Edit, place: str) -> None:
    data = copy.deepcopy(plans["chain"])
    edit(data["job"])
    with pytest.raises(stretto.UsageError, match=place):
        plan_from_text(json.dumps(data))


def test_orders_and_white_space_may_be_edited(plans: dict[str, Data]) -> None:
    data = copy.deepcopy(plans["chain"])
    data["windows"] = dict(reversed(data["windows"].items()))
    data["job"] = dict(reversed(data["job"].items()))
    data["orders"][0] = [*data["orders"][0][1:], data["orders"][0][0]]
    assert not plan_from_text(json.dumps(data, indent=7)).edited
    del data["digests"]
    with pytest.raises(stretto.UsageError, match="the key 'digests' is missing"):
        plan_from_text(json.dumps(data), edited=True)


def test_a_runner_proves_an_edited_plan(plans: dict[str, Data]) -> None:
    data = copy.deepcopy(plans["chain"])
    data["windows"]["0F"]["items"].pop()
    model, batch, *_ = MADE["chain"]()
    plan = plan_from_text(json.dumps({**data, "digests": {}}), edited=True)
    with pytest.raises(stretto.PlanError):
        run_threads(plan, lambda _: model, lambda runner: runner.step(batch))


# What is proved.


def first(data: Data) -> dict[str, Any]:
    found: dict[str, Any] = data["job"]["parameters"][0]
    return found


def setting(target: str, at: int, value: Any, *phases: str) -> Edit:
    """Another target (1) or other results (4) of an op."""
    return lambda data: op(data, target, *phases).__setitem__(at, value)


def given(target: str, at: int, value: Any, *phases: str) -> Edit:
    """Another argument of an op."""
    return lambda data: op(data, target, *phases)[2].__setitem__(at, value)


def emptied_part(data: Data) -> None:
    """Of a gradient that is a part of what a norm's backward makes."""
    next(p for p in data["job"]["parameters"] if p["name"] == "norms.1.bias")["grads"] = []


def strides(data: Data) -> None:
    data["job"]["edges"][0]["spec"] = data["job"]["edges"][0]["spec"] + "{1,4}"


def expanded(data: Data) -> None:
    found = op(data, "aten.mm.default", "W")
    found[4] = [f"{found[4][0]}{{0,1}}"]


def other_loss(data: Data) -> None:
    stage, value = data["job"]["loss"]
    ops = data["job"]["stages"][stage]["ops"]["F"]
    data["job"]["loss"][1] = next(op[2][0] for op in ops if op[0] == value).removeprefix("%")


def count_of_other_arguments(data: Data) -> None:
    op = next(op for op in data["job"]["count"]["ops"] if op[1] == "aten.sum.default")
    op[1] = "aten.sum.dim_IntList"


def norm_flag(data: Data) -> None:
    args = op(data, "aten.native_batch_norm_backward.default")[2]
    args[args.index(True)] = False


def statistics(data: Data) -> None:
    """The same flag of a forward that keeps no running statistics: its kernel dies."""
    found = next(op for op in ops_of(data, "F") if "batch_norm" in op[1])
    found[2][3:5] = [None, None]
    found[2][5] = False


def product(data: Data) -> list[Any]:
    """The last layer's, whose matrix is not square: of its bias, its input and its weight."""
    targets = "aten.addmm.default", "aten.mm.default"
    found: list[Any] = [op for op in data["job"]["stages"][0]["ops"]["F"] if op[1] in targets][-1]
    return found


def swap(data: Data) -> None:
    args = product(data)[2]
    args[-1], args[-2] = args[-2], args[-1]


def other_result(data: Data) -> None:
    next(op for op in ops_of(data, "W") if op[0] == "mm_3")[4] = ["float64[2,8]"]


def swapped_gradients(data: Data) -> None:
    named = {p["name"]: p for p in data["job"]["parameters"]}
    bias, weight = named["out.bias"], named["out.weight"]
    bias["grads"], weight["grads"] = weight["grads"], bias["grads"]


def other_part(data: Data) -> None:
    parts = [op for op in ops_of(data) if op[1] == "getitem"]
    first = next(one for one in parts if one[2][1] == 1)
    second = next(one for one in parts if one[2] == [first[2][0], 2])
    second[2][1] = 1


@pytest.mark.parametrize(
    ("name", "edit", "answer"),
    [
        ("chain", lambda data: first(data)["grads"].append(first(data)["grads"][0]), "names 0 W .* twice"),
        ("chain", lambda data: first(data)["grads"].clear(), "makes what no one uses"),
        ("chain", lambda data: first(data)["stages"].clear(), "does not have|is not given"),
        ("chain", lambda data: data["job"]["parameters"].append(copy.deepcopy(first(data))), "twice"),
        ("chain", strides, "carries .*, but"),
        ("chain", expanded, "but the plan says"),
        ("chain", lambda data: op(data, "aten.t.default")[5].pop("alias"), "view of param/.* it is none"),
        ("chain", setting("aten.tanh.default", 1, "aten.tanh_.default"), "no op of a program: it writes"),
        ("chain", lambda data: extra(op(data, "aten.tanh.default")).update(random=True), "does not draw"),
        ("chain", setting("aten.tanh.default", 1, "aten.rand_like.default"), "draws at random"),
        ("chain", other_loss, "a loss is one floating-point number"),
        ("chain", swap, "stage 0, .* cannot take"),
        ("chain", lambda data: product(data)[2].pop(), "stage 0, .* cannot take"),
        ("chain", other_result, r"gives float64\[8,8\], but the plan says float64\[2,8\]"),
        ("chain", setting("aten.tanh.default", 4, ["float32[4,8]"], "F"), r"gives float64\[4,8\], but"),
        ("chain", given("aten.sum.dim_IntList", 1, [7], "W"), "aten.sum.dim_IntList cannot take"),
        ("chain", swapped_gradients, r"is float64\[2\], but the gradient of 'out.weight'"),
        ("counted", count_of_other_arguments, "job.count, .* cannot take"),
        ("tensor parallel", given("comm.all_reduce", 1, "'max", "F"), "no highest element"),
        ("batch norm", emptied_part, "getitem makes what no one uses"),
        ("batch norm", norm_flag, "its 'train' is False, and there it was True"),
        ("batch norm", statistics, "normalizes by running statistics, and is given none"),
        ("batch norm", other_part, "takes part 1 of .*, as getitem_1 does"),
    ],
)
def test_what_is_proved_of_an_edited_plan(plans: dict[str, Data], name: str, edit: Edit, answer: str) -> None:
    data = copy.deepcopy(plans[name])
    edit(data)
    with pytest.raises((stretto.PlanError, stretto.UsageError), match=answer):
        stretto.verify(plan_from_text(json.dumps(data), edited=True))


def test_highest_elements_are_not_added_up(plans: dict[str, Data]) -> None:
    """The other way round: of what each rank has the highest of, the sum would be taken."""
    data = copy.deepcopy(plans["tensor parallel"])
    source = op(data, "comm.all_reduce", "F")[2][0].removeprefix("%")
    made = next(one for one in ops_of(data, "F") if one[0] == source)
    made[1:3] = ["aten.amax.default", [made[2][0], [0]]]
    answer = "; ".join(map(str, placement_faults(plan_from_text(json.dumps(data), edited=True))))
    assert f"adds up {source} over tp ranks, which is each rank's highest element. Reduce it by max" in answer


def test_a_fault_is_said_without_a_traceback(plans: dict[str, Data]) -> None:
    """PyTorch writes one into its log where a call does not fit."""
    data = copy.deepcopy(plans["chain"])
    found = op(data, "aten.mm.default", "W")
    found[2][0] = found[2][1]
    said: list[logging.LogRecord] = []
    log, handler = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(stretto.PlanError, match=r"aten\.mm\.default cannot take"):
            stretto.verify(plan_from_text(json.dumps(data), edited=True))
    finally:
        log.removeHandler(handler)
    assert not said


def test_sound_plans_have_no_fault_and_no_generator_is_drawn_from(plans: dict[str, Data]) -> None:
    before = torch.get_rng_state()
    for name in ("chain", "batch norm", "dropout"):
        plan = plan_from_text(json.dumps(plans[name]))
        assert shape_faults(plan) == []
    assert torch.equal(torch.get_rng_state(), before)


# Files are not programs.


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("aten.from_file.default", "its 'filename' is a text that names something outside of the program"),
        ("aten.relu_.default", "it writes into its arguments"),
        ("aten.add.out", "it writes into its arguments"),
        ("aten._assert_async.msg", "it makes no tensor"),
        ("aten._foreach_add_.Scalar", "it writes into its arguments"),
        ("_c10d_functional.all_reduce.default", "it communicates in a way of its own"),
        ("profiler._record_function_enter.default", "its 'name' is a text that names something outside"),
    ],
)
def test_only_functions_that_compute_are_ops(target: str, why: str) -> None:
    with pytest.raises(stretto.RunError, match=f"{target}' is no op of a plan: {why}"):
        resolve(target)


def test_ops_with_text_that_says_how_they_compute_stay() -> None:
    for target in (
        "aten.gelu.default",
        "aten.div.Tensor_mode",
        "aten.scatter_reduce.two",
        "aten.arange.default",
    ):
        assert callable(resolve(target))


def test_a_plan_writes_no_file(plans: dict[str, Data], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"1" * 4096)
    data = copy.deepcopy(plans["chain"])
    found = op(data, "aten.tanh.default")
    found[1], found[2] = "aten.from_file.default", [f"'{victim}", True, 512]
    found[3] = [["dtype", "@dtype:float64"]]
    data["digests"] = {}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    answer = CliRunner().invoke(app, ["rehearse", str(path), "--rank", "0", "--edited"])
    assert isinstance(answer.exception, stretto.PlanError)
    assert "aten.from_file.default, which is no op of a program" in str(answer.exception)
    assert victim.read_bytes() == b"1" * 4096


@pytest.mark.parametrize(
    ("edit", "answer"),
    [
        (lambda job: job.update(axes=[["dp", 10**9]]), "ranks; at most 1,048,576 are planned for"),
        (
            lambda job: job.update(axes=[["dp", 2**15], ["tp", 2**15]]),
            "ranks; at most 1,048,576 are planned for",
        ),
        (lambda job: job["parameters"][0].update(spec="load[2,2]"), "there is no dtype 'load'; known are"),
        (lambda job: job["parameters"][0].update(spec="float64[8,8]{1}"), "2 dims have 1 strides"),
        (
            lambda job: job["stages"][0]["ops"]["F"][0][2].append("@dtype:load"),
            "'@dtype:load' is no constant of a program: those of dtype are float64",
        ),
        (
            lambda job: job["stages"][0]["ops"]["F"][0][2].append("@hub:load"),
            "'@hub:load' is no constant of a program: write one of dtype, device",
        ),
    ],
)
def test_what_is_bounded_where_a_plan_is_read(plans: dict[str, Data], edit: Edit, answer: str) -> None:
    data = copy.deepcopy(plans["chain"])
    edit(data["job"])
    with pytest.raises(stretto.UsageError, match=answer):
        plan_from_text(json.dumps(data), edited=True)


# All kinds of edits, at random.


@pytest.mark.slow
def test_ops_that_moved_behind_what_reads_them() -> None:
    """I reads what W makes, and W what I makes: no order of programs reaches the gradient."""
    for found in outcomes("gpt", [671]):
        assert found["what"] == "slice_8 moves from I to W"
        assert "needs what a later program makes of it. Put each op behind what it reads" in found["why"]


def test_some_random_edits_are_refused_or_the_same_step() -> None:
    """In this process: a kernel that dies would end it."""
    case = case_of("tensor parallel")
    check([outcome(case, seed) for seed in range(len(EDITS))])


@pytest.mark.slow
def test_some_random_edits_of_norms_are_refused_or_the_same_step() -> None:
    check(list(outcomes("batch norm", list(range(len(EDITS))))))


def check(found: list[dict[str, str]]) -> None:
    wrongs = [one for one in found if wrong(one)]
    assert not wrongs, "\n".join(map(str, wrongs))
    assert {one["default"] for one in found} <= {"refused", "same", "none"}
    assert sum(one["declared"] in ("refused", "stopped") for one in found) > len(EDITS) // 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_edits_of_many_plans() -> None:
    assert main(2200) == 0
