"""`Runner.state_dict` and `load_state_dict`; and the model that a Runner was made of, which is not what is
trained: whoever takes it for that is told.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.models.gpt import next_token_loss
from stretto.runtime.runner import Runner
from tests.capture.zoo import BatchNorm, mean_square, rows
from tests.parallelize.test_tensor_equality import batch_of
from tests.runtime.equality import lowered
from tests.saving.test_face import LAYOUTS, STEPS, adamw, assert_close, model, plan_of, train, trained

SPREAD = "blocks.0.attention.qkv.weight"


def run(layout: str, work: Callable[[Runner, nn.Module], Any]) -> list[Any]:
    """`work` on every rank, with the model that its Runner was made of."""
    given: dict[int, nn.Module] = {}

    def own(rank: int) -> nn.Module:
        return given.setdefault(rank, copy.deepcopy(model()))

    return stretto.run_threads(plan_of(layout), own, lambda runner: work(runner, given[runner.rank]))


def told(work: Callable[[], Any]) -> str:
    try:
        work()
    except stretto.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", ["one", "pp", "sp", "all"])
def test_it_is_the_plain_models_trained(layout: str) -> None:
    def work(runner: Runner, _: nn.Module) -> dict[str, Tensor]:
        train(runner, adamw(runner.named_parameters()), STEPS)
        return runner.state_dict()

    expected = trained(adamw, STEPS)
    for found in run(layout, work):
        assert_close(found, expected)
        assert found["head.weight"] is found["embedding.weight"]
        copy.deepcopy(model()).load_state_dict(found)


def test_one_rank_alone_may_have_it() -> None:
    found = run("pp tp", lambda runner, _: runner.state_dict(only_on=2))
    assert [bool(one) for one in found] == [False, False, True, False]
    assert_close(found[2], model().state_dict())


@pytest.mark.parametrize("layout", ["pp", "sp", "all"])
def test_values_of_a_plain_model_are_taken(layout: str) -> None:
    values = trained(adamw, STEPS)

    def work(runner: Runner, _: nn.Module) -> dict[str, Tensor]:
        runner.load_state_dict({name: value for name, value in values.items() if name != "head.weight"})
        return runner.state_dict()

    for found in run(layout, work):
        assert all(torch.equal(found[name], value) for name, value in values.items())


def test_values_that_do_not_fit_are_refused_on_all_ranks() -> None:
    values = model().state_dict()
    part = values[SPREAD].chunk(2)[0]
    wrong = {
        "it lacks 'norm.weight'": {k: v for k, v in values.items() if k != "norm.weight"},
        "the model has no 'more'": {**values, "more": torch.zeros(1)},
        f"'{SPREAD}' has the shape [48, 32], and the whole in the model [96, 32]": {**values, SPREAD: part},
        "are one tensor in the model, and are given two values": {
            **values,
            "head.weight": values["head.weight"] + 1,
        },
    }

    def work(runner: Runner, _: nn.Module) -> list[str]:
        return [told(lambda given=given: runner.load_state_dict(given)) for given in wrong.values()]  # type: ignore[misc]

    for found in run("pp tp", work):
        assert all(message in one for message, one in zip(wrong, found, strict=True)), found


def test_ranks_with_other_values_are_found() -> None:
    def work(runner: Runner, _: nn.Module) -> str:
        values = {name: value + runner.rank for name, value in model().state_dict().items()}
        return told(lambda: runner.load_state_dict(values))

    assert all("has other values on rank 1 than on rank 0" in one for one in run("dp", work))


def test_buffers_are_in_it() -> None:
    plain = BatchNorm().double()
    job = stretto.capture(plain, rows(4).double(), mean_square, stretto.Parallel(pp=2, microbatches=2))
    own = copy.deepcopy(plain)
    for part in rows(4).double().chunk(2):
        mean_square(own, part)

    def work(runner: Runner) -> dict[str, Tensor]:
        runner.step(rows(4).double())
        return runner.state_dict()

    for found in stretto.run_threads(lowered(job, "1f1b"), lambda _: copy.deepcopy(plain), work):
        assert_close(found, own.state_dict())


class WithMore(nn.Module):
    """A parameter that no computation reads, a buffer that is not saved, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.tensor(2))
        self.register_buffer("table", torch.ones(4, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x * self.table) * self.scale
        return found


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}])
def test_its_keys_are_the_plain_models_with_what_nobody_uses(layout: dict[str, int]) -> None:
    plain = WithMore()
    parallel = stretto.Parallel(**layout, microbatches=2)
    job = stretto.capture(plain, torch.ones(4, 4), mean_square, parallel, precision="bf16")
    values = {name: value + 1 for name, value in plain.state_dict().items()}

    def work(runner: Runner) -> None:
        assert_close(runner.state_dict(), plain.state_dict())
        train_one(runner)
        runner.load_state_dict(values)
        found = runner.state_dict()
        assert list(found) == list(values)
        assert all(found[name].dtype is value.dtype for name, value in values.items())
        assert all(torch.equal(found[name], value) for name, value in values.items())

    def train_one(runner: Runner) -> None:
        runner.step(torch.ones(4, 4))
        torch.optim.SGD(runner.parameters(), lr=0.1).step()

    stretto.run_threads(lowered(job, "1f1b"), lambda _: copy.deepcopy(plain), work)


# The old model.


def test_reading_the_old_model_is_refused_until_it_is_loaded_again() -> None:
    def work(runner: Runner, old: nn.Module) -> list[str]:
        optimizer = adamw(runner.named_parameters())
        found = [told(old.state_dict)]  # as yet it is what the runner has
        train(runner, optimizer, 1)
        found += [told(old.state_dict), told(lambda: torch.save(old, io.BytesIO()))]
        copied = copy.deepcopy(old)
        found.append(told(copied.state_dict))  # a model of its own
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


def test_computing_with_the_old_model_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    def work(runner: Runner, old: nn.Module) -> None:
        next_token_loss(old, batch_of())
        train(runner, adamw(runner.named_parameters()), 1)
        old.load_state_dict(runner.state_dict())
        next_token_loss(old, batch_of())
        assert not [one for one in recwarn if "old model" in str(one.message)]
        runner.transport.all_gather(None)
        train(runner, adamw(runner.named_parameters()), 1)
        if runner.rank == 0:
            stretto.capture(old, batch_of(), next_token_loss, stretto.Parallel())
        assert not [one for one in recwarn if "old model" in str(one.message)]
        runner.transport.all_gather(None)
        if runner.rank == 0:
            for _ in range(2):
                next_token_loss(old, batch_of())
            assert sum("old model" in str(one.message) for one in recwarn) == 1
        runner.transport.all_gather(None)
        if runner.rank == 1:
            stretto.Runner(plan_of("one"), old)

    run("tp", work)
    told = [str(one.message) for one in recwarn if "old model" in str(one.message)]
    assert len(told) == 2
    assert told[0].startswith(
        "this is a forward of a Runner's old model, whose 'embedding.weight' (and more)"
    )
    assert told[1].startswith("a Runner is made of another Runner's old model")


def test_ranks_that_share_one_model_train_all_of_it() -> None:
    shared = gpt_untied()

    def work(runner: Runner) -> None:
        train(runner, adamw(runner.named_parameters()), 1)
        runner.transport.all_gather(None)
        shared.state_dict()

    job = stretto.capture(shared, batch_of(), next_token_loss, stretto.Parallel(pp=2, microbatches=4))
    stretto.run_threads(lowered(job, "1f1b"), lambda _: shared, work)


def gpt_untied() -> nn.Module:
    from tests.parallelize.test_tensor_equality import gpt

    return gpt().double()


def test_an_optimizer_over_the_old_model_is_refused_at_its_first_step() -> None:
    def work(runner: Runner, old: nn.Module) -> str:
        optimizer = torch.optim.AdamW(old.parameters())
        runner.step(batch_of())
        return told(optimizer.step)

    for found in run("tp", work):
        assert "the optimizer has the model's own 'embedding.weight', which gets no gradient" in found
        assert "Make the optimizer over runner.parameters()" in found
    assert run("pp", work) == ["", ""]  # it trains what this rank has


@pytest.mark.filterwarnings("ignore:this is a forward of a Runner's old model")
def test_the_plain_model_may_be_trained_beside_the_runner() -> None:
    def work(runner: Runner, old: nn.Module) -> None:
        optimizer = torch.optim.AdamW(old.parameters())
        runner.step(batch_of())
        next_token_loss(old, batch_of()).backward()
        optimizer.step()

    run("tp", work)


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


def test_the_model_may_go_and_its_hooks_with_the_runner() -> None:
    def work(runner: Runner, old: nn.Module) -> None:
        train(runner, adamw(runner.named_parameters()), 1)

    kept: list[nn.Module] = []
    run("tp", lambda runner, old: (work(runner, old), kept.append(old)))
    gc.collect()
    for old in kept:
        old.state_dict()
        torch.load(_written(old), weights_only=False).state_dict()


def _written(old: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(old, file)
    file.seek(0)
    return file


def test_layouts_are_known() -> None:
    assert {"one", "pp", "tp", "sp", "dp", "pp tp", "all"} <= LAYOUTS.keys()


def test_what_is_not_loaded_is_told() -> None:
    def work(runner: Runner, _: nn.Module) -> tuple[list[str], list[str]]:
        values = runner.state_dict()
        assert runner.load_state_dict(values) == ([], [])
        values["more"] = values.pop("norm.weight")
        left = runner.load_state_dict(values, strict=False)
        return left.missing_keys, left.unexpected_keys

    assert run("tp", work) == [(["norm.weight"], ["more"])] * 2
