"""The model that a Runner was made of: what is trained elsewhere cannot be read or copied in silence."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import stretto
from stretto.models.gpt import next_token_loss
from stretto.runtime.runner import Runner
from stretto.runtime.stale_adapter import mark_of, mark_stale, unmarked
from stretto.runtime.transport import ThreadTransport
from tests.capturing.zoo import BatchNorm, Chain, mean_square, rows
from tests.parallelize.equality import batch_of, gpt
from tests.runtime.equality import lowered
from tests.runtime.test_state_dict import SPREAD, run, told
from tests.saving.test_face import STEPS, adamw, model, plan_of, train, trained


def test_reading_the_old_model_is_refused_until_it_is_loaded_again() -> None:
    def work(runner: Runner, old: nn.Module) -> list[str]:
        optimizer = adamw(runner.named_parameters())
        found = [told(old.state_dict)]  # as yet it is what the runner has
        copied = copy.deepcopy(old)  # a model of its own
        train(runner, optimizer, 1)
        found += [told(old.state_dict), told(lambda: copy.deepcopy(old)), told(copied.state_dict)]
        values = runner.state_dict()
        old.load_state_dict(values)
        found.append(told(old.state_dict))
        assert all(torch.equal(old.state_dict()[name], value) for name, value in values.items())
        assert all(torch.equal(runner.state_dict()[name], value) for name, value in values.items())
        return found

    for layout, names in (("sp", ["embedding.weight"] * 2), ("pp", ["blocks.1", "position"])):
        for rank, found in enumerate(run(layout, work)):
            assert [bool(one) for one in found] == [False, True, True, False, False], found
            assert f"the model's '{names[rank]}" in found[1]
    for found in run("dp", work):
        assert not any(found)


def test_ranks_that_share_one_model_train_all_of_it() -> None:
    shared = gpt().double()

    def work(runner: Runner) -> None:
        train(runner, adamw(runner.named_parameters()), 1)
        runner.transport.all_gather(None)
        names.append(sorted(shared.state_dict()))

    names: list[list[str]] = []
    job = stretto.capture(shared, batch_of(), next_token_loss, stretto.Parallel(pp=2, microbatches=4))
    stretto.run_threads(lowered(job, "1f1b"), lambda _: shared, work)
    assert names == [sorted(name for name, _ in shared.named_parameters())] * 2


def test_an_optimizer_over_the_old_model_is_refused_at_its_first_step() -> None:
    def work(runner: Runner, old: nn.Module) -> str:
        optimizer = torch.optim.AdamW(old.parameters())
        runner.step(batch_of())
        return told(optimizer.step)

    for found in run("tp", work):
        assert "the model's 'embedding.weight' is not what was trained" in found
        assert "gets no gradient" in found
    assert run("pp", work) == ["", ""]  # it trains what this rank has


def loaded(_: Runner, old: nn.Module) -> None:
    old.load_state_dict(trained(adamw, STEPS))


def loaded_after_a_step(runner: Runner, old: nn.Module) -> None:
    train(runner, adamw(runner.named_parameters()), 1)
    old.load_state_dict(trained(adamw, STEPS))


def set_through_data(_: Runner, old: nn.Module) -> None:
    values = trained(adamw, STEPS)
    for name, parameter in old.named_parameters():
        parameter.data.copy_(values[name])


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        ("sp", loaded),
        ("pp tp", loaded_after_a_step),
        ("sp", set_through_data),
        pytest.param("pp tp", loaded, marks=pytest.mark.slow),
        pytest.param("sp", loaded_after_a_step, marks=pytest.mark.slow),
        pytest.param("pp tp", set_through_data, marks=pytest.mark.slow),
    ],
)
def test_what_is_written_to_the_model_reaches_the_runner(
    layout: str, change: Callable[[Runner, nn.Module], None]
) -> None:
    def work(runner: Runner, old: nn.Module) -> dict[str, Tensor]:
        change(runner, old)
        runner.step(batch_of())
        return runner.state_dict()

    for found in run(layout, work):
        assert all(torch.equal(found[name], value) for name, value in trained(adamw, STEPS).items())


def test_what_is_written_to_the_runner_before_the_first_step_stays() -> None:
    def work(runner: Runner, _: nn.Module) -> Tensor:
        with torch.no_grad():
            dict(runner.named_parameters())[SPREAD].fill_(0.5)
        runner.step(batch_of())
        return runner.state_dict()[SPREAD]

    assert all((found == 0.5).all() for found in run("tp", work))


def assigned(old: nn.Module) -> None:
    old.load_state_dict(copy.deepcopy(model()).state_dict(), assign=True)


def set_by_hand(old: nn.Module) -> None:
    old.get_submodule("norm").weight = nn.Parameter(torch.ones(32))


@pytest.mark.parametrize("change", [assigned, set_by_hand])
def test_other_tensors_in_the_model_are_refused(change: Callable[[nn.Module], None]) -> None:
    def work(runner: Runner, old: nn.Module) -> str:
        kept = list(old.parameters())
        change(old)
        return told(lambda: runner.step(batch_of())) if kept else ""

    assert all("of the model is another tensor" in found for found in run("tp", work))


def test_any_use_of_old_values_is_refused() -> None:
    """Tensors that were taken out of the model before, too."""

    def work(runner: Runner, old: nn.Module) -> list[str]:
        kept = list(old.parameters())
        average = AveragedModel(old, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        train(runner, adamw(runner.named_parameters()), 1)
        uses: list[Callable[[], Any]] = [
            lambda: next_token_loss(old, batch_of()),
            lambda: copy.deepcopy(old),
            lambda: torch.save(old, io.BytesIO()),
            lambda: pickle.dumps(old),
            lambda: old.to(torch.float64),
            lambda: nn.utils.parameters_to_vector(old.parameters()),
            lambda: [torch.zeros_like(p).lerp_(p, 0.1) for p in kept],
            lambda: average.update_parameters(old),  # type: ignore[no-untyped-call]
            lambda: torch._foreach_mul(kept, 2.0),
            lambda: [p.data.clone() for p in kept],
            lambda: stretto.Runner(one, old, transport=ThreadTransport.group(1)[0]),
        ]
        found = [told(use) for use in uses]
        assert sum(p.numel() for p in old.parameters()) == sum(p.numel() for p in model().parameters())
        assert all(p.requires_grad and str(p) for p in old.parameters())
        olds.append(old)
        return found

    olds: list[nn.Module] = []
    one = plan_of("one")
    for layout in ("tp", "pp"):
        for found in run(layout, work):
            assert all("is not what was trained" in one for one in found), found
    stretto.capture(olds[0], batch_of(), next_token_loss, stretto.Parallel())


def test_a_mark_outlives_the_runner_until_values_are_written() -> None:
    def work(runner: Runner, old: nn.Module) -> nn.Module:
        train(runner, adamw(runner.named_parameters()), 1)
        return old

    values = model().state_dict()
    for old in run("tp", work):
        gc.collect()
        assert "is not what was trained" in told(old.state_dict)
        old.load_state_dict(values)
        assert all(type(p) is nn.Parameter for p in old.parameters())
        copy.deepcopy(old).load_state_dict(old.state_dict())


def test_buffers_that_other_ranks_write_are_old() -> None:
    """On a rank that trains none of the model, and all its parameters are frozen, too."""
    plain = BatchNorm().double()
    parallel = stretto.Parallel(pp=2, microbatches=2, split=["layers.2"])
    job = stretto.capture(plain, rows(4).double(), mean_square, parallel)
    models = [copy.deepcopy(plain) for _ in range(2)]

    def work(runner: Runner) -> list[bool]:
        runner.step(rows(4).double())
        mine = {name for name, _ in runner.named_buffers()}
        return [
            (mark_of(b) is not None) == (name not in mine) for name, b in models[runner.rank].named_buffers()
        ]

    found = stretto.run_threads(lowered(job, "1f1b"), models.__getitem__, work)
    assert all(map(all, found))
    assert any(mark_of(buffer) for model in models for buffer in model.buffers())


@dataclass
class Old:
    """A mark."""

    owner: object = None
    refuses_grad: bool = True
    writes: int = 0

    def written(self) -> None:
        self.writes += 1

    def __str__(self) -> str:
        return "old"


@pytest.mark.parametrize("tensor", [nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3)], ids=["p", "b"])
def test_what_a_mark_answers(tensor: Tensor) -> None:
    kind, mark = type(tensor), Old()
    mark_stale(tensor, mark)  # type: ignore[arg-type]
    assert isinstance(tensor, kind)
    assert (tensor.shape, tensor.stride(), tensor.numel(), len(tensor)) == ((2, 3), (3, 1), 6, 2)
    assert "old" in repr(tensor)
    assert unmarked(tensor).sum() == 6
    other = torch.zeros(2, 3)
    for read in (lambda: tensor.grad, lambda: tensor.data, lambda: tensor.mT, lambda: other.copy_(tensor)):
        with pytest.raises(stretto.UsageError, match="old"):
            read()
    tensor.grad = None
    with torch.no_grad():
        tensor.copy_(torch.zeros(2, 3))
    assert mark.writes == 1
    assert type(tensor) is kind
    assert tensor.sum() == 0
    assert mark_of(tensor) is None


# Two Runners of one model.

TwoRunners = Callable[[Runner, Runner], Any]


def two(first: stretto.Plan, second: stretto.Plan, work: TwoRunners, shares: bool = False) -> list[Any]:
    """`work` with two Runners of each rank's model, made before the first step."""
    models = [Chain(), Chain()]

    def both(runner: Runner) -> Any:
        given = runner if shares else None
        other = Runner(second, models[runner.rank], transport=runner.transport, shares=given)
        return work(runner, other)

    return stretto.run_threads(first, models.__getitem__, both)


def chain_plan(split: str = "", **layout: Any) -> stretto.Plan:
    parallel = stretto.Parallel(microbatches=2, **layout, **({"split": [split]} if split else {}))
    return lowered(stretto.capture(Chain(), rows(), mean_square, parallel), "1f1b")


def in_turn(one: Runner, other: Runner) -> None:
    one.step(rows())
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    other.step(rows())
    other.state_dict()


ELSEWHERE = "another Runner of this model has trained since"
TWO_CUTS = chain_plan("layers.1", pp=2), chain_plan("layers.3", pp=2)
SAME_CUT = chain_plan("layers.1", pp=2), chain_plan("layers.1", pp=2)


@pytest.mark.parametrize(
    ("plans", "shares", "word"),
    [
        (TWO_CUTS, False, ELSEWHERE),
        (TWO_CUTS[::-1], False, ELSEWHERE),
        (TWO_CUTS, True, "shares: the plan has 'layers.1.weight' on other ranks"),
        (SAME_CUT, False, ""),
        (SAME_CUT, True, ""),
        ((chain_plan(dp=2), chain_plan(dp=2)), False, ""),
    ],
)
def test_two_runners_train_in_turn_where_they_are_cut_alike(plans: Any, shares: bool, word: str) -> None:
    assert word in (found := told(lambda: two(*plans, in_turn, shares)))
    assert bool(word) == bool(found)


def test_one_that_is_loaded_again_goes_on() -> None:
    def work(one: Runner, other: Runner) -> None:
        one.step(rows())
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        values = one.state_dict()
        other.load_state_dict(values)
        other.step(rows())
        assert all(torch.equal(value, values[name]) for name, value in other.state_dict().items())
        one.step(rows())

    assert ELSEWHERE in told(lambda: two(*TWO_CUTS, work))


@pytest.mark.parametrize("shares", [False, True])
def test_parts_of_two_runners_are_apart_unless_they_are_shared(shares: bool) -> None:
    def work(runner: Runner, old: nn.Module) -> str:
        given = runner if shares else None
        other = Runner(plan_of("tp"), old, transport=runner.transport, shares=given)
        train(runner, adamw(runner.named_parameters()), 1)
        return told(lambda: other.step(batch_of()))

    assert [ELSEWHERE in one for one in run("tp", work)] == [not shares] * 2
