"""What is repeated, how often, where it stands, and what is left as it was."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from statistics import mean

import pytest

from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.ir.action import Phase
from stretto.ir.costs import Costs, Link
from stretto.ir.flow import PHASES
from stretto.ir.prices import signature, specs_of
from stretto.ir.program import Edge, Job, Op, Parameter, Ref, Stage, TensorSpec
from stretto.ir.serialize import CODEC
from stretto.passes.recompute import Blocks, forget, is_repeated, numbered, repeat
from stretto.passes.recompute_choice import recompute
from stretto.planning.costs import listed
from stretto.planning.schedules import choose_schedule
from tests.passes.test_recompute_numbers import changed, job_of
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


def test_what_is_kept_is_where_repeating_begins() -> None:
    job = stage_of(FORWARD, (op("e", "tangent", "c"),))
    made = repeat(job, {0: ["c"]})
    assert names(made, Phase.I) == ["c_again", "e"]
    assert made.stages[0].ops[Phase.I][0].uses == ("b",), "b is kept now"


def test_what_both_need_is_computed_once() -> None:
    job = stage_of(FORWARD, (op("e", "tangent", "b"),), (op("g", "e", "b"), op("h", "e", "c")))
    made = repeat(job, {0: ["a", "b", "c"]})
    assert names(made, Phase.I) == ["a_again", "b_again", "e"]
    assert names(made, Phase.W) == ["g", "c_again", "h"], "what W alone needs stands there"
    assert made.stages[0].ops[Phase.W][0].uses == ("e", "b_again")


def test_a_small_result_is_kept_to_the_weight_gradient_instead_of_its_large_source() -> None:
    forward = (op("a", "batch/x"), op("sum", "a", spec=SMALL), op("loss", "a"))
    job = stage_of(forward, (op("e", "tangent", "a"),), (op("h", "e", "sum", spec=SMALL),))
    made = repeat(job, {0: ["a", "sum"]})
    assert names(made, Phase.I) == ["a_again", "sum_again", "e"]
    assert names(made, Phase.W) == ["h"]


def test_a_chain_that_begins_at_the_batch_stands_in_the_weight_gradient() -> None:
    """Its large middle is not kept for anyone."""
    forward = (op("a", "batch/x"), op("sum", "a", spec=SMALL), op("loss", "sum", spec=SMALL))
    job = stage_of(forward, (op("e", "tangent"),), (op("h", "e", "sum", spec=SMALL),))
    made = repeat(job, {0: ["a", "sum"]})
    assert names(made, Phase.I) == ["e"]
    assert names(made, Phase.W) == ["a_again", "sum_again", "h"]


def test_a_view_goes_with_its_storage_and_a_part_with_its_tuple() -> None:
    two = Op("two", "aten.native_dropout.default", (Ref("a"), 0.5, True), (), (LARGE, SMALL), None, True)
    forward = (
        op("a", "batch/x"),
        op("v", "a", alias="a"),
        two,
        Op("first", "getitem", (Ref("two"), 0), (), (LARGE,)),
        Op("second", "getitem", (Ref("two"), 1), (), (SMALL,)),
        op("loss", "first"),
    )
    job = stage_of(forward, (op("e", "v", "first", "second", alias="a"),))
    made = repeat(job, {0: ["a"]})
    assert names(made, Phase.I) == ["a_again", "v_again", "e"]
    assert [o.alias for o in made.stages[0].ops[Phase.I]] == [None, "a_again", "a_again"]
    made = repeat(job, {0: ["first"]})
    assert names(made, Phase.I) == ["two_again", "first_again", "e"]
    assert made.stages[0].ops[Phase.I][-1].uses == ("v", "first_again", "second"), "the other part is kept"
    assert made.stages[0].ops[Phase.I][0].random


def test_views_of_what_is_given_are_kept() -> None:
    forward = (op("t", "param/w", alias="param/w"), op("a", "t"), op("loss", "a"))
    job = stage_of(forward, (op("e", "t", "a"),))
    assert names(repeat(job, {0: ["t", "a"]}), Phase.I) == ["a_again", "e"]


def test_an_unknown_op_is_told() -> None:
    with pytest.raises(ValueError, match="the stage's forward has no nothing"):
        repeat(stage_of(FORWARD, ()), {0: ["nothing"]})


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
    costs = made_up_costs(job)
    made = changed(job, "1f1b", "full")
    found = listed(job, costs).costs_of(made)
    specs, alike = specs_of(job), defaultdict(list)
    for op in (op for ops in job.stages[0].ops.values() for op in ops):
        alike[signature(op, specs)].append(costs.op_us[0, op.name])
    again = [op for ops in made.stages[0].ops.values() for op in ops if is_repeated(op)]
    first = {op.name: op for op in job.stages[0].ops[Phase.F]}
    for op in again:
        like = mean(alike[signature(first[op.repeats], specs)])
        assert found.op_us[0, op.name] == pytest.approx(like, abs=1e-3)
    assert again
    assert found.op_us.items() >= costs.op_us.items(), "and all others keep their times"
    assert listed(made, found).costs_of(forget(made)) == costs


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
    for block in range(3):
        for linear in ("attention.qkv", "attention.out", "mlp.up", "mlp.down"):
            module = f"blocks.{block}.{linear}"
            assert (linears(job, module), linears(full, module)) == (1, 2), module
    assert linears(full, "head") == 1, "no block: it is kept"


def test_a_result_that_no_gradient_reads_is_not_computed_again() -> None:
    """Without dropout the residual stream goes on without the last matrix: the next block's input is kept."""
    full = changed(job_of("llama", "pp"), "1f1b", "full")
    for block in range(2):
        layer = f"model.layers.{block}"
        runs = {name: linears(full, f"{layer}.{name}") for name in ("self_attn.o_proj", "mlp.down_proj")}
        assert runs == {"self_attn.o_proj": 2, "mlp.down_proj": 1}


def test_collectives_of_the_repeated_part_are_started_and_waited_for_again() -> None:
    job = job_of("dropping", "tp sp")
    full = changed(job, "1f1b", "full")
    again = Counter(o.target for ops in full.stages[0].ops.values() for o in ops if o.repeats)
    # Two gathers and two scatters a layer: dropout's mask behind the last scatter needs all of them.
    assert again["comm.all_gather"] == again["comm.reduce_scatter"] == 6
    assert again["comm.wait"] == 12


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
    made = recompute(job, "selective", costs, choose_schedule(job, schedule="1f1b"), lambda _: [0])
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


def test_a_received_value_is_kept() -> None:
    second = Stage(1, {Phase.F: (op("b", "a"), op("loss", "b")), Phase.I: (op("e", "b"),), Phase.W: ()})
    job = stage_of((op("a", "batch/x"),), ())
    edge = Edge(0, "a", 0, Phase.F, 1, Phase.F, LARGE)
    job = replace(job, stages=(job.stages[0], second), edges=(edge,), loss=(1, "loss"))
    made = repeat(job, {1: ["b"]})
    assert [o.uses for o in made.stages[1].ops[Phase.I]] == [("a",), ("b_again",)]
    assert made.edges == job.edges


def test_a_repeated_op_is_written_and_read() -> None:
    again = op("a_again", "batch/x", repeats="a", random=True)
    form = CODEC.form(Op)
    assert form.read(form.write(again)) == again


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(UsageError, match="'half' is neither 'none', 'selective', 'full', 'gathers'"):
        Parallel(recompute="half")
    with pytest.raises(UsageError, match="number of bytes"):
        Parallel(recompute=0)
    with pytest.raises(
        UsageError, match="recompute = 'some': give 'none', 'selective', 'full', 'gathers' or a number"
    ):
        changed(job_of("dropping", "one rank"), "1f1b", "some")
