"""Tokens that find no room in a buffer, and loads of experts: right numbers, or an error with the way out."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.capturing.evaluation import capture_evaluation
from stretto.config import Parallel
from stretto.errors import RunError
from stretto.ir.metrics import Observed
from stretto.ir.plan import Plan
from stretto.ir.serialize import load_plan
from stretto.models.build import huggingface_sum
from stretto.models.moe import MoEConfig, MoEGPT, Router, moe_token_sum
from stretto.parallelize.layout import layout_of
from stretto.parallelize.parts import bounds
from stretto.price.cluster import described_costs
from stretto.runtime import Runner, run_threads
from tests.clusters import cores
from tests.parallelize.equality import plain_step
from tests.parallelize.mixtures import (
    ALL,
    CONTEXT,
    DROPLESS,
    EXPERTS,
    FEW,
    ROWS,
    SIZES,
    THEIRS,
    TOP_K,
    assert_equals,
    batch,
    captured,
    make_plan,
    model_of,
    plan_of,
    planned,
    routed,
    step,
    their_batch,
)
from tests.runtime.equality import from_transformers
from tests.runtime.launch import launch

SHARED: dict[str, Any] = {"ep": 2, "dp": 2, "overlap": "off"}


@pytest.mark.parametrize(
    ("choices", "buffer", "said"),
    [
        # A choice for each layer.
        (["all to one"], 1.9, r"get 2 times the mean .* give ep_buffer = 2.0 or more, leave ep_buffer out"),
        # Of a step in which both have no room for all: 1.33 times the mean, and 2 times.
        (["none to one", "all to the last rank"], 1.0, r"blocks\.1\.mlp\.experts get 2 times .* = 2.0"),
        pytest.param(
            *(["all to the last rank", "none to one"], 1.0, r"blocks\.0\.mlp\.experts get 2 times .* = 2.0"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_overflow_names_the_room_for_all_layers_and_leaves_no_gradients(
    choices: list[str], buffer: float, said: str
) -> None:
    model = routed(DROPLESS, *choices, layers=len(choices))

    def work(runner: Runner) -> list[bool]:
        with pytest.raises(RunError, match=said):
            runner.step(batch())
        return [p.grad is None for _, p in runner.named_parameters()]

    plan = plan_of(model, **SHARED, ep_buffer=buffer)
    assert all(map(all, run_threads(plan, lambda _: copy.deepcopy(model), work)))


@pytest.mark.slow
def test_the_factor_that_an_overflow_names_does() -> None:
    model = routed(DROPLESS, "none to the first rank")
    with pytest.raises(RunError) as caught:
        step(plan_of(model, **SHARED, ep_buffer=1.0), model)
    factor = float(str(caught.value).partition("give ep_buffer = ")[2].split()[0])
    assert_equals(model, **SHARED, ep_buffer=factor)


def test_what_is_dropped_adds_nothing() -> None:
    """A rank's buffer that has room for half of the tokens serves the first half."""
    model = routed(DROPLESS, "all to one", layers=1)
    loss, grads = step(plan_of(model, **SHARED, ep_buffer=1.0, ep_overflow="drop"), model)
    halved = copy.deepcopy(model)
    for block in halved.blocks:
        forward = block.mlp.experts.forward

        def first_half(x_ND: Tensor, chosen: Tensor, weights: Tensor, forward: Any = forward) -> Any:
            served = (torch.arange(x_ND.shape[0]) < x_ND.shape[0] // 2).to(x_ND.dtype)
            return forward(x_ND, chosen, weights * served[:, None])

        block.mlp.experts.forward = first_half
    want_loss, want = plain_step(halved, moe_token_sum, batch(), 2)
    assert abs(loss - want_loss) <= 1e-10 * want_loss
    for name, grad in want.items():
        assert torch.allclose(grads[name], grad, rtol=1e-10, atol=1e-12), name


def launched(folder: Path) -> None:
    """One rank: a step in which there is room, and one in which there is none."""
    dist.init_process_group("gloo")
    model = routed(DROPLESS, "all to one")
    print(f"loss {float(Runner(load_plan(folder / 'room.json'), copy.deepcopy(model)).step(batch())):.12f}")
    try:
        Runner(load_plan(folder / "none.json"), copy.deepcopy(model)).step(batch())
    except RunError as error:
        print(error)
        raise SystemExit(error.exit_status) from None


@pytest.mark.slow
def test_processes_say_it_too(tmp_path: Path) -> None:
    model = routed(DROPLESS, "all to one")
    for name, buffer in (("room", 2.0), ("none", 1.9)):
        plan_of(model, **SHARED, ep_buffer=buffer).save(tmp_path / f"{name}.json")
    want = float(plain_step(model, moe_token_sum, batch(), 2)[0])
    for output in launch(2, "tests.parallelize.test_experts", str(tmp_path), statuses=(1,)):
        assert float(output.partition("loss ")[2].split()[0]) == pytest.approx(want, rel=1e-10)
        assert "give ep_buffer = 2.0" in output


# Loads.

Counted = dict[tuple[str, str], Tensor]
"""(module of experts, name) -> its value."""


def seen_by(plan: Plan, model: nn.Module, given: Any = None) -> tuple[Observed, ...]:
    def work(runner: Runner) -> tuple[Observed, ...]:
        runner.step(batch() if given is None else given)
        return runner.observed()

    first, *others = run_threads(plan, lambda _: copy.deepcopy(model), work)
    assert all(other == first for other in others)
    return first


def counted(model: MoEGPT, parallel: Parallel, degree: int) -> Counted:
    """By the plain model's routers, microbatch by microbatch, chunk by chunk of the sequence."""
    found: Counted = {}
    config = model.config
    assert isinstance(config, MoEConfig)

    def add(module: str, name: str, value: Tensor, most: bool = False) -> None:
        before = found.get((module, name), torch.zeros_like(value))
        found[module, name] = torch.maximum(before, value) if most else before + value

    def see(module: str) -> Any:
        def hook(_module: nn.Module, _args: Any, routed: Any) -> None:
            chosen_BSK = routed.chosen.view(-1, CONTEXT, TOP_K)
            for start, end in itertools.pairwise(bounds(CONTEXT, degree)):
                counts = torch.bincount(chosen_BSK[:, start:end].flatten(), minlength=EXPERTS)
                rows = int(counts.sum())
                add(module, "rows", counts)
                if config.capacity_factor:
                    add(module, "dropped", (counts - config.capacity(rows // TOP_K)).clamp(min=0))
                elif parallel.ep > 1:
                    most = counts.view(parallel.ep, -1).sum(dim=1).max()
                    add(module, "buffer", (most * parallel.ep / rows).view(1), most=True)

        return hook

    own = copy.deepcopy(model)
    for name, module in own.named_modules():
        if isinstance(module, Router):
            module.register_forward_hook(see(name.replace("router", "experts")))
    for part in batch().chunk(parallel.microbatches * parallel.dp):
        moe_token_sum(own, part)
    return found


@pytest.mark.parametrize(
    ("capacity", "how"),
    [
        (DROPLESS, {"layers": 1, "ep": 2, "dp": 2, "microbatches": 2}),
        (FEW, {"layers": 1, "dp": 2, "microbatches": 2}),
        (FEW, {"layers": 1, "ep": 2, "dp": 2, "ampipe_degree": 2}),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (FEW, {"dp": 2, "microbatches": 2}),
                (FEW, {"ep": 2, "dp": 2, "ampipe_degree": 3}),
                (DROPLESS, {}),
                (DROPLESS, {"ep": 2, "dp": 2, "pp": 2, "microbatches": 2, "schedule": "zb-h1"}),
                (DROPLESS, {"ep": 2, "dp": 2, "microbatches": 2, "recompute": "full"}),
                (DROPLESS, {"ep": 2, "dp": 2, "ampipe_degree": 3}),
                (FEW, {"ep": 2, "dp": 4}),
                (ALL, {"ep": 2, "dp": 2, "ampipe_degree": 2, "ampipe_capacity": "whole", "pp": 2}),
                (ALL, {"ep": 2, "dp": 2, "pipe_experts_multi_data": 2}),
            )
        ),
    ],
    ids=str,
)
def test_what_is_observed_is_what_routers_chose(capacity: float | None, how: dict[str, Any]) -> None:
    layers = how.get("layers", 2)
    how = {key: value for key, value in how.items() if key != "layers"}
    parallel = Parallel(**how).model_copy(update={"ep_buffer": 4.0})
    model = model_of(capacity, layers=layers)
    # Experts that serve all chunks together are not called by chunks.
    degree = 1 if parallel.ampipe_capacity == "whole" else int(parallel.ampipe_degree)
    want = counted(model, parallel, degree)
    plan = planned(capture(model, batch(), moe_token_sum, parallel))
    found = {(one.module, one.name): one for one in seen_by(plan, model)}
    if capacity == FEW and degree > 1:
        # Each chunk has its own capacity: what is dropped is other than in the plain model, from there on.
        want = {key: value for key, value in want.items() if key[0] == next(iter(want))[0]}
        found = {key: value for key, value in found.items() if key in want}
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert found[key].mean == pytest.approx(value.tolist(), rel=1e-6), key


@pytest.mark.parametrize("evaluation", [False, True])
def test_what_finds_no_room_is_counted(evaluation: bool) -> None:
    """An evaluation drops it where training would end with an error."""
    model = routed(DROPLESS, "all to the first rank", layers=1)
    how: dict[str, Any] = {**SHARED, "ep_buffer": 1.5}
    if evaluation:
        training = captured(model, **how)
        layout = layout_of(model, Parallel(**how))
        job = capture_evaluation(model, batch(), moe_token_sum, training, layout=layout)
        costs, of_ops = (described_costs(one, cores(link_gbps=0.05)) for one in (training, job))
        plan = make_plan(job, replace(costs, op_us=of_ops.op_us))
    else:
        plan = plan_of(model, **how, ep_overflow="drop")
    rows = ROWS // 2 * CONTEXT * TOP_K  # of a rank, all of them for the first rank's experts
    lost = 2 * (rows - math.ceil(1.5 * rows / 2))
    found = seen_by(plan, model)
    assert [one.mean for one in found if one.name == "dropped"] == [(0, lost, 0, 0)]
    if not evaluation:
        assert [one.mean for one in found if one.name == "rows"] == [(rows, rows, 0, 0)]
        assert [one.mean for one in found if one.name == "buffer"] == [(2.0,)]


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_of_transformers_are_seen_where_ranks_share_them(ep: int) -> None:
    pytest.importorskip("transformers")
    kind, own = THEIRS["mixtral"]
    model = from_transformers(kind, **{**SIZES, **own, "num_hidden_layers": 1}).double()
    parallel = Parallel(dp=2, overlap="off", **({"ep": 2, "ep_buffer": 4.0} if ep == 2 else {}))  # type: ignore[arg-type]
    job = capture(model, their_batch(), huggingface_sum, parallel)
    found = seen_by(planned(job), model, their_batch())
    rows = [sum(one.mean) for one in found if one.name == "rows"]
    assert rows == ([4 * CONTEXT * TOP_K] if ep == 2 else [])


if __name__ == "__main__":
    launched(Path(sys.argv[1]))
