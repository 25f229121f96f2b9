"""Routing that is as uneven as can be, over ranks that share experts: right numbers, or a plain word.

Routers are told where tokens go. The plain model is told the same, in one process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.config import Parallel
from stretto.errors import RunError
from stretto.ir.serialize import load_plan
from stretto.models.moe import MoEGPT, Routed
from stretto.runtime import Runner, run_threads
from tests.parallelize.test_ampipe import by_chunks
from tests.parallelize.test_experts import (
    DROPLESS,
    FEW,
    assert_equals,
    batch,
    model_of,
    plain,
    plan_of,
    together,
)
from tests.runtime.launch import launch

EXPERTS, TOP_K = 4, 2

Choice = Callable[[Tensor], Tensor]


def _of(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), dim=1)


def _half(n_N: Tensor) -> Tensor:
    """Every other token's first choice is expert 1; others go round."""
    first = torch.where(n_N % 2 == 0, 1, n_N % EXPERTS)
    return _of(first, (first + 1) % EXPERTS)


CHOICES: dict[str, Choice] = {
    "half to one": _half,
    "all to one": lambda n_N: _of(torch.full_like(n_N, 2), torch.full_like(n_N, 2)),
    "all to the last rank": lambda n_N: _of(torch.full_like(n_N, 3), torch.full_like(n_N, 2)),
    "none to one": lambda n_N: _of(n_N % 3, (n_N + 1) % 3),
    "none to the first rank": lambda n_N: _of(2 + n_N % 2, 3 - n_N % 2),
}
"""Token -> its experts. Where all go to one, both choices are the same: the most that one can get."""

NAMES = ["half to one", *(pytest.param(n, marks=pytest.mark.slow) for n in CHOICES if n != "half to one")]
FAST: dict[str, Any] = {"overlap": "off"}
"""The order of ops changes no numbers, and takes most of the time of a plan."""


def told(choice: Choice, capacity: float | None) -> MoEGPT:
    """A model whose routers are told where tokens go; weights and losses are the routers' own."""
    model = copy.deepcopy(model_of(capacity, shared=1))
    for block in model.blocks:
        router = block.mlp.router
        router.forward = partial(_route, router.forward, choice)
    return model


def _route(forward: Callable[[Tensor], Routed], choice: Choice, x_ND: Tensor) -> Routed:
    routed = forward(x_ND)
    n_N = torch.arange(x_ND.shape[0], device=x_ND.device)
    return routed._replace(chosen=choice(n_N))


LAYOUTS: list[Any] = [
    {"ep": 2, "dp": 2},
    pytest.param({"ep": 4, "dp": 4}, marks=pytest.mark.slow),
    pytest.param({"ep": 2, "dp": 4, "pp": 2, "microbatches": 2}, marks=pytest.mark.slow),
    pytest.param({"dp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("how", LAYOUTS, ids=str)
@pytest.mark.parametrize("pieces", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_dropless(name: str, pieces: int, how: dict[str, Any]) -> None:
    ep = how.get("ep", 1)
    if ep > 1:
        how = {**how, "ep_buffer": float(ep), "pipe_experts_multi_data": pieces}
    assert_equals(told(CHOICES[name], DROPLESS), Parallel(**how, **FAST))


@pytest.mark.parametrize("how", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_with_a_capacity(name: str, how: dict[str, Any]) -> None:
    if how.get("ep") == 2:
        how = {**how, "pipe_experts": True, "pipe_experts_multi_data": 3}
    assert_equals(told(CHOICES[name], FEW), Parallel(**how, **FAST))


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [DROPLESS, FEW])
@pytest.mark.parametrize("name", CHOICES)
def test_in_chunks(name: str, capacity: float | None) -> None:
    model = told(CHOICES[name], capacity)
    buffer = {} if capacity else {"ep_buffer": 2.0}
    parallel = Parallel(**FAST, ep=2, dp=2, ampipe_degree=2, **buffer)
    assert_equals(model, parallel, expected=by_chunks(model, 2) if capacity else model)


def test_an_overflow_is_told_on_every_rank_and_nobody_waits() -> None:
    plan = plan_of(told(CHOICES["all to one"], DROPLESS), Parallel(**FAST, ep=2, dp=2, ep_buffer=1.9))
    with pytest.raises(
        RunError, match=r"get 2 times the mean .* room for less: give ep_buffer = 2.0 or more"
    ):
        together(plan, told(CHOICES["all to one"], DROPLESS), batch())


def by_layers(*names: str) -> MoEGPT:
    """Each block's router is told something else."""
    model = copy.deepcopy(model_of(DROPLESS, shared=1))
    for block, name in zip(model.blocks, names, strict=True):
        block.mlp.router.forward = partial(_route, block.mlp.router.forward, CHOICES[name])
    return model


@pytest.mark.parametrize(
    "names",
    [
        ("none to one", "all to the last rank"),
        pytest.param(("all to the last rank", "none to one"), marks=pytest.mark.slow),
    ],
)
def test_an_overflow_names_what_all_layers_need(names: tuple[str, str]) -> None:
    """Of a step in which both have no room for all: 1.33 times the mean, and 2 times."""
    model = by_layers(*names)
    at = names.index("all to the last rank")
    with pytest.raises(
        RunError, match=rf"blocks\.{at}\.mlp\.experts get 2 times .* give ep_buffer = 2.0 or more"
    ):
        together(plan_of(model, Parallel(**FAST, ep=2, dp=2, ep_buffer=1.0)), model, batch())


@pytest.mark.parametrize("name", ["all to one", pytest.param("half to one", marks=pytest.mark.slow)])
def test_without_a_buffer_there_is_room_for_all(name: str) -> None:
    assert_equals(told(CHOICES[name], DROPLESS), Parallel(**FAST, ep=4, dp=4))


def test_a_step_without_room_leaves_no_gradients() -> None:
    model = told(CHOICES["all to one"], DROPLESS)
    plan = plan_of(model, Parallel(**FAST, ep=2, dp=2, ep_buffer=1.0))

    def work(runner: Runner) -> list[bool]:
        with pytest.raises(RunError, match="room for less"):
            runner.step(batch())
        return [p.grad is None for _, p in runner.named_parameters()]

    assert all(map(all, run_threads(plan, lambda _: copy.deepcopy(model), work)))


@pytest.mark.slow
def test_the_factor_that_an_overflow_names_does() -> None:
    model = told(CHOICES["none to the first rank"], DROPLESS)
    with pytest.raises(RunError) as caught:
        together(plan_of(model, Parallel(**FAST, ep=2, dp=2, ep_buffer=1.0)), model, batch())
    factor = float(str(caught.value).partition("give ep_buffer = ")[2].split()[0])
    assert_equals(model, Parallel(**FAST, ep=2, dp=2, ep_buffer=factor))


@pytest.mark.slow
def test_what_is_dropped_adds_nothing() -> None:
    """A rank's buffer that has room for half of the tokens serves the first half."""
    model = told(CHOICES["all to one"], DROPLESS)
    plan = plan_of(model, Parallel(**FAST, ep=2, dp=2, ep_buffer=1.0, ep_overflow="drop"))
    loss, grads = together(plan, model, batch())
    halved = copy.deepcopy(model)
    for block in halved.blocks:
        experts = block.mlp.experts
        experts.forward = partial(_first_half, experts.forward)
    want_loss, want = plain(halved, 2)
    assert abs(loss - want_loss) <= 1e-10 * want_loss
    for name, grad in want.items():
        assert torch.allclose(grads[name], grad, rtol=1e-10, atol=1e-12), name


def _first_half(forward: Any, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Rows are sorted by expert, and all have the same: the first half of tokens, both their choices."""
    kept = (torch.arange(x_ND.shape[0]) < x_ND.shape[0] // 2).to(x_ND.dtype)
    made: Tensor = forward(x_ND, chosen_NK, weights_NK * kept[:, None])
    return made


def launched(folder: Path) -> None:
    """One rank: a step in which there is room, and one in which there is none."""
    dist.init_process_group("gloo")
    model = told(CHOICES["all to one"], DROPLESS)
    runner = Runner(load_plan(folder / "room.json"), copy.deepcopy(model))
    print(f"loss {float(runner.step(batch())):.12f}")
    runner = Runner(load_plan(folder / "none.json"), copy.deepcopy(model))
    try:
        runner.step(batch())
    except RunError as error:
        print(error)
        raise SystemExit(error.exit_status) from None


@pytest.mark.slow
def test_processes_say_it_too(tmp_path: Path) -> None:
    model = told(CHOICES["all to one"], DROPLESS)
    for name, buffer in (("room", 2.0), ("none", 1.9)):
        plan_of(model, Parallel(**FAST, ep=2, dp=2, ep_buffer=buffer)).save(tmp_path / f"{name}.json")
    want, _ = plain(model, 2)
    for told_by_rank in launch(2, "tests.parallelize.test_routing", str(tmp_path), statuses=(1,)):
        loss = float(told_by_rank.partition("loss ")[2].split()[0])
        assert abs(loss - float(want)) <= 1e-10 * float(want)
        assert "give ep_buffer = 2.0 or more, leave ep_buffer out" in told_by_rank


if __name__ == "__main__":
    launched(Path(sys.argv[1]))
