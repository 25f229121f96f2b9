"""The model that a Runner was made of: what this rank does not train cannot be read, written or replaced."""

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
from stretto.runtime.given_model_adapter import TakenValue
from stretto.runtime.runner import Runner
from stretto.runtime.transport import ThreadTransport
from tests.capturing.zoo import BatchNorm, Chain, mean_square, rows
from tests.cells import slow
from tests.parallelize.equality import batch_of, gpt
from tests.runtime.equality import lowered
from tests.runtime.test_state_dict import SPREAD, run
from tests.saving.test_face import STEPS, adamw, assert_close, model, plan_of, train, trained

REFUSED = "is not what is trained"


def told(work: Callable[[], Any]) -> str:
    """What is refused; PyTorch's `load_state_dict` puts it into an error of its own."""
    try:
        work()
    except (stretto.UsageError, RuntimeError) as error:
        return str(error)
    return ""


def test_the_old_model_is_not_read_and_another_takes_the_values() -> None:
    def work(runner: Runner, old: nn.Module) -> list[str]:
        found = [told(old.state_dict)]
        train(runner, adamw(runner.named_parameters()), 1)
        found += [told(old.state_dict), told(lambda: copy.deepcopy(old))]
        values = runner.state_dict()
        plain = copy.deepcopy(model())
        plain.load_state_dict(values)
        assert_close(plain.state_dict(), trained(adamw, 1))
        return found

    for layout, names in (("sp", ["embedding.weight"] * 2), ("pp", ["blocks.1", "position"])):
        for rank, found in enumerate(run(layout, work)):
            assert all(f"the model's '{names[rank]}" in one and REFUSED in one for one in found), found
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


def test_ranks_that_share_one_model_cut_their_parts_of_it() -> None:
    shared = copy.deepcopy(model())
    found = stretto.run_threads(plan_of("tp"), lambda _: shared, lambda runner: runner.state_dict())
    for values in found:
        assert_close(values, model().state_dict())
    assert REFUSED in told(shared.state_dict)


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_an_optimizer_over_the_old_model_is_refused_at_its_first_step(layout: str) -> None:
    def work(runner: Runner, old: nn.Module) -> str:
        optimizer = torch.optim.AdamW(old.parameters())
        runner.step(batch_of())
        return told(optimizer.step)

    assert all(REFUSED in found for found in run(layout, work))


def loaded(old: nn.Module) -> None:
    old.load_state_dict(trained(adamw, STEPS))


def assigned(old: nn.Module) -> None:
    old.load_state_dict(trained(adamw, STEPS), assign=True)


def set_through_data(old: nn.Module) -> None:
    for parameter in old.parameters():
        parameter.data.zero_()


def set_in_place(old: nn.Module) -> None:
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.zero_()


@pytest.mark.parametrize("change", [loaded, assigned, set_through_data, set_in_place])
@pytest.mark.parametrize(("layout", "steps"), [("sp", 0), slow("pp tp", 1), slow("pp tp", 0), slow("sp", 1)])
def test_what_is_written_to_the_model_is_refused(
    layout: str, change: Callable[[nn.Module], None], steps: int
) -> None:
    def work(runner: Runner, old: nn.Module) -> str:
        train(runner, adamw(runner.named_parameters()), steps)
        return told(lambda: change(old))

    assert all(REFUSED in found for found in run(layout, work))


@pytest.mark.parametrize("change", [loaded, set_through_data, set_in_place])
def test_what_is_written_to_tensors_that_are_trained_reaches_the_runner(
    change: Callable[[nn.Module], None],
) -> None:
    def work(runner: Runner, old: nn.Module) -> None:
        change(old)
        runner.step(batch_of())
        assert_close(runner.state_dict(), expected.state_dict())

    change(expected := copy.deepcopy(model()))
    run("dp", work)


def test_what_is_written_to_the_runner_before_the_first_step_stays() -> None:
    def work(runner: Runner, _: nn.Module) -> Tensor:
        with torch.no_grad():
            dict(runner.named_parameters())[SPREAD].fill_(0.5)
        runner.step(batch_of())
        return runner.state_dict()[SPREAD]

    assert all((found == 0.5).all() for found in run("tp", work))


def set_by_hand(old: nn.Module) -> None:
    old.get_submodule("norm").weight = nn.Parameter(torch.ones(32))


def set_what_is_sharded(old: nn.Module) -> None:
    old.get_submodule("blocks.0.attention.qkv").weight = nn.Parameter(torch.ones(96, 32))


@pytest.mark.parametrize("change", [assigned, set_by_hand, set_what_is_sharded])
@pytest.mark.parametrize("layout", ["one", "dp", "pp", "tp"])
def test_other_tensors_in_the_model_are_refused_while_there_is_a_runner(
    layout: str, change: Callable[[nn.Module], None]
) -> None:
    def work(_: Runner, old: nn.Module) -> tuple[str, nn.Module]:
        return told(lambda: change(old)), old

    found = run(layout, work)
    gc.collect()
    for said, old in found:
        assert f"which is replaced, {REFUSED}" in said
        change(old)


def test_any_use_of_old_values_is_refused() -> None:
    """Tensors that were taken out of the model before, too."""

    def work(runner: Runner, old: nn.Module) -> list[str]:
        kept = list(old.parameters())
        average = AveragedModel(copy.deepcopy(model()), multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
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
            lambda: [p.grad for p in kept],
            lambda: [p.tolist() for p in kept],
            lambda: [p.numpy(force=True) for p in kept],
            lambda: [p.untyped_storage() for p in kept],
            lambda: [p.register_hook(print) for p in kept],
            lambda: old.zero_grad(),
            lambda: stretto.Runner(one, old, transport=ThreadTransport.group(1)[0]),
        ]
        found = [told(use) for use in uses]
        assert sum(p.numel() for p in old.parameters()) == sum(p.numel() for p in model().parameters())
        assert all(p.requires_grad for p in old.parameters())
        olds.append(old)
        return found

    olds: list[nn.Module] = []
    one = plan_of("one")
    for layout in ("tp", "pp"):
        for found in run(layout, work):
            assert all(REFUSED in one for one in found), found
    stretto.capture(olds[0], batch_of(), next_token_loss, stretto.Parallel())


def test_the_refusal_outlives_the_runner_until_there_are_new_tensors() -> None:
    def work(runner: Runner, old: nn.Module) -> nn.Module:
        train(runner, adamw(runner.named_parameters()), 1)
        return old

    values = model().state_dict()
    for old in run("tp", work):
        gc.collect()
        assert REFUSED in told(old.state_dict)
        old.load_state_dict(values, assign=True)
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
            isinstance(b, TakenValue) == (name not in mine) for name, b in models[runner.rank].named_buffers()
        ]

    found = stretto.run_threads(lowered(job, "1f1b"), models.__getitem__, work)
    assert all(map(all, found))
    assert any(isinstance(buffer, TakenValue) for model in models for buffer in model.buffers())


def test_ranks_that_share_one_model_write_their_buffers_of_it() -> None:
    shared = BatchNorm().double()
    parallel = stretto.Parallel(pp=2, microbatches=2, split=["layers.2"])
    job = stretto.capture(shared, rows(4).double(), mean_square, parallel)
    stretto.run_threads(lowered(job, "1f1b"), lambda _: shared, lambda r: r.step(rows(4).double()))
    assert all(torch.isfinite(value).all() for value in shared.state_dict().values())


def test_what_a_refused_tensor_tells() -> None:
    def work(_: Runner, old: nn.Module) -> None:
        tensor = old.get_parameter(SPREAD)
        assert isinstance(tensor, nn.Parameter)
        assert (tensor.shape, tensor.stride(), tensor.numel(), len(tensor)) == ((96, 32), (32, 1), 3072, 96)
        assert (tensor.dtype, tensor.device.type, tensor.dim()) == (torch.float64, "cpu", 2)
        assert tensor.requires_grad
        assert tensor.is_floating_point()
        other = torch.zeros(96, 32)
        for use in (
            lambda: tensor.mT,
            lambda: other.copy_(tensor),
            lambda: other + tensor,
            lambda: tensor.copy_(other),
            lambda: str(tensor),
        ):
            with pytest.raises(stretto.UsageError, match=f"the model's '{SPREAD}' {REFUSED}"):
                use()

    run("tp", work)


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


TWO_CUTS = chain_plan("layers.1", pp=2), chain_plan("layers.3", pp=2)
SAME_CUT = chain_plan("layers.1", pp=2), chain_plan("layers.1", pp=2)
COPIES = chain_plan(dp=2), chain_plan(dp=2)


@pytest.mark.parametrize(
    ("plans", "shares", "word"),
    [
        (TWO_CUTS, False, "for a second Runner of the model, capture both with one split"),
        (TWO_CUTS[::-1], False, REFUSED),
        (TWO_CUTS, True, "shares: the plan has 'layers.1.weight' on other ranks"),
        ((TWO_CUTS[0], COPIES[0]), False, REFUSED),
        ((COPIES[0], TWO_CUTS[0]), False, REFUSED),
        (SAME_CUT, False, ""),
        (SAME_CUT, True, ""),
        (COPIES, False, ""),
    ],
)
def test_two_runners_train_in_turn_where_they_are_cut_alike(plans: Any, shares: bool, word: str) -> None:
    assert word in (found := told(lambda: two(*plans, in_turn, shares)))
    assert bool(word) == bool(found)


@pytest.mark.parametrize("shares", [False, True])
def test_a_second_runner_of_sharded_parameters_shares_those_of_the_first(shares: bool) -> None:
    def work(runner: Runner, old: nn.Module) -> str:
        given = runner if shares else None
        return told(
            lambda: Runner(plan_of("tp"), old, transport=runner.transport, shares=given).step(batch_of())
        )

    assert [REFUSED in one for one in run("tp", work)] == [not shares] * 2
