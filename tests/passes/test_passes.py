"""What each pass changes in a captured step, and that numbers stay; a step with no pass is right, too."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.ir.action import Phase
from stretto.ir.program import Job, Op, Ref, TensorSpec
from stretto.ir.storage import partial_sums
from stretto.passes import GRAPH_PASSES
from stretto.passes.layout.lower import lower
from stretto.passes.layout.program import Origin, StepProgram
from stretto.passes.no_ops import dead_ops
from tests.cells import slow
from tests.parallelize.equality import MODELS as LARGER
from tests.parallelize.equality import (
    assert_plain,
    batch_of,
    gpt,
    loss_of,
    step,
)

MODELS = {**LARGER, "gpt of one layer": lambda: gpt(layers=1)}
SPREADS = [(1, False), (2, False), (2, True)]
BITWISE = ("dead_ops", "equal_collectives")
"""Passes after which every op computes what it did, or sums in the same order."""


@functools.cache
def job_of(
    name: str,
    tp: int = 1,
    sp: bool = False,
    pp: int = 1,
    rows: int = 4,
    skip: Any = (),
    microbatches: int = 2,
) -> Job:
    model = MODELS[name]().double()
    parallel = Parallel(tp=tp, sequence_parallel=sp, pp=pp, microbatches=microbatches, skip_passes=skip)
    return capture(model, batch_of(rows), loss_of(name), parallel)


def ops_of(job: Job) -> list[Op]:
    return [op for stage in job.stages for ops in stage.ops.values() for op in ops]


def targets(job: Job) -> Counter[str]:
    return Counter(op.target for op in ops_of(job))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match=r"skip_passes names 'no_op', .* the passes are dead_ops, .*no_ops"):
        job_of("gpt", skip=("no_op",))


@pytest.mark.parametrize(
    ("name", "tp", "sp"),
    [
        ("gpt of one layer", 2, True),
        *(slow("gpt", tp, sp) for tp, sp in SPREADS),
        *(slow(name, 2, True) for name in ("llama", "gpt tied, learned positions", "gpt2")),
    ],
)
def test_each_pass_keeps_the_numbers(name: str, tp: int, sp: bool) -> None:
    """With all passes, without each, and with none; bit by bit where no sum is regrouped.

    One microbatch: a gradient that is a product is added to the microbatches' sum by the product itself,
    which rounds once where a product and a sum round twice.
    """
    model, batch = MODELS[name]().double(), batch_of(2)
    loss, grads = step(job_of(name, tp, sp, microbatches=1, rows=2), model, batch)
    names = tuple(one.__name__ for one in GRAPH_PASSES if one is not lower)
    assert_plain(job_of(name, tp, sp, skip=names), model, loss_of(name), batch_of())
    for skipped in names:
        told, found = step(job_of(name, tp, sp, skip=(skipped,), microbatches=1, rows=2), model, batch)
        exact = skipped in BITWISE
        assert torch.equal(told, loss) if exact else torch.allclose(told, loss, rtol=1e-12)
        assert found.keys() == grads.keys()
        for key, want in grads.items():
            if exact:
                assert torch.equal(found[key], want), f"{key} without {skipped}"
            assert (found[key] - want).norm() <= 1e-10 * want.norm(), f"{key} without {skipped}"


def test_what_changes_nothing_is_gone() -> None:
    before, after = (targets(job_of("gpt", 2, True, skip=skip)) for skip in (("no_ops",), ()))
    assert after["aten.detach.default"] == 0 < before["aten.detach.default"]
    linears = 9  # four a layer and the head: one swap for the product, one for the weight's gradient
    assert (before["aten.t.default"], after["aten.t.default"]) == (5 * linears, 2 * linears)
    assert before["aten.clone.default"] - after["aten.clone.default"] >= 4, "a dropout that drops nothing"
    assert before["aten.mm.default"] == after["aten.mm.default"] == 3 * linears


def test_what_nobody_asks_for_is_dead() -> None:
    """The gradient of a frozen matrix, which the trace of the backward may keep, and a draw."""
    x = TensorSpec((4,), "float64")
    ops = (
        Op("noise", "aten.bernoulli.p", (Ref("batch/0"), 0.5), (), (x,), random=True),
        Op("drop", "aten.bernoulli.p", (Ref("batch/0"), 0.5), (), (x,), random=True),
        Op("loss", "aten.mul.Tensor", (Ref("drop"), Ref("batch/0")), (), (x,)),
        Op("frozen", "aten.mul.Tensor", (Ref("noise"), Ref("tangent")), (), (x,)),
    )
    found = dead_ops(
        StepProgram(tuple((op, Origin(None, False)) for op in ops), {}, {"loss": "loss"}, {}), ()
    )
    assert [op.name for op, _ in found.ops] == ["drop", "loss"], (
        "draws keep their names, on which they depend"
    )
    assert dead_ops(found, ()) is found


class Own(nn.Module):
    """Matrices of these shapes, and code: (self, x) -> its result."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(5)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
        self.register_buffer("mean", torch.linspace(0.1, 0.6, 6, dtype=torch.float64))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def own_job(model: nn.Module, x: Tensor, skip: tuple[str, ...] = (), microbatches: int = 1) -> Job:
    return capture(model, x, loss, Parallel(microbatches=microbatches, skip_passes=skip))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_a_copy_of_what_is_written_stays() -> None:
    def code(self: Any, x: Tensor) -> Tensor:
        """Copies a buffer, writes it, and uses the copy in the backward."""
        old = self.mean.clone()
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return (x * self.weight * old.view(6)).sin() * self.weight.expand(6) * 1.0

    model, x = Own(code, weight=(6,)), random(4, 6)
    assert_plain(own_job(model, x), model, loss, x, 1e-12)


def test_the_gradient_of_a_slice_of_all_is_that_of_the_whole() -> None:
    """Two matrices of which the product takes a slice: all of one, half of the other."""
    model = Own(
        lambda self, x: torch.bmm(torch.bmm(x, self.every[0:3]).tanh(), self.some[0:3]),
        every=(3, 6, 6),
        some=(6, 6, 6),
    )
    x = random(3, 4, 6)
    job = own_job(model, x)
    assert targets(job)["aten.slice_backward.default"] == 1, "of the one that is cut"
    assert_plain(job, model, loss, x, 0.0)


def test_sums_of_products_become_parts_of_the_gradient() -> None:
    def code(self: Any, x: Tensor) -> Tensor:
        """Matrices used several times: three products, two of batches, and one whose output is used."""
        for part in (0, 2, 4):
            x = x + (x[:, part : part + 2] @ self.plain).tanh().mean((1, 2), keepdim=True)
        halves = x.unflatten(1, (2, 3)).transpose(0, 1).flatten(1, 2)
        x = torch.bmm(torch.bmm(halves, self.batch).sin(), self.batch)
        return (x @ self.also_added).tanh() + self.also_added.sum()  # type: ignore[no-any-return]

    model, x = Own(code, plain=(6, 6), batch=(2, 6, 6), also_added=(6, 6)), random(4, 6, 6)
    job, before = (own_job(model, x, skip, 2) for skip in ((), ("gradient_parts",)))
    assert {p.name: len(p.grads) for p in before.parameters} == {"plain": 1, "batch": 1, "also_added": 1}
    assert {p.name: len(p.grads) for p in job.parameters} == {"plain": 3, "batch": 2, "also_added": 1}
    assert len(ops_of(before)) - len(ops_of(job)) == 3, "additions"
    adding = partial_sums(job, 0)
    for parameter in job.parameters[:2]:
        assert all(adding[value][0].product for _, _, value in parameter.grads)
    for found in (job, before):
        assert_plain(found, model, loss, x, 1e-12)


def by_einsum(self: Any, x: Tensor) -> Tensor:
    return torch.einsum("bsf,fh->bsh", torch.einsum("bsh,hf->bsf", x, self.up).tanh(), self.down)


def expanded(self: Any, x: Tensor) -> Tensor:
    up, down = (w.unsqueeze(0).expand(x.shape[0], -1, -1) for w in (self.up, self.down))
    return torch.bmm(torch.bmm(x, up).tanh(), down)


@pytest.mark.parametrize("code", [by_einsum, expanded])
def test_batched_products_become_plain_ones(code: Callable[[Any, Tensor], Tensor]) -> None:
    """Linear layers that are written with three dims."""
    model, x = Own(code, up=(6, 8), down=(8, 6)), random(6, 5, 6)
    before, job = (own_job(model, x, skip, 2) for skip in (("plain_matmuls",), ()))
    assert targets(before)["aten.bmm.default"] == 5
    assert (targets(job)["aten.bmm.default"], targets(job)["aten.mm.default"]) == (0, 5)
    assert sum(op.flops for op in ops_of(job)) == sum(op.flops for op in ops_of(before))
    weight = [op for op in job.stages[0].ops[Phase.W] if op.target == "aten.mm.default"]
    assert {op.outputs[0].shape for op in weight if op.outputs[0]} >= {(8, 6), (6, 8)}
    assert_plain(job, model, loss, x)


@pytest.mark.parametrize(("name", "copies"), [("gpt", 8), slow("llama", 8), slow("gpt2", 8)])
def test_mlps_take_tokens_as_they_arrive(name: str, copies: int) -> None:
    """Two layers' four copies: into the MLP and out of it, in the forward and in the backward."""
    before, after = (targets(job_of(name, 2, True, skip=skip)) for skip in (("sequence_first",), ()))
    assert before["aten.clone.default"] - after["aten.clone.default"] == copies
    one = [targets(job_of(name, 2, True, rows=2, skip=skip)) for skip in (("sequence_first",), ())]
    assert one[0] == one[1], "in a batch of one the tokens arrive in their order"


@pytest.mark.parametrize(
    ("tp", "sp", "pp"),
    [(1, False, 2), (2, False, 1), (2, True, 2), slow(1, False, 1), slow(2, False, 2), slow(2, True, 1)],
)
@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt tied, learned positions", "llama", "gpt2")),
    ],
)
def test_no_weights_gradient_stands_before_an_inputs(name: str, tp: int, sp: bool, pp: int) -> None:
    """The collective of every linear layer's input gradient may start before any weight's gradient."""
    job = job_of(name, tp, sp, pp)
    weights = 0
    for stage in job.stages:
        made = {op.name for op in stage.ops[Phase.W]}
        for op in stage.ops[Phase.I]:
            assert made.isdisjoint(op.uses), f"{op.name} of I reads W"
        products = {p.name for p in job.parameters if len(p.spec.shape) == 2}
        grads = {v for p in job.parameters if p.name in products for s, _, v in p.grads if s == stage.index}
        for phase in (Phase.I, Phase.W):
            for op in stage.ops[phase]:
                if op.name in grads:
                    assert phase is Phase.W, f"{op.name}, a weight's gradient, is in {phase}"
                    weights += op.target == "aten.mm.default"
    assert weights == {"gpt": 9, "llama": 15, "gpt2": 8 + 1}.get(name, 9)
