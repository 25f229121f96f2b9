"""Models whose experts ranks share: a step is the plain model's, whatever else is sharded or cut.

One table: (capacity, model, layout). Capacity and routers' losses are of one microbatch of one copy, so the
plain model takes those one by one; where each chunk of a sequence has a capacity of its own, it serves chunk
by chunk. Among the rows are what MindSpeed's pages forbid beside AMPipe and pipe-experts: weight gradients by
themselves, recomputation, gradient reductions inside the backward, more than two chunks, slices whose number
is no multiple of the chunks'.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError, RunError, UsageError
from stretto.ir.plan import Plan
from stretto.ir.program import Job, Op, Shard
from stretto.models.moe import MoEConfig, MoEGPT, Routed, moe_token_sum
from stretto.parallelize.parts import lengths_of
from stretto.runtime import Runner, run_threads
from stretto.train.clip import GradientClip
from tests.parallelize.equality import assert_plan_is_plain, plain_step, planned, step_of

VOCAB, CONTEXT, ROWS = 32, 12, 8
DROPLESS, FEW, ALL = None, 0.5, 100.0
"""Capacities: no limit; of which rows are dropped; of which none are."""

WIDE = 4.0
"""Of `ep_buffer`, so that none of the few rows is without room."""


def mixture(capacity: float | None, shared: int = 0, dense_every: int = 0, layers: int = 2) -> MoEGPT:
    config = MoEConfig(
        vocab_size=VOCAB,
        layers=layers,
        hidden=16,
        heads=2,
        context=CONTEXT,
        experts=4,
        top_k=2,
        expert_ratio=1.5,
        capacity_factor=capacity,
        shared_experts=shared,
        dense_every=dense_every,
    )
    return MoEGPT(config, seed=3).double()


model_of = functools.cache(mixture)


def batch() -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(4))


def plan_of(model: nn.Module, parallel: Parallel) -> Plan:
    return planned(capture(model, batch(), moe_token_sum, parallel))


def plain(model: nn.Module, pieces: int) -> tuple[Tensor, dict[str, Tensor]]:
    return plain_step(model, moe_token_sum, batch(), pieces)


def by_chunks(model: nn.Module, degree: int) -> nn.Module:
    """The plain model with experts that serve each chunk of a sequence by itself, written out."""
    own = copy.deepcopy(model)
    for module in own.modules():
        if type(module).__name__ == "Experts":
            module.forward = functools.partial(_each_chunk, module.forward, degree)  # type: ignore[method-assign]
    return own


def _each_chunk(forward: Any, degree: int, *rows: Tensor) -> Tensor:
    length = CONTEXT
    parts = [x.view(-1, length, x.shape[-1]).split(lengths_of(length, degree), dim=1) for x in rows]
    made = [forward(*(p.flatten(0, 1) for p in chunk)) for chunk in zip(*parts, strict=True)]
    full = [m.view(-1, n, m.shape[-1]) for m, n in zip(made, lengths_of(length, degree), strict=True)]
    return torch.cat(full, dim=1).flatten(0, 1)


def assert_equals(model: MoEGPT, parallel: Parallel, tolerance: float = 1e-10) -> None:
    """The model's step in a layout is that of the plain model, by chunks where these have capacities."""
    degree = int(parallel.ampipe_degree)
    apart = degree > 1 and parallel.ampipe_capacity != "whole" and model.config.capacity_factor is not None
    assert_plan_is_plain(
        plan_of(model, parallel),
        model,
        moe_token_sum,
        batch(),
        tolerance,
        expected=by_chunks(model, degree) if apart else None,
        least=1e-3,
    )


EP = {"ep": 2, "dp": 2}
PP = {"pp": 2, "microbatches": 2}
PIPELINE = {**EP, "pp": 2, "microbatches": 4, "ampipe_degree": 2}
SLICES = {"pipe_experts": True, "pipe_experts_multi_data": 3}
THREE = (DROPLESS, FEW, ALL)

Cell = tuple[float | None, dict[str, int], dict[str, Any]]
"""Capacity; the rest of the model; the layout."""


def cells() -> Iterator[Cell]:
    """All of them; those of `FAST` are in every run."""
    shared = {"shared": 1}
    dense = {"shared": 1, "dense_every": 2}
    for capacity in THREE:
        for how in (
            EP,
            {"ep": 4, "dp": 4, "microbatches": 2},
            {"ep": 2, "dp": 4},
            {**EP, **PP},
            {**EP, "pp": 2, "microbatches": 4, "schedule": "zb-h1"},
            {"dp": 2, **PP},
            # What ranks send, cut in pieces.
            {**EP, "pipe_experts_multi_data": 2},
            {**EP, "pipe_experts_multi_data": 12},
        ):
            yield capacity, shared, how
    for capacity in (FEW, ALL):
        for how in ({"pipe_experts": True}, SLICES, {**SLICES, "ampipe_degree": 2}):
            yield capacity, shared, {**EP, **how}
    # Blocks in chunks of their sequence, whose capacity is that of the uncut model, or of each chunk.
    for layout, capacity, degree in product((EP, PP), (DROPLESS, FEW), (2, 3, 4, 6)):
        yield capacity, shared, {**layout, "ampipe_degree": degree, "ampipe_capacity": "whole"}
    for degree in (2, 3):
        yield FEW, dense, {**EP, "ampipe_degree": degree}
    for more in (
        {"schedule": "zb-h1", "recompute": "full", "microbatches": 2},
        {"schedule": "zb-h1"},
        {"recompute": "full"},
        {"recompute": "selective"},
    ):
        yield DROPLESS, shared, {**PIPELINE, **more}
    # What MindSpeed's pages forbid.
    yield ALL, shared, {**PIPELINE, **SLICES, "schedule": "zb-h1"}
    yield DROPLESS, shared, {**PIPELINE, "schedule": "zb-h2", "pipe_experts_multi_data": 3}
    yield ALL, shared, {**PIPELINE, **SLICES, "recompute": "full"}
    yield DROPLESS, shared, {**PIPELINE, "recompute": "selective", "pipe_experts_multi_data": 3}
    yield ALL, shared, {**PIPELINE, **SLICES, "recompute": "gathers"}
    yield DROPLESS, shared, {**PIPELINE, "recompute": 10**9}
    yield FEW, shared, {**PIPELINE, "recompute": "full", "schedule": "zb-h1"}
    yield FEW, shared, {"ep": 2, "dp": 4, "ampipe_degree": 2, **SLICES}
    yield DROPLESS, shared, {"ep": 2, "dp": 4, **PP, "ampipe_degree": 2}
    yield FEW, shared, {"ep": 2, "dp": 4, **PP, "schedule": "zb-h2", "ampipe_degree": 3}
    yield ALL, shared, {**EP, "microbatches": 2, "ampipe_degree": 4, **SLICES}
    yield DROPLESS, shared, {**EP, "ampipe_degree": 6, "pipe_experts_multi_data": 4}
    yield ALL, shared, {**PIPELINE, **SLICES, "overlap": "local", "split_ops": True}
    # Ranks share matrices and the sequence, too.
    for degree, ep, sequence, pp, capacity in product(
        (1, 2, 3, 4), (1, 2), (False, True), (1, 2), (DROPLESS, FEW)
    ):
        layout = {"tp": 2, "ep": ep, "dp": ep, "pp": pp, "microbatches": pp, "sequence_parallel": sequence}
        yield capacity, dense, {**layout, "ampipe_degree": degree, "ampipe_capacity": "whole"}
    yield DROPLESS, {"shared": 1, "layers": 1}, CORNER
    for sequence, more in product(
        (False, True),
        (
            {"schedule": "zb-h1"},
            {"recompute": "full"},
            {"recompute": "selective"},
            {"recompute": "gathers"},
            {"split_ops": True},
            {"pipe_experts_multi_data": 2},
        ),
    ):
        if more != {"recompute": "gathers"} or sequence:  # else there is nothing that is gathered
            yield DROPLESS, shared, {**PIPELINE, "tp": 2, "sequence_parallel": sequence, **more}
    for sequence in (False, True):
        yield FEW, dense, {**EP, "tp": 2, "ampipe_degree": 2, "sequence_parallel": sequence}


CORNER: dict[str, Any] = {
    **EP,
    "tp": 2,
    "sequence_parallel": True,
    "ampipe_degree": 2,
    "ampipe_capacity": "whole",
}

FAST: tuple[tuple[float | None, dict[str, Any]], ...] = (
    # Every capacity, and every layout with one of them, of two that differ in the schedule one.
    (ALL, EP),
    (DROPLESS, {"ep": 4, "dp": 4, "microbatches": 2}),
    (FEW, {"ep": 2, "dp": 4}),
    (DROPLESS, {**EP, "pp": 2, "microbatches": 4, "schedule": "zb-h1"}),
    (FEW, {"dp": 2, **PP}),
    (DROPLESS, {**EP, "pipe_experts_multi_data": 2}),
    (FEW, {**EP, "pipe_experts_multi_data": 2}),
    (FEW, {**EP, **SLICES, "ampipe_degree": 2}),
    (ALL, {**EP, "pipe_experts": True}),
    (FEW, {**EP, "ampipe_degree": 2, "ampipe_capacity": "whole"}),
    (DROPLESS, {**PP, "ampipe_degree": 3, "ampipe_capacity": "whole"}),
    (FEW, {**EP, "ampipe_degree": 2}),
    (DROPLESS, {**PIPELINE, "schedule": "zb-h1", "recompute": "full", "microbatches": 2}),
    (DROPLESS, CORNER),
)


@pytest.mark.parametrize(
    ("capacity", "rest", "how"),
    [
        pytest.param(*cell, marks=() if (cell[0], cell[2]) in FAST else pytest.mark.slow, id=str(cell))
        for cell in cells()
    ],
)
def test_a_step_is_that_of_the_plain_model(
    capacity: float | None, rest: dict[str, int], how: dict[str, Any]
) -> None:
    buffer = {"ep_buffer": WIDE} if how.get("ep", 1) > 1 else {}
    # Pieces of what ranks send are summed as the whole is.
    exact = how.keys() <= {"ep", "dp", *SLICES}
    assert_equals(model_of(capacity, **rest), Parallel(**how, **buffer), 1e-12 if exact else 1e-10)


def test_dropless_is_a_capacity_that_serves_all() -> None:
    one, other = model_of(DROPLESS), model_of(ALL)
    assert plain(one, 2)[0] == pytest.approx(float(plain(other, 2)[0]), rel=1e-12)


# Routers that send all tokens to the first rank's experts.


def one_sided() -> MoEGPT:
    model = copy.deepcopy(model_of(DROPLESS))
    for block in model.blocks:
        router = block.mlp.router
        router.forward = functools.partial(_to_the_first, router.forward)
    return model


def _to_the_first(forward: Any, x_ND: Tensor) -> Routed:
    routed = forward(x_ND)
    chosen = torch.tensor([0, 1]).expand_as(routed.chosen)
    return Routed(chosen, routed.weights, routed.losses)


def test_every_token_to_one_ranks_experts() -> None:
    assert_equals(one_sided(), Parallel(**EP, ep_buffer=2.0))


def test_what_finds_no_room_is_an_error_that_names_the_buffer_that_would_do() -> None:
    plan = plan_of(one_sided(), Parallel(**EP, ep_buffer=1.5))
    with pytest.raises(RunError, match=r"ep_buffer = 2.0 or more, .*ep_buffer out .*ep_overflow = 'drop'"):
        step_of(plan, one_sided(), batch())


def test_what_finds_no_room_may_be_dropped() -> None:
    plan = plan_of(one_sided(), Parallel(**EP, ep_buffer=1.5, ep_overflow="drop"))
    loss, _ = step_of(plan, one_sided(), batch())
    assert torch.isfinite(loss)
    assert loss != plain(one_sided(), 2)[0]


# What is captured.


@functools.cache
def captured(**how: Any) -> Job:
    return capture(model_of(FEW, shared=1), batch(), moe_token_sum, Parallel(**how))


def ops_of(job: Job) -> list[Op]:
    return [op for stage in job.stages for ops in stage.ops.values() for op in ops]


def test_each_piece_and_each_chunk_has_collectives_of_its_own() -> None:
    def count(target: str = "comm.all_to_all", **how: Any) -> int:
        return Counter(op.target for op in ops_of(captured(**EP, **how)))[target]

    assert count(pipe_experts_multi_data=3) == count(ampipe_degree=3) == 3 * count()
    assert count(pipe_experts=True) == 2 * count()  # two experts a rank
    assert count(pipe_experts=True, pipe_experts_multi_data=2) == 4 * count()
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert count(attention, ampipe_degree=3) == 3 * count(attention)


def test_experts_are_sharded_over_both_axes() -> None:
    parameters = {p.name: p for p in captured(**EP, tp=2).parameters}
    up, down = (parameters[f"blocks.0.mlp.experts.{name}"] for name in ("up", "down"))
    assert up.shards == (Shard("ep", 0), Shard("tp", 2))
    assert down.shards == (Shard("ep", 0), Shard("tp", 1))
    assert up.spec.shape == (2, 16, 12)
    assert up.partial == down.partial == ()
    assert parameters["blocks.0.mlp.router.weight"].shards == ()
    assert parameters["blocks.0.mlp.router.weight"].partial == ()


def test_what_is_sharded_over_both_axes_is_gathered_clipped_and_saved() -> None:
    model = model_of(FEW, shared=1)

    def work(runner: Runner) -> tuple[float, dict[str, Tensor]]:
        runner.step(batch())
        return float(GradientClip(runner, 0.0)()), runner.state_dict()

    norm = torch.stack([grad.norm() for grad in plain(model, 2)[1].values()]).norm()
    for of_rank, state in run_threads(planned(captured(**EP, tp=2)), lambda _: copy.deepcopy(model), work):
        assert of_rank == pytest.approx(float(norm), rel=1e-10)
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_layer_of_experts_is_reduced_as_a_dense_one() -> None:
    """Twice each way and layer, and once the few weights of a token's experts: what shared experts make is
    added before."""
    layers, ends = 2, 2  # the embedding, and the gradient of the head's input
    along_tp = [op for op in ops_of(captured(**EP, tp=2)) if op.kind is not None and op.args[-2] == "tp"]
    kinds = Counter(op.target for op in along_tp)
    assert kinds == {"comm.all_reduce": 4 * layers + ends + layers, "comm.all_gather": 1}


def test_chunks_reduce_and_gather_each_by_itself() -> None:
    """What the order hides under other chunks; a gather of a full sequence is left to the head alone."""
    shapes = [op.outputs[0].shape for op in ops_of(captured(tp=2, ampipe_degree=2)) if op.kind is not None]
    assert sum(shape[1] == 12 for shape in shapes if len(shape) == 3) == 3  # embedding, head, first attention
    job = captured(tp=2, ampipe_degree=2, sequence_parallel=True)
    gathered = [op.outputs[0].shape for op in ops_of(job) if op.target == "comm.all_gather"]
    assert {shape[1] for shape in gathered if len(shape) == 3} == {3}


# Refusals.


class Repeated(nn.Module):
    """A model with a list of experts that is no module of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) @ self.weight


def width_on_one_side() -> dict[str, str]:
    plan = {name: how for name, how in model_of(FEW, dense_every=2).tp_plan.items() if "shared" not in name}
    del plan["blocks.*.mlp.experts.down"]
    return plan


def experts_with(style: str) -> dict[str, str]:
    return {"blocks.*.mlp.experts": "experts", "blocks.*.mlp.experts.up": style}


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "ranks that do not divide the experts": (lambda: captured(ep=3, dp=3), "such as 2"),
    "ranks that do not divide the copies": (lambda: captured(ep=2, dp=3), "give dp = 4"),
    "a model without experts": (
        lambda: capture(nn.Linear(2, 2), torch.zeros(4, 2), lambda m, x: m(x).sum(), Parallel(**EP)),
        "no plan for expert parallelism",
    ),
    "experts without a capacity in pieces": (
        lambda: plan_of(model_of(DROPLESS), Parallel(**EP, pipe_experts=True)),
        "pipe_experts_multi_data",
    ),
    "pieces without ranks": (lambda: Parallel(pipe_experts=True), "ep = 2"),
    "too many chunks": (lambda: captured(ampipe_degree=7), "give 6 or less"),
    "too many chunks of slices": (
        lambda: captured(tp=2, ampipe_degree=8, sequence_parallel=True),
        r"ampipe_degree = 8 .* give 6 or less",
    ),
    "a parameter that is none of experts": (
        lambda: capture(
            Repeated(),
            torch.zeros(4, 4),
            moe_token_sum,
            Parallel(tp=2),
            tp_plan={"up": "colwise", "weight": "dim:0"},
        ),
        "the parameter 'weight'.*'experts'",
    ),
    **{
        f"experts with {style}": (
            lambda style=style: capture(
                model_of(FEW), batch(), moe_token_sum, Parallel(tp=2), tp_plan=experts_with(style)
            ),
            key,
        )
        for style, key in (("dim:3", "'dim:D'"), ("sequence", "'dim:D'"), ("dim:2:5", "24 features of 5"))
    },
    "a width that is sharded on one side": (
        lambda: capture(
            model_of(FEW, dense_every=2), batch(), moe_token_sum, Parallel(tp=2), tp_plan=width_on_one_side()
        ),
        r"blocks\.\*\.mlp\.experts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    make, key = REFUSED[name]
    with pytest.raises((CaptureError, UsageError, ValueError), match=key):
        make()
