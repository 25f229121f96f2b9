"""The model that a Runner was made of: what is trained elsewhere cannot be read or copied in silence."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import stretto
from stretto.models.gpt import next_token_loss
from stretto.runtime.old_adapter import Mark, is_old, mark_old, unmark, unmarked
from stretto.runtime.runner import Runner
from stretto.runtime.transport import ThreadTransport
from tests.capturing.zoo import BatchNorm, Chain, mean_square, rows
from tests.parallelize.equality import batch_of
from tests.runtime.equality import lowered
from tests.runtime.test_state_dict import SPREAD, run, told
from tests.saving.test_face import LAYOUTS, STEPS, adamw, model, plan_of, train, trained


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
            assert "is not what was trained" in found[1]
            assert "Take runner.state_dict()" in found[1]
    for found in run("dp", work):
        assert not any(found)


def test_before_an_optimizer_has_stepped_the_model_can_be_read() -> None:
    def work(runner: Runner, old: nn.Module) -> list[str]:
        before = {name: value.clone() for name, value in old.state_dict().items()}
        runner.step(batch_of())
        copied = copy.deepcopy(old)  # the values are as they were
        assert all(torch.equal(copied.state_dict()[name], value) for name, value in before.items())
        assert not any(map(is_old, copied.parameters()))
        runner.step(batch_of())
        found = [told(old.state_dict)]
        with torch.no_grad():  # an optimizer that is none of PyTorch's kind
            for parameter in runner.parameters():
                parameter.data.add_(0.1)
        runner.step(batch_of())
        return [*found, told(old.state_dict), told(lambda: copy.deepcopy(old))]

    for layout in ("sp", "pp"):
        for found in run(layout, work):
            assert [bool(one) for one in found] == [False, True, True], found


def test_ranks_that_share_one_model_train_all_of_it() -> None:
    shared = gpt_untied()

    def work(runner: Runner) -> None:
        train(runner, adamw(runner.named_parameters()), 1)
        runner.transport.all_gather(None)
        shared.state_dict()

    job = stretto.capture(shared, batch_of(), next_token_loss, stretto.Parallel(pp=2, microbatches=4))
    stretto.run_threads(lowered(job, "1f1b"), lambda _: shared, work)


def gpt_untied() -> nn.Module:
    from tests.parallelize.equality import gpt

    return gpt().double()


def test_an_optimizer_over_the_old_model_is_refused_at_its_first_step() -> None:
    def work(runner: Runner, old: nn.Module) -> str:
        optimizer = torch.optim.AdamW(old.parameters())
        runner.step(batch_of())
        return told(optimizer.step)

    for found in run("tp", work):
        assert "the model's 'embedding.weight' is not what was trained" in found
        assert "gets no gradient" in found
        assert "make averages and optimizers over runner.parameters()" in found
    assert run("pp", work) == ["", ""]  # it trains what this rank has


def test_a_model_that_is_loaded_later_reaches_the_runner() -> None:
    values = trained(adamw, STEPS)

    def work(runner: Runner, old: nn.Module) -> dict[str, Tensor]:
        old.load_state_dict(values)
        runner.step(batch_of())
        return runner.state_dict()

    for layout in ("sp", "pp tp"):
        for found in run(layout, work):
            assert all(torch.equal(found[name], value) for name, value in values.items())


def test_what_is_not_loaded_stays_trained() -> None:
    def work(runner: Runner, old: nn.Module) -> tuple[Tensor, Tensor]:
        train(runner, adamw(runner.named_parameters()), 1)
        old.load_state_dict({"norm.weight": torch.full((32,), 2.0)}, strict=False)
        found = runner.state_dict()
        return found[SPREAD], found["norm.weight"]

    for spread, norm in run("tp", work):
        assert not torch.equal(spread, model().state_dict()[SPREAD])
        assert (norm == 2).all()


def test_a_model_that_is_changed_otherwise_is_refused() -> None:
    def assigned(_: Runner, old: nn.Module) -> str:
        return told(lambda: old.load_state_dict(copy.deepcopy(model()).state_dict(), assign=True))

    def drawn(runner: Runner, old: nn.Module) -> str:
        nn.init.normal_(old.get_parameter(SPREAD).data)
        return told(lambda: runner.step(batch_of()))

    def set_by_hand(runner: Runner, old: nn.Module) -> str:
        old.get_submodule("norm").weight = nn.Parameter(torch.ones(32))
        return told(lambda: runner.step(batch_of()))

    for found in run("tp", assigned):
        assert "is another tensor since the Runner was made" in found
    for found in run("tp", drawn):
        assert f"'{SPREAD}' of the model was changed after the Runner was made" in found
    for found in run("tp", set_by_hand):
        assert "'norm.weight' of the model is another tensor" in found


def test_layouts_are_known() -> None:
    assert {"one", "pp", "tp", "sp", "dp", "pp tp", "all"} <= LAYOUTS.keys()


def test_any_use_of_old_values_is_refused() -> None:
    """Tensors that were taken out of the model before, too."""

    def work(runner: Runner, old: nn.Module) -> list[str]:
        kept = list(old.parameters())
        train(runner, adamw(runner.named_parameters()), 1)
        uses: list[Callable[[], Any]] = [
            lambda: next_token_loss(old, batch_of()),
            lambda: copy.deepcopy(old),
            lambda: torch.save(old, io.BytesIO()),
            lambda: pickle.dumps(old),
            lambda: old.to(torch.float32),
            lambda: nn.utils.parameters_to_vector(old.parameters()),
            lambda: [torch.zeros_like(p).lerp_(p, 0.1) for p in kept],
            lambda: torch._foreach_mul(kept, 2.0),
            lambda: [p.data.clone() for p in kept],
            lambda: stretto.Runner(plan_of("one"), old),
        ]
        found = [told(use) for use in uses]
        assert sum(p.numel() for p in old.parameters()) == sum(p.numel() for p in model().parameters())
        assert all(p.requires_grad and str(p) for p in old.parameters())
        olds.append(old)
        return found

    olds: list[nn.Module] = []
    for layout in ("tp", "pp"):
        for found in run(layout, work):
            assert all("is not what was trained" in one for one in found), found
            assert all("make averages and optimizers over runner.parameters()" in one for one in found)
            assert found[-1].startswith("a Runner is made of another Runner's model")
    stretto.capture(olds[0], batch_of(), next_token_loss, stretto.Parallel())


def averaged(old: nn.Module) -> Callable[[], Any]:
    average = AveragedModel(old, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    return lambda: average.update_parameters(old)  # type: ignore[no-untyped-call]


def ema_pytorch(old: nn.Module) -> Callable[[], Any]:
    average = pytest.importorskip("ema_pytorch").EMA(old, update_after_step=0, update_every=1)
    return lambda: average.update()


def torch_ema(old: nn.Module) -> Callable[[], Any]:
    """Keeps references to the parameters, and walks no module."""
    average = pytest.importorskip("torch_ema").ExponentialMovingAverage(old.parameters(), decay=0.9)
    return lambda: average.update()


def diffusers_ema(old: nn.Module) -> Callable[[], Any]:
    average = pytest.importorskip("diffusers.training_utils").EMAModel(list(old.parameters()), foreach=True)
    return lambda: average.step(old.parameters())


@pytest.mark.parametrize("make", [averaged, ema_pytorch, torch_ema, diffusers_ema])
def test_averages_of_the_old_model_are_refused(make: Callable[[nn.Module], Callable[[], Any]]) -> None:
    def work(runner: Runner, old: nn.Module) -> str:
        update = make(old)
        train(runner, adamw(runner.named_parameters()), 1)
        return told(update)

    for layout in ("tp", "pp"):
        assert all("is not what was trained" in one for one in run(layout, work))
    assert run("dp", work) == ["", ""]


def test_a_mark_outlives_the_runner_until_values_are_written() -> None:
    def work(runner: Runner, old: nn.Module) -> nn.Module:
        train(runner, adamw(runner.named_parameters()), 1)
        whole = old.get_parameter(SPREAD)
        with torch.no_grad():
            assert "is not what was trained" in told(lambda: whole.copy_(torch.zeros(96, 32)))
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
        return [is_old(b) == (name not in mine) for name, b in models[runner.rank].named_buffers()]

    found = stretto.run_threads(lowered(job, "1f1b"), models.__getitem__, work)
    assert all(map(all, found))
    assert any(is_old(buffer) for model in models for buffer in model.buffers())


@pytest.mark.parametrize(
    "tensor", [nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3)], ids=["parameter", "buffer"]
)
def test_what_a_mark_answers(tensor: Tensor) -> None:
    kind, trained = type(tensor), [True]
    mark_old(tensor, Mark("old", False, lambda: trained[0]))
    assert isinstance(tensor, kind)
    assert is_old(tensor)
    assert (tensor.shape, tensor.stride(), tensor.numel(), len(tensor)) == ((2, 3), (3, 1), 6, 2)
    assert "old" in repr(tensor)
    assert unmarked(tensor).sum() == 6
    for read in (lambda: tensor.grad, lambda: tensor.data, lambda: tensor.mT, lambda: tensor + 1):
        with pytest.raises(stretto.UsageError, match="old"):
            read()
    tensor.grad = None
    with torch.no_grad(), pytest.raises(stretto.UsageError, match="old"):
        tensor.copy_(torch.zeros(2, 3))
    trained[0] = False
    with torch.no_grad():
        tensor.copy_(torch.zeros(2, 3))
    assert type(tensor) is kind
    assert tensor.sum() == 0
    unmark(tensor)


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


def in_turn(one: Runner, other: Runner) -> str:
    one.step(rows())
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    return told(lambda: other.step(rows())) or told(lambda: other.state_dict())


def test_two_runners_that_are_cut_elsewhere_do_not_train_in_turn() -> None:
    plans = chain_plan("layers.1", pp=2), chain_plan("layers.3", pp=2)
    for found in two(*plans, in_turn) + two(*plans, lambda one, other: in_turn(other, one)):
        assert "another Runner of this model has trained since, and this one has old values" in found
        assert "it holds 'layers.1.weight' on other ranks" in found
        assert "Cut both plans alike (split=, the same layout)" in found
    assert "shares: the plan has 'layers.1.weight' on other ranks" in told(lambda: two(*plans, in_turn, True))


def test_two_runners_that_are_cut_alike_train_in_turn() -> None:
    plans = chain_plan("layers.1", pp=2), chain_plan("layers.1", pp=2)
    assert two(*plans, in_turn) == two(*plans, in_turn, shares=True) == ["", ""]
    plans = chain_plan(dp=2), chain_plan(dp=2)
    assert two(*plans, in_turn) == ["", ""]


def test_two_runners_may_train_what_they_hold_alike() -> None:
    """Of plans that are cut elsewhere, each with an optimizer of its own, as a GAN's."""

    def work(one: Runner, other: Runner) -> list[float]:
        losses = []
        for _ in range(3):
            for runner, layer in ((one, "layers.0."), (other, "out.")):
                mine = [p for name, p in runner.named_parameters() if name.startswith(layer)]
                losses.append(float(runner.step(rows())))
                torch.optim.SGD(mine or [torch.zeros(1)], lr=0.5).step()
                for parameter in (*one.parameters(), *other.parameters()):
                    parameter.grad = None
        return losses

    own, expected = Chain(), []
    for _ in range(3):
        for layer in ("layers.0", "out"):
            own.zero_grad()
            loss = torch.stack([mean_square(own, piece) for piece in rows().chunk(2)]).mean()
            loss.backward()
            expected.append(float(loss.detach()))
            torch.optim.SGD(own.get_submodule(layer).parameters(), lr=0.5).step()
    for found in two(chain_plan("layers.1", pp=2), chain_plan("layers.3", pp=2), work):
        assert found == pytest.approx(expected, rel=1e-10)


def test_one_that_is_loaded_again_goes_on() -> None:
    def work(one: Runner, other: Runner) -> None:
        assert in_turn(one, other)
        other.load_state_dict(one.state_dict())
        assert in_turn(other, one)
        expected = other.state_dict()
        one.load_state_dict(expected)
        assert all(torch.equal(value, expected[name]) for name, value in one.state_dict().items())
        one.step(rows())

    two(chain_plan("layers.1", pp=2), chain_plan("layers.3", pp=2), work)


def test_parts_of_two_runners_are_apart_unless_they_are_shared() -> None:
    def work(shares: bool) -> list[str]:
        models = [copy.deepcopy(model()) for _ in range(2)]

        def both(runner: Runner) -> str:
            given = runner if shares else None
            other = Runner(plan_of("tp"), models[runner.rank], transport=runner.transport, shares=given)
            train(runner, adamw(runner.named_parameters()), 1)
            return told(lambda: other.step(batch_of()))

        return stretto.run_threads(plan_of("tp"), models.__getitem__, both)

    assert all("another Runner of this model has trained since" in one for one in work(False))
    assert work(True) == ["", ""]


def test_a_runner_of_one_rank_beside_one_of_several() -> None:
    """Nobody knows whether the others have one too: a step of the other is enough."""

    def alone(old: nn.Module) -> Runner:
        return Runner(plan_of("one"), old, transport=ThreadTransport.group(1)[0])

    def reads(runner: Runner, old: nn.Module) -> str:
        one = alone(old)
        runner.step(batch_of())
        return told(lambda: one.step(batch_of()))

    def trains(runner: Runner, old: nn.Module) -> str:
        one = alone(old)
        one.step(batch_of())
        return told(lambda: runner.step(batch_of()))

    for layout, work in (("pp", reads), ("tp", reads), ("tp", trains)):
        assert all("another Runner of this model has trained since" in one for one in run(layout, work))
    assert run("dp", reads) == run("dp", trains) == ["", ""]
