"""What is repeated, how often, where it is, and what is left as it was."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import mean

import pytest

from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.ir.action import Phase
from stretto.ir.costs import Costs, Link
from stretto.ir.flow import PHASES, inputs_of
from stretto.ir.prices import signature, specs_of
from stretto.ir.program import Job, Op, Parameter, Ref, Stage, TensorSpec
from stretto.passes.recompute import Blocks, forget, is_repeated, numbered, repeat
from stretto.passes.recompute_choice import recompute
from stretto.planning.make_plan import listed
from stretto.planning.schedules import choose_schedule
from tests.passes.test_recompute_numbers import DROPPING, changed, job_of
from tests.runtime.equality import made_up_costs

LARGE, SMALL = TensorSpec((8, 16), "float32"), TensorSpec((8,), "float32")


def op(name: str, *uses: str, spec: TensorSpec = LARGE, **more: object) -> Op:
    return Op(name, "aten.relu.default", tuple(map(Ref, uses)), (), (spec,), **more)  # type: ignore[arg-type]


def stage_of(forward: tuple[Op, ...], into: tuple[Op, ...], weight: tuple[Op, ...] = ()) -> Job:
    """A job of one stage whose ops need not make sense."""
    stage = Stage(0, {Phase.F: forward, Phase.I: into, Phase.W: weight})
    parameter = Parameter("w", LARGE, (0,), (), "w")
    batch = (("x", LARGE),)
    return Job("made", 1, (stage,), (), (parameter,), (), (), batch, (0, forward[-1].name))


def names(job: Job, phase: Phase) -> list[str]:
    return [op.name for op in job.stages[0].ops[phase]]


FORWARD = (op("a", "batch/x"), op("b", "a"), op("c", "b"), op("loss", "c"))


def test_only_what_is_needed_is_repeated_and_before_its_first_use() -> None:
    job = stage_of(FORWARD, (op("d", "tangent"), op("e", "d", "b")))
    made = repeat(job, {0: ["a", "b", "c"]})
    assert names(made, Phase.I) == ["d", "a_again", "b_again", "e"]
    again = made.stages[0].ops[Phase.I][2]
    assert (again.uses, again.repeats) == (("a_again",), "b")
    assert made.stages[0].ops[Phase.I][3].uses == ("d", "b_again")
    assert made.stages[0].ops[Phase.F] == FORWARD


def test_what_both_need_is_computed_once() -> None:
    job = stage_of(FORWARD, (op("e", "tangent", "b"),), (op("g", "e", "b"), op("h", "e", "c")))
    made = repeat(job, {0: ["a", "b", "c"]})
    assert names(made, Phase.I) == ["a_again", "b_again", "e"]
    assert names(made, Phase.W) == ["g", "c_again", "h"], "what W alone needs is there"
    assert made.stages[0].ops[Phase.W][0].uses == ("e", "b_again")


@pytest.mark.parametrize("choice", ["full", "selective"])
@pytest.mark.parametrize("layout", ["one rank", "pp tp sp"])
def test_forgetting_gives_the_job_back(layout: str, choice: str) -> None:
    job = replace(job_of("dropping", layout), recompute=choice)
    made = changed(job, "1f1b", choice)
    assert made != job
    assert forget(made) == job
    assert changed(made, "1f1b", choice) == made, "a job that is planned again is not changed twice"


def test_what_is_repeated_is_priced_as_ops_like_it() -> None:
    job = job_of("dropping", "one rank")
    costs, specs = made_up_costs(job), specs_of(job)
    made = changed(job, "1f1b", "full")
    priced = listed(job, costs).costs_of(made).op_us
    alike, signatures = defaultdict(list), {}
    for one in (one for ops in job.stages[0].ops.values() for one in ops):
        signatures[one.name] = signature(one, specs)
        alike[signatures[one.name]].append(costs.op_us[0, one.name])
    again = [one for ops in made.stages[0].ops.values() for one in ops if is_repeated(one)]
    for one in again:
        assert priced[0, one.name] == pytest.approx(mean(alike[signatures[one.repeats]]), abs=1e-3)
    assert again
    assert priced.items() >= costs.op_us.items(), "and all others keep their times"


def linears(job: Job, module: str) -> int:
    """Forward products of a linear layer, in all phases."""
    found = [op for stage in job.stages for phase in PHASES for op in stage.ops[phase]]
    forward = {op.name for stage in job.stages for op in stage.ops[Phase.F]}
    return sum(
        op.module == module and op.target == "aten.mm.default" and (op.name in forward or is_repeated(op))
        for op in found
    )


@pytest.mark.parametrize("layout", ["one rank", "pp", "tp", "tp sp"])
def test_a_linear_layers_forward_runs_twice_and_no_more(layout: str) -> None:
    """Of all linear layers of all blocks; dropout's mask needs even the last one's result."""
    job = job_of("dropping", layout)
    full = changed(job, "1f1b", "full")
    for block in range(DROPPING.layers):
        for linear in ("attention.qkv", "attention.out", "mlp.up", "mlp.down"):
            module = f"blocks.{block}.{linear}"
            assert (linears(job, module), linears(full, module)) == (1, 2), module
    assert linears(full, "head") == 1, "no block: it is kept"


@pytest.mark.parametrize("layout", ["one rank", "tp sp"])
def test_selective_repeats_neither_products_with_weights_nor_collectives(layout: str) -> None:
    job = job_of("dropping", layout)
    costs = made_up_costs(job)
    made = changed(job, "1f1b", "selective")
    again = [op for ops in made.stages[0].ops.values() for op in ops if op.repeats]
    assert again
    assert not [op for op in again if op.target == "aten.mm.default" or op.target.startswith("comm.")]
    spent = sum(costs.op_us[0, op.repeats] for op in again)
    assert spent <= 0.06 * sum(costs.op_us.values()), "about a twentieth of the step; views are not counted"


def test_the_best_bytes_for_the_time_come_first() -> None:
    """Of two storages that a block keeps, the one that takes longer is kept on; what leaves it is too."""
    forward = (
        op("a", "batch/x", module="h.0"),
        op("cheap", "a", module="h.0"),
        op("dear", "a", module="h.0"),
        op("out", "cheap", "dear", module="h.0"),
        op("loss", "out", module="h.1"),
    )
    padding = tuple(op(f"p{k}", "tangent") for k in range(4))
    job = stage_of(forward, (op("e", "tangent", "cheap", "dear", "out"),), padding)
    times = {"cheap": 4.0, "dear": 30.0, "a": 1.0}
    op_us = {(0, o.name): times.get(o.name, 10.0) for ops in job.stages[0].ops.values() for o in ops}
    costs = Costs(op_us, {}, Link(1.0, 1.0), 0.0, "made up")
    made = recompute(job, "selective", costs, choose_schedule(job, schedule="1f1b"), lambda *_: [0])
    assert [o.repeats for o in made.stages[0].ops[Phase.I] if o.repeats] == ["a", "cheap"]


def test_blocks_are_the_members_of_lists() -> None:
    assert numbered("model.layers.3.experts.1.up") == ["model.layers.3", "model.layers.3.experts.1"]
    assert numbered("h2o.norm") == []
    wrapped = stage_of(
        (op("a", module="0.blocks.0.up"), op("b", module="0.blocks.1"), op("c", module="0")), ()
    )
    found = Blocks(wrapped)
    assert [found.of(o) for o in wrapped.stages[0].ops[Phase.F]] == ["0.blocks.0", "0.blocks.1", ""]
    single = stage_of((op("a", module="blocks.0.up"), op("b", module="head")), ())
    assert [Blocks(single).of(o) for o in single.stages[0].ops[Phase.F]] == ["blocks.0", ""]
    plain = stage_of((op("a", module="up"), op("b", module="down")), ())
    assert {Blocks(plain).of(o) for o in plain.stages[0].ops[Phase.F]} == {"stage"}, "one block a stage"


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(UsageError, match="'half': input should be 'none', 'selective', 'full' or 'gathers'"):
        Parallel(recompute="half")
    with pytest.raises(UsageError, match="input should be greater than 0"):
        Parallel(recompute=0)
    with pytest.raises(
        UsageError, match="recompute = 'some': give 'none', 'selective', 'full', 'gathers' or a number"
    ):
        changed(job_of("dropping", "one rank"), "1f1b", "some")


def kept_bytes(job: Job) -> int:
    """Of storages that the forward keeps for the backward."""
    total = 0
    for stage in job.stages:
        made = {op.name: op for op in stage.ops[Phase.F]}
        read = {name for phase in (Phase.I, Phase.W) for name in inputs_of(stage, phase) if name in made}
        owners = {made[name].alias or name for name in read}
        total += sum(made[name].nbytes for name in owners if name in made)
    return total


def test_sequences_are_gathered_again_so_that_slices_are_kept() -> None:
    job = job_of("dropping", "tp sp")
    again = changed(job, "1f1b", "gathers")
    largest = max(op.nbytes for op in job.stages[0].ops[Phase.F] if op.target == "comm.all_gather")

    def all_gathers(one: Job, phase: Phase) -> int:
        ops = one.stages[0].ops[phase]
        return sum(op.target == "comm.all_gather" and op.nbytes == largest for op in ops)

    forward = all_gathers(job, Phase.F)
    more = [all_gathers(again, phase) - all_gathers(job, phase) for phase in (Phase.I, Phase.W)]
    assert sum(more) == forward > more[1] - 1 >= forward - 2, "a weight's gradient alone needs most of them"
    assert kept_bytes(job) - kept_bytes(again) >= 0.5 * forward * largest - 1
    plain = job_of("dropping", "tp")
    assert changed(plain, "1f1b", "gathers").stages == plain.stages
