"""One rank keeps a parameter in full: optimizers that look at full matrices train as on the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.ir.action import AFTER, BEFORE
from stretto.ir.kept import bucket_pieces, kept_spec, part_count
from stretto.ir.parameters import BucketSlot, Parameter, TensorSpec
from stretto.ir.plan import Plan
from stretto.ir.program import Op, Stage
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.passes.flat import CAT, VIEWS
from stretto.passes.owners import with_owners
from stretto.runtime import run_threads
from stretto.verifying import plan_faults
from tests.clusters import cores
from tests.parallelize.zero import (
    Orthogonal,
    ZeroCell,
    assert_same_parameters,
    optimizer_of,
    plain_training,
    training,
    worst_error,
)
from tests.synthetic import make_job

ALL = ("*",)
CELLS = [
    ZeroCell(1, owners=ALL, pp=2, tied=True, frozen=True, clipped=True),
    ZeroCell(1, owners=ALL, updates=True, clipped=True, experts=6),
    ZeroCell(1, owners=ALL, updates=True, clipped=True, frozen_later=True),
]
SLOW = [
    ZeroCell(1, owners=ALL, dp_shard=2, ep=2),
    ZeroCell(1, owners=ALL, pp=2, schedule="zb-v", dp_shard=2, clipped=True),
    ZeroCell(1, owners=ALL, cp_kind="ring", ep=2, tied=True, clipped=True),
    ZeroCell(1, owners=ALL, pp=2, schedule="interleaved-1f1b", updates=True, clipped=True, tied=True),
    ZeroCell(1, owners=ALL, recompute="full", frozen=True),
    ZeroCell(1, owners=("blocks.*",), ep=2, updates=True),
]


@pytest.mark.parametrize("cell", [*CELLS, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)], ids=str)
def test_full_matrices_train_to_what_the_plain_model_trains_to(cell: ZeroCell) -> None:
    """The optimizer is refused where one rank's matrix is not full; what is in rows it does not get."""
    if cell.owners != ALL:
        with pytest.raises(UsageError, match="looks at a full tensor"):
            training(cell, cell.plan())
        return
    plan = cell.plan()
    assert plan_faults(plan) == []
    error, name = worst_error(training(cell, plan), plain_training(cell))
    assert error < 1e-10, name


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(ZeroCell(1, precision="bf16", dp_shard=2, clipped=True), marks=pytest.mark.slow),
        pytest.param(ZeroCell(1, precision="bf16", pp=2, tied=True, frozen=True), marks=pytest.mark.slow),
        pytest.param(ZeroCell(1, tp=2, ep=2, updates=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adamw_makes_the_same_bits_of_rows(cell: ZeroCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element is summed and updated as in rows."""
    monkeypatch.setattr("tests.parallelize.zero._trainer", lambda _: optimizer_of)
    owned = replace(cell, owners=ALL)
    if not cell.clipped:
        assert_same_parameters(training(owned, owned.plan()), training(cell, cell.plan()))
        return
    error, name = worst_error(training(owned, owned.plan()), training(cell, cell.plan()))
    assert error < 1e-5, name  # the norm is summed of other parts


def gpt(vocabulary: int = 61, hidden: int = 32, layers: int = 2) -> GPT:
    return GPT(GPTConfig(vocab_size=vocabulary, layers=layers, hidden=hidden, heads=4, context=8), seed=3)


def rows(step: int, many: int = 12) -> Tensor:
    return torch.randint(0, 61, (many, 9), generator=torch.Generator().manual_seed(step))


@cache
def plan_of(precision: str = "float32", **parallel: Any) -> Plan:
    model = gpt().double() if precision == "float32" else gpt()
    how = Parallel(**parallel)
    job = capture(model, rows(0), next_token_loss, how, precision=precision)  # type: ignore[arg-type]
    return stretto.plan(job, cores(), order="list")


Named = Iterable[tuple[str, nn.Parameter]]
Optimizers = Sequence[torch.optim.Optimizer]


def of_both(matrices: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[Named], Optimizers]:
    """One for the matrices of blocks, and AdamW for the others, as Muon's authors have it."""

    def make(named: Named) -> Optimizers:
        inside = dict(named)
        some = [p for name, p in inside.items() if name.startswith("blocks.") and p.dim() == 2]
        rest = [p for p in inside.values() if all(p is not one for one in some)]
        return [*([matrices(some)] if some else ()), torch.optim.AdamW(rest, lr=0.01)]

    return make


OPTIMIZERS: dict[str, Callable[[Named], Optimizers]] = {
    "muon": of_both(lambda some: torch.optim.Muon(some, lr=0.02)),
    "orthogonal": of_both(lambda some: Orthogonal(some, lr=0.02)),
    "adafactor": lambda named: [torch.optim.Adafactor([p for _, p in named], lr=0.02)],
}


def steps(optimizers: Optimizers, step: Callable[[int], object], which: Iterable[int] = range(3)) -> None:
    for at in which:
        step(at)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@cache
def plain(kind: str, count: int = 3) -> dict[str, Tensor]:
    own = gpt().double()
    steps(
        OPTIMIZERS[kind](own.named_parameters()),
        lambda at: next_token_loss(own, rows(at)).backward(),
        range(count),
    )
    return own.state_dict()


def trained(plan: Plan, kind: str) -> list[dict[str, Tensor]]:
    """What each rank has after three steps."""

    def work(runner: stretto.Runner) -> dict[str, Tensor]:
        steps(OPTIMIZERS[kind](list(runner.named_parameters())), lambda at: runner.step(rows(at)))
        return runner.state_dict()

    return run_threads(plan, lambda _: gpt().double(), work)


def error_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).norm() / value.norm()) for name, value in expected.items())


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("muon", {"dp": 2}),
        ("adafactor", {"dp": 3}),
        *(
            pytest.param(kind, layout, marks=pytest.mark.slow)
            for kind in OPTIMIZERS
            for layout in (
                {"dp": 3, "pp": 2, "microbatches": 2},
                {"dp": 4},
                {"dp": 2, "cp": 2},
                {"dp": 4, "dp_shard": 2},
            )
        ),
    ],
    ids=str,
)
def test_optimizers_of_pytorch_train_as_on_the_plain_model(kind: str, layout: dict[str, Any]) -> None:
    """Muon's iteration is in bfloat16: gradients that differ by rounding may be rounded otherwise there."""
    tolerance = 1e-10 if kind == "orthogonal" else 1e-6 if kind == "adafactor" else 1e-4
    plan = plan_of(zero=1, owners=ALL, **layout)
    for found in trained(plan, kind):
        assert error_of(found, plain(kind)) < tolerance


def test_each_matrix_is_on_one_rank_and_the_others_have_none_of_it() -> None:
    plan = plan_of(dp=3, zero=1, owners=ALL)
    full = dict(gpt().named_parameters())

    def work(runner: stretto.Runner) -> dict[str, tuple[int, ...]]:
        runner.step(rows(0))
        for name, p in runner.named_parameters():
            assert (p.grad is None) == (p.numel() == 0), name
            assert p.grad is None or p.grad.shape == p.shape == full[name].shape, name
        return {name: tuple(p.shape) for name, p in runner.named_parameters()}

    found = run_threads(plan, lambda _: gpt().double(), work)
    for name, value in full.items():
        owners = [shapes[name] for shapes in found if shapes[name] == tuple(value.shape)]
        assert len(owners) == 1, name
        assert all(shapes[name] in (tuple(value.shape), (0, *value.shape[1:])) for shapes in found)
    elements = [sum(torch.Size(shape).numel() for shape in shapes.values()) for shapes in found]
    assert max(elements) <= 1.1 * sum(elements) / len(found)


def test_without_owners_they_are_refused_and_told_of_them() -> None:
    with pytest.raises(UsageError, match="zero = 1 with owners"):
        trained(plan_of(dp=2, zero=1), "muon")


@pytest.mark.slow
def test_a_part_that_tensor_parallelism_leaves_is_no_full_matrix() -> None:
    """What updates each element trains on, what looks at full matrices is refused."""
    plan = plan_of(dp=2, tp=2, zero=1, owners=ALL)
    assert plan_faults(plan) == []
    with pytest.raises(UsageError, match="tp = ep = 1"):
        trained(plan, "muon")
    own = gpt().double()

    def work(runner: stretto.Runner) -> dict[str, Tensor]:
        steps([torch.optim.AdamW(runner.parameters(), lr=0.01)], lambda at: runner.step(rows(at)))
        return runner.state_dict()

    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    steps([optimizer], lambda at: next_token_loss(own, rows(at)).backward())
    for found in run_threads(plan, lambda _: gpt().double(), work):
        assert error_of(found, own.state_dict()) < 1e-10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero": 3}, "zero = 1"),
        ({"zero": "auto"}, "zero = 1"),
        ({"zero": 0}, "zero = 1"),
    ],
)
def test_owners_are_of_zero_1(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Parallel(dp=2, owners=["*"], **given)


def test_a_pattern_that_fits_no_parameter_is_refused() -> None:
    with pytest.raises(UsageError, match=r"owners names 'block\.\*'.*'embedding.weight'"):
        capture(gpt(), rows(0), next_token_loss, Parallel(dp=2, zero=1, owners=["block.*"]))


# --- the deal -------------------------------------------------------------------------------------------


def dealt(shapes: Sequence[tuple[int, ...]], dp: int) -> dict[str, BucketSlot]:
    """Parameters of one stage, on so many ranks."""
    job = replace(make_job(1, 1), axes=(("dp", dp),), zero=1)
    some = [
        Parameter(f"p{at}", TensorSpec(shape, "float32"), (0,), (), f"p{at}", kept=("dp",))
        for at, shape in enumerate(shapes)
    ]
    job = with_owners(replace(job, parameters=tuple(some)), ALL)
    for name in {p.kept_as for p in job.parameters}:
        pieces = bucket_pieces(job, name)
        slot = next(p.slot for p in job.parameters if p.name == name)
        assert slot is not None
        assert sum(numel for _, numel in pieces) == slot.length * dp
    for p in job.parameters:
        assert p.slot is not None
        sizes = [kept_spec(job, p, number).numel for number in range(part_count(job, p))]
        assert sizes == [p.spec.numel if part == p.slot.part else 0 for part in range(dp)]
    return {p.name: p.slot for p in job.parameters if p.slot is not None}


BLOCK = [(3 * 512, 512), (512, 512), (4 * 512, 512), (512, 4 * 512)]


@pytest.mark.parametrize(("dp", "blocks"), [(2, 12), (4, 12), (8, 24), (16, 32)])
def test_equal_blocks_are_dealt_evenly(dp: int, blocks: int) -> None:
    """Rows are full to 5 %, and buckets are several, so that what one leaves open the next may hide."""
    slots = dealt(BLOCK * blocks, dp)
    lengths = {slot.bucket: slot.length for slot in slots.values()}
    elements = sum(torch.Size(shape).numel() for shape in BLOCK) * blocks
    assert sum(lengths.values()) * dp <= 1.05 * elements
    assert len(lengths) > 1


def test_the_largest_goes_to_who_has_least_and_places_are_aligned() -> None:
    slots = dealt([(3, 3), (40, 10), (20, 10), (5,), (19, 10)], 2)
    assert {slot.bucket for slot in slots.values()} == {"p1"}
    assert (slots["p1"].part, slots["p2"].part, slots["p4"].part) == (0, 1, 1)
    assert all(slot.first % 16 == 0 for slot in slots.values())
    assert slots == dealt([(3, 3), (40, 10), (20, 10), (5,), (19, 10)], 2)


@pytest.mark.parametrize(
    "layout", [{"dp": 4}, pytest.param({"dp": 2, "pp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_ranks_need_what_the_textbook_says(layout: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of n parameters that a rank computes with, and k that share them: what is computed with and n / k of
    the model's own values, 2 n / k of averages, gradients in full until they are scattered."""
    monkeypatch.setattr("stretto.passes.flat.LARGE_BYTES", 2**15)
    model = gpt(130, 128, 4)
    batch = rows(0, 4 * layout["dp"])
    parallel = Parallel(zero=1, owners=["*"], microbatches=2, **layout)
    plan = stretto.plan(capture(model, batch, next_token_loss, parallel), cores(), order="list")
    assert plan.prediction is not None
    for rank in range(plan.ranks):
        stages = set(plan.schedule.stages_of(rank))
        count = 4 * sum(p.spec.numel for p in plan.job.parameters if stages & {*p.stages})
        expected = {"parameters": 1 + 1 / layout["dp"], "gradients": 1, "optimizer": 2 / layout["dp"]}
        for part, share in expected.items():
            assert plan.prediction.memory[part][rank] == pytest.approx(share * count, rel=0.08), part

    def work(runner: stretto.Runner) -> tuple[int, ...]:
        optimizer = torch.optim.AdamW(runner.parameters())
        runner.step(batch)
        optimizer.step()
        return runner.timeline().peak_bytes

    for measured in run_threads(plan, lambda _: copy.deepcopy(model), work):
        assert measured == pytest.approx(plan.prediction.peak_bytes, rel=0.05)


# --- saved and loaded -----------------------------------------------------------------------------------


def half(plan: Plan, kind: str, folder: Path, which: Iterable[int], load: bool) -> list[dict[str, Tensor]]:
    """Steps from or to a checkpoint."""

    def work(runner: stretto.Runner) -> dict[str, Tensor]:
        optimizers = OPTIMIZERS[kind](list(runner.named_parameters()))
        for at, optimizer in enumerate(optimizers) if load else ():
            stretto.load(folder / str(at), runner, optimizer)
        steps(optimizers, lambda at: runner.step(rows(at)), which)
        for at, optimizer in enumerate(optimizers) if not load else ():
            stretto.save(folder / str(at), runner, optimizer)
        return runner.state_dict()

    return run_threads(plan, lambda _: gpt().double(), work)


OWNED = {"dp": 2, "zero": 1, "owners": ALL}


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("orthogonal", OWNED, {}),
        pytest.param("orthogonal", {}, {**OWNED, "dp": 3}, marks=pytest.mark.slow),
        pytest.param("adafactor", OWNED, {}, marks=pytest.mark.slow),
        pytest.param("adafactor", {**OWNED, "dp": 3}, OWNED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_goes_on_under_another_layout(tmp_path: Path, kind: str, one: Any, other: Any) -> None:
    half(plan_of(**one), kind, tmp_path, range(2), load=False)
    tolerance = 1e-10 if kind == "orthogonal" else 1e-6
    for found in half(plan_of(**other), kind, tmp_path, range(2, 3), load=True):
        assert error_of(found, plain(kind)) < tolerance


@pytest.mark.slow
def test_rows_read_what_owners_have_saved(tmp_path: Path) -> None:
    """And the other way round, with an optimizer that works on both."""
    OPTIMIZERS["adamw"] = lambda named: [torch.optim.AdamW([p for _, p in named], lr=0.01)]
    rows_of_3 = {"dp": 3, "zero": 2}
    for one, other in ((OWNED, rows_of_3), (rows_of_3, OWNED)):
        folder = tmp_path / str(one["dp"])
        half(plan_of(**one), "adamw", folder, range(2), load=False)  # type: ignore[arg-type]
        for found in half(plan_of(**other), "adamw", folder, range(2, 3), load=True):  # type: ignore[arg-type]
            assert error_of(found, plain("adamw")) < 1e-10


# --- proofs ---------------------------------------------------------------------------------------------


def changed(plan: Plan, target: str, change: Callable[[Op], Op]) -> Plan:
    """The plan with a change to the first op of its programs that run once a step that calls this, of several
    tensors."""
    stages = list(plan.job.stages)
    for at, stage in enumerate(stages):
        for phase in (BEFORE, AFTER):
            ops = list(stage.ops.get(phase, ()))
            found = [
                k for k, op in enumerate(ops) if op.target == target and len(op.args[target == VIEWS]) > 2
            ]
            if found:
                ops[found[0]] = change(ops[found[0]])
                assert ops[found[0]] != stage.ops[phase][found[0]]
                stages[at] = Stage(stage.index, {**stage.ops, phase: tuple(ops)})
                return replace(plan, job=replace(plan.job, stages=tuple(stages)))
    raise AssertionError("no such op")


def swapped(op: Op) -> Op:
    """Two sources of a flat tensor change places."""
    [first, second, *rest], *more = op.args
    return replace(op, args=((second, first, *rest), *more))


def shifted(op: Op) -> Op:
    """A cut is elsewhere; sizes fit each other."""
    source, sizes, dim = op.args
    numbers = (sizes[0] + 16, sizes[1] - 16, *sizes[2:])
    outputs = tuple(
        TensorSpec((1, n), spec.dtype)
        for n, spec in zip(numbers, op.outputs, strict=True)
        if spec is not None
    )
    return replace(op, args=(source, numbers, dim), outputs=outputs)


def slots(plan: Plan, change: Callable[[BucketSlot], BucketSlot], which: int = 0) -> Plan:
    parameters = list(plan.job.parameters)
    slot = parameters[which].slot
    assert slot is not None
    parameters[which] = replace(parameters[which], slot=change(slot))
    return replace(plan, job=replace(plan.job, parameters=tuple(parameters)))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda plan: changed(plan, CAT, swapped), "elsewhere than the parameters of bucket"),
        (lambda plan: changed(plan, VIEWS, shifted), "elsewhere than its parameters lie|size|shape"),
        (lambda plan: slots(plan, lambda slot: replace(slot, part=2)), "there are 2 parts"),
        (lambda plan: slots(plan, lambda slot: replace(slot, first=slot.length)), "Make the parts longer"),
        (lambda plan: slots(plan, lambda slot: replace(slot, length=slot.length + 16)), "placed otherwise"),
        (
            lambda plan: slots(plan, lambda slot: replace(slot, first=slot.first + 16)),
            "one over another|else",
        ),
        (lambda plan: slots(plan, lambda slot: replace(slot, bucket="none")), "no parameter of its name"),
    ],
)
def test_what_lies_elsewhere_is_refused(broken: Callable[[Plan], Plan], message: str) -> None:
    plan = plan_of(dp=2, zero=1, owners=ALL)
    assert plan_faults(plan) == []
    faults = "\n".join(map(str, plan_faults(broken(plan))))
    assert faults
    assert any(part in faults for part in message.split("|")), faults


def test_a_plan_file_has_where_they_lie(tmp_path: Path) -> None:
    plan = plan_of(dp=2, zero=1, owners=ALL)
    plan.save(tmp_path / "plan.json")
    assert stretto.load_plan(tmp_path / "plan.json").job.parameters == plan.job.parameters
