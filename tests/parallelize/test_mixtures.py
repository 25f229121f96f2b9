"""Experts shared by ranks, cut in slices, in blocks that work in chunks, with routing as uneven as can be: a
planned step is the plain model's in float64.

One row a cell: capacity, layout, and where routers send tokens. Rows of the shorter run have each capacity
and each axis, most on a model of one layer; those of the longer one meet what pages of other libraries
forbid: weight gradients by themselves, recomputation, gradient reductions inside the backward, more than two
chunks, slices whose number is no multiple of the chunks'.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stretto.capturing import capture, torch_adapter
from stretto.config import Parallel
from stretto.ir.program import Job, Op, Shard
from stretto.models.build import huggingface_sum
from stretto.parallelize.experts import experts_in
from stretto.runtime import Runner, run_threads
from stretto.train.clip import GradientClip
from tests.parallelize.equality import assert_plan_is_plain, plain_step, step_of
from tests.parallelize.mixtures import (
    ALL,
    CHOICES,
    DROPLESS,
    FEW,
    SIZES,
    THEIRS,
    assert_equals,
    batch,
    by_chunks,
    captured,
    model_of,
    moe_token_sum,
    planned,
    routed,
    their_batch,
)
from tests.runtime.equality import from_transformers

Row = tuple[float | None, str] | tuple[float | None, str, str]

FAST: list[Row] = [
    (DROPLESS, "layers=1 tp=2 ep=2 dp=2 sequence_parallel=True"),
    (DROPLESS, "layers=1 ep=4 dp=4", "all to one"),
    (DROPLESS, "layers=1 ep=2 dp=2 ep_buffer=2.0", "all to the first rank"),
    (FEW, "dp=2 pp=2 microbatches=2"),
    (ALL, "layers=1 ep=2 dp=4"),
    (FEW, "layers=1 ep=2 dp=2 ampipe_degree=2 ampipe_capacity=whole"),
    (FEW, "layers=1 ep=2 dp=2 pipe_experts=True pipe_experts_multi_data=3", "half to one"),
]
SLOW: list[Row] = [
    (DROPLESS, "ep=2 dp=2 pp=2 microbatches=2 schedule=zb-h1 recompute=full ampipe_degree=2"),
    (ALL, "ep=2 dp=2"),
    (ALL, "ep=2 dp=2 pipe_experts=True"),
    (DROPLESS, "ep=4 dp=4 microbatches=2"),
    (DROPLESS, "ep=2 dp=2 pipe_experts_multi_data=2"),
    (DROPLESS, "pp=2 microbatches=2 ampipe_degree=3 ampipe_capacity=whole"),
    (DROPLESS, "tp=2 ep=2 dp=2 sequence_parallel=True ampipe_degree=2"),
    (DROPLESS, "ep=4 dp=4", "all to one"),
    (DROPLESS, "ep=2 dp=2 ep_buffer=2.0", "half to one"),
    (DROPLESS, "ep=2 dp=2 ep_buffer=2.0", "all to the first rank"),
    (FEW, "ep=2 dp=4"),
    (FEW, "ep=2 dp=2 ampipe_degree=2 ampipe_capacity=whole"),
    (FEW, "ep=2 dp=2 ampipe_degree=2 pipe_experts=True pipe_experts_multi_data=3"),
    (FEW, "ep=2 dp=2 pipe_experts=True pipe_experts_multi_data=3", "half to one"),
    (ALL, "ep=2 dp=2 pp=2 microbatches=4 schedule=zb-h1 ampipe_degree=2 pipe_experts_multi_data=3"),
    (ALL, "ep=2 dp=2 pp=2 microbatches=4 recompute=full ampipe_degree=2 pipe_experts=True"),
    (ALL, "ep=2 dp=2 pp=2 microbatches=4 recompute=gathers ampipe_degree=2 pipe_experts=True"),
    (ALL, "ep=2 dp=2 pp=2 microbatches=4 overlap=local split_ops=True ampipe_degree=2 pipe_experts=True"),
    (ALL, "ep=2 dp=2 microbatches=2 ampipe_degree=4 pipe_experts=True pipe_experts_multi_data=3"),
    (DROPLESS, "ep=2 dp=2 pp=2 microbatches=4 schedule=zb-h2 ampipe_degree=2 pipe_experts_multi_data=3"),
    (DROPLESS, "ep=2 dp=2 pp=2 microbatches=4 recompute=selective ampipe_degree=2"),
    (DROPLESS, "ep=2 dp=2 pp=2 microbatches=4 recompute=1000000000 ampipe_degree=2"),
    (DROPLESS, "ep=2 dp=4 pp=2 microbatches=2 ampipe_degree=2"),
    (DROPLESS, "ep=2 dp=2 ampipe_degree=6 pipe_experts_multi_data=4"),
    (DROPLESS, "ep=2 dp=2 pipe_experts_multi_data=12"),
    (FEW, "ep=2 dp=2 pp=2 microbatches=4 recompute=full schedule=zb-h1 ampipe_degree=2"),
    (FEW, "ep=2 dp=4 pp=2 microbatches=2 schedule=zb-h2 ampipe_degree=3"),
    (FEW, "ep=2 dp=2 ampipe_degree=4 ampipe_capacity=whole"),
    (FEW, "ep=2 dp=4 ampipe_degree=2 pipe_experts=True pipe_experts_multi_data=3"),
    (DROPLESS, "tp=2"),
    (DROPLESS, "tp=2 ep=2 dp=2 pp=2 microbatches=2 sequence_parallel=True ampipe_degree=3"),
    (DROPLESS, "tp=2 ep=2 dp=2 pp=2 microbatches=4 schedule=zb-h1 ampipe_degree=2"),
    (DROPLESS, "tp=2 ep=2 dp=2 sequence_parallel=True recompute=gathers ampipe_degree=2"),
    (DROPLESS, "tp=2 ep=2 dp=2 sequence_parallel=True recompute=full split_ops=True ampipe_degree=4"),
    (DROPLESS, "tp=2 ep=2 dp=2 recompute=selective pipe_experts_multi_data=2"),
    (FEW, "tp=2 sequence_parallel=True"),
    (FEW, "tp=2 ep=2 dp=2 pp=2 microbatches=2"),
    (FEW, "tp=2 ep=2 dp=2 ampipe_degree=2"),
    (FEW, "tp=2 pp=2 microbatches=2 sequence_parallel=True ampipe_degree=3 ampipe_capacity=whole"),
    *(
        (DROPLESS, "ep=2 dp=4 pp=2 microbatches=2 ep_buffer=2.0 pipe_experts_multi_data=3", c)
        for c in CHOICES
    ),
    *((DROPLESS, "ep=2 dp=2 ampipe_degree=2 ep_buffer=2.0", choice) for choice in CHOICES),
    *((FEW, "ep=4 dp=4 pipe_experts_multi_data=3", choice) for choice in CHOICES),
    *((FEW, "ep=2 dp=2 ampipe_degree=2", choice) for choice in CHOICES),
]


def settings(text: str) -> dict[str, Any]:
    """Arguments of `Parallel`, from words KEY=VALUE."""
    found: dict[str, Any] = {}
    for key, value in (word.split("=") for word in text.split()):
        found[key] = {"True": True}.get(value, float(value) if "." in value else value)
        if value.isdigit():
            found[key] = int(value)
    return found


@pytest.mark.parametrize(
    "row", [*FAST, *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW)], ids=str
)
def test_a_step_is_that_of_the_plain_model(row: Row) -> None:
    capacity, text, *choice = row
    how = settings(text)
    layers = how.pop("layers", 2)
    if choice:
        # The order of ops changes no numbers, and takes most of the time of a plan.
        model, how["overlap"] = routed(capacity, *choice, layers=layers), "off"
    else:
        dense_every = 2 if "ampipe" in text and layers > 1 else 0
        model = model_of(capacity, shared=1, dense_every=dense_every, layers=layers)
        if capacity is DROPLESS and "ep" in how:
            how.setdefault("ep_buffer", 4.0)
    in_chunks = capacity is not DROPLESS and "ampipe_capacity" not in how
    degree = how.get("ampipe_degree", 1)
    assert_equals(model, expected=by_chunks(model, degree) if in_chunks and degree > 1 else None, **how)


def test_dropless_is_a_capacity_that_serves_all() -> None:
    one, other = (plain_step(model_of(c), moe_token_sum, batch(), 2)[0] for c in (DROPLESS, ALL))
    assert one == pytest.approx(float(other), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("mixtral", "layers=1 ep=2"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("mixtral", "ep=2 ampipe_degree=2"),
                ("deepseek v3", "ep=2 ampipe_degree=2"),
                ("mixtral", "tp=2 sequence_parallel=True"),
                ("qwen3 moe", "ep=2"),
                ("qwen3 moe", "tp=2 ampipe_degree=3"),
                ("qwen3 moe", "tp=2 ep=2 sequence_parallel=True ampipe_degree=2"),
                ("deepseek v3", "tp=2 ep=2 ampipe_degree=2"),
            )
        ),
    ],
)
def test_models_of_transformers_by_their_own_plans(name: str, how: str) -> None:
    """Routers of two of them compute in float32, and add gradients in it."""
    pytest.importorskip("transformers")
    kind, sizes = THEIRS[name]
    layout = settings(f"{how} dp=2") | ({"ep_buffer": 2.0} if "ep=2" in how else {})
    if layout.pop("layers", 2) == 1:
        sizes = {**sizes, "num_hidden_layers": 1}
    model = from_transformers(kind, **{**SIZES, **sizes}).double()
    job = capture(model, their_batch(), huggingface_sum, Parallel(**layout))
    axes = {axis for axis in ("tp", "ep") if axis in layout}
    experts = [p for p in job.parameters if "experts." in p.name and "shared" not in p.name]
    assert experts
    assert all({shard.axis for shard in p.shards} == axes for p in experts)
    exact = name == "qwen3 moe" or (name == "mixtral" and "tp" not in how)
    tolerance = 1e-10 if exact else 1e-6
    assert_plan_is_plain(planned(job), model, huggingface_sum, their_batch(), tolerance, least=1e-3)


@pytest.mark.slow
def test_a_router_draws_the_same_however_its_experts_are_shared() -> None:
    """In training. The model alone draws from another generator: it is compared in evaluation."""
    pytest.importorskip("transformers")
    kind, sizes = THEIRS["phimoe"]
    model = from_transformers(kind, **{**SIZES, **sizes}).double()
    found = []
    for how in ({}, {"ep": 2}, {"ep": 2, "ampipe_degree": 2}):
        job = capture(model, their_batch(), huggingface_sum, Parallel(dp=2, **how))  # type: ignore[arg-type]
        assert any(op.random for op in ops_of(job))
        found.append(step_of(planned(job), model, their_batch()))
    (loss, grads), *others = found
    for other_loss, other in others:
        assert abs(other_loss - loss) <= 1e-10 * abs(loss)
        for key, grad in grads.items():
            assert (other[key] - grad).norm() <= 1e-10 * max(float(grad.norm()), 1e-3), key
    job = capture(model.eval(), their_batch(), huggingface_sum, Parallel(dp=2, ep=2))
    assert_plan_is_plain(planned(job), model, huggingface_sum, their_batch(), least=1e-3)


@pytest.mark.parametrize("style", ["ep_dispatch_experts", "moe_tp_experts", "gather"])
@pytest.mark.parametrize("own", [True, False])
def test_plans_of_all_versions_are_read(style: str, own: bool) -> None:
    """A model's plan for experts is its own, or that of a config."""
    layer = nn.ModuleDict({"experts": nn.Linear(2, 2)})
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([layer])})})
    plan = {
        "layers.*.gate": "ep_router",
        "layers.*.experts.weight": "grouped_gemm",
        "layers.*.experts": style,
    }
    model.config = SimpleNamespace(base_model_ep_plan=None if own else plan)  # type: ignore[assignment]
    model.base_model = model["model"]
    model["model"].config = model.config
    model.ep_plan = {f"model.{name}": how for name, how in plan.items()} if own else {}  # type: ignore[assignment]
    assert experts_in(model) == ("model.layers.0.experts",)


# What programs have of ops.


def ops_of(job: Job) -> list[Op]:
    return [op for stage in job.stages for ops in stage.ops.values() for op in ops]


def targets(**how: Any) -> Counter[str]:
    return Counter(op.target for op in ops_of(captured(model_of(FEW, layers=1), **how)))


def test_pieces_have_collectives_and_products_of_their_own() -> None:
    one = targets(ep=2, dp=2)
    for how, times in (
        ({"ampipe_degree": 2}, 2),
        ({"pipe_experts": True, "pipe_experts_multi_data": 2}, 4),  # two experts a rank
    ):
        found = targets(ep=2, dp=2, **how)
        assert found["comm.all_to_all"] == times * one["comm.all_to_all"], how
        attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
        assert found[attention] == how.get("ampipe_degree", 1) * one[attention]


def test_experts_are_sharded_over_both_axes_gathered_clipped_and_saved() -> None:
    model = model_of(FEW, shared=1, layers=1)
    job = captured(model, tp=2, ep=2, dp=2)
    parameters = {p.name: p for p in job.parameters}
    up, down, router = (
        parameters[f"blocks.0.mlp.{name}"] for name in ("experts.up", "experts.down", "router.weight")
    )
    assert up.shards == (Shard("ep", 0), Shard("tp", 2))
    assert down.shards == (Shard("ep", 0), Shard("tp", 1))
    assert up.spec.shape == (2, 16, 12)
    assert router.shards == router.partial == up.partial == down.partial == ()

    def work(runner: Runner) -> tuple[float, dict[str, torch.Tensor]]:
        runner.step(batch())
        return float(GradientClip(runner, 0.0)()), runner.state_dict()

    _, grads = plain_step(model, moe_token_sum, batch(), 2)
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for found, state in run_threads(planned(job), lambda _: copy.deepcopy(model), work):
        assert found == pytest.approx(float(norm), rel=1e-10)
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_layer_of_experts_is_reduced_as_a_dense_one() -> None:
    """Twice each way and layer, and once the few weights of a token's experts: what shared experts make is
    added before."""
    layers, ends = 1, 2  # the embedding, and the gradient of the head's input
    job = captured(model_of(FEW, shared=1, layers=layers), tp=2, ep=2, dp=2)
    kinds = Counter(op.target for op in ops_of(job) if op.kind is not None and op.args[-2] == "tp")
    assert kinds == {"comm.all_reduce": 4 * layers + ends + layers, "comm.all_gather": 1}


@pytest.mark.slow
def test_chunks_reduce_each_by_itself() -> None:
    job = captured(model_of(FEW, shared=1), tp=2, ampipe_degree=2)
    shapes = [op.outputs[0].shape for op in ops_of(job) if op.kind is not None]  # type: ignore[union-attr]
    assert sum(shape[1] == 12 for shape in shapes if len(shape) == 3) == 3  # embedding, head, first attention


def test_chunks_gather_each_by_itself() -> None:
    """What the order hides under other chunks; a gather of a full sequence is left to the head alone."""
    model = model_of(FEW, shared=1, layers=1)
    job = captured(model, tp=2, ampipe_degree=2, sequence_parallel=True)
    gathered = [op.outputs[0].shape for op in ops_of(job) if op.target == "comm.all_gather"]  # type: ignore[union-attr]
    assert {shape[1] for shape in gathered if len(shape) == 3} == {3}


def test_equal_layers_and_equal_chunks_of_experts_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    own = torch_adapter.export_call

    def counted(module: nn.Module, leaves: Sequence[torch.Tensor], mode: Any) -> Any:
        calls.append(leaves[0].shape)
        return own(module, leaves, mode)

    monkeypatch.setattr(torch_adapter, "export_call", counted)
    captured(model_of(FEW), ep=2, dp=2, ampipe_degree=2)
    assert calls == [(4 * 6, 16)]
    captured(model_of(FEW), ep=2, dp=2, ampipe_degree=5)
    assert sorted(calls[1:]) == [(4 * 2, 16), (4 * 3, 16)]
