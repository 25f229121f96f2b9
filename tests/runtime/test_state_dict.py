"""`Runner.state_dict` and `load_state_dict`: what the plain model's would be, with what its code adds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.runtime.runner import Runner
from tests.capturing.zoo import BatchNorm, Chain, mean_square, rows
from tests.runtime.equality import lowered
from tests.saving.test_face import STEPS, adamw, assert_close, model, plan_of, train, trained

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


def test_a_tied_parameter_has_its_first_name_on_every_rank() -> None:
    owned = run("pp", lambda runner, _: {name: runner.owns(name) for name, _ in runner.named_parameters()})
    assert [names.get("embedding.weight") for names in owned] == [True, False]
    assert {*owned[0], *owned[1]} == {name for name, _ in model().named_parameters()}


@pytest.mark.parametrize("layout", ["pp", "pp tp"])
@pytest.mark.parametrize("exempt", ["embedding", "head"])
def test_groups_by_name_keep_tied_copies_equal(layout: str, exempt: str) -> None:
    """The last stage has the embedding as its head, and knows it by its first name alone."""

    def sgd(named: Any) -> torch.optim.Optimizer:
        groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, parameter in named:
            groups[exempt in name].append(parameter)
        both = ({"params": kept, "weight_decay": 0.0 if free else 0.5} for free, kept in groups.items())
        return torch.optim.SGD([one for one in both if one["params"]], lr=0.05, momentum=0.9)

    def work(runner: Runner, _: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
        train(runner, sgd(runner.named_parameters()), STEPS)
        return runner.state_dict(), dict(runner.named_parameters())["embedding.weight"].detach()

    kept = run(layout, work)
    assert_close(kept[0][0], trained(sgd, STEPS))
    half = len(kept) // 2
    for (_, first), (_, last) in zip(kept[:half], kept[half:], strict=True):
        assert torch.equal(first, last)


def test_one_rank_alone_may_have_it() -> None:
    found = run("pp tp", lambda runner, _: runner.state_dict(only_on=2))
    assert [bool(one) for one in found] == [False, False, True, False]
    assert_close(found[2], model().state_dict())


def test_values_that_do_not_fit_are_refused_on_all_ranks() -> None:
    values = model().state_dict()
    part = values[SPREAD].chunk(2)[0]
    wrong = {
        "it lacks 'norm.weight'": {k: v for k, v in values.items() if k != "norm.weight"},
        "the model has no 'more'": {**values, "more": torch.zeros(1)},
        f"'{SPREAD}' has the shape [48, 32], and the model's full tensor [96, 32]": {**values, SPREAD: part},
        "are one tensor in the model, and are given two values": {
            **values,
            "head.weight": values["head.weight"] + 1,
        },
    }

    def work(runner: Runner, _: nn.Module) -> list[str]:
        return [told(lambda given=given: runner.load_state_dict(given)) for given in wrong.values()]  # type: ignore[misc]

    for found in run("pp tp", work):
        assert all(message in one for message, one in zip(wrong, found, strict=True)), found


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


def test_what_is_not_loaded_is_told() -> None:
    def work(runner: Runner, _: nn.Module) -> tuple[list[str], list[str]]:
        values = runner.state_dict()
        assert runner.load_state_dict(values) == ([], [])
        values["more"] = values.pop("norm.weight")
        left = runner.load_state_dict(values, strict=False)
        return left.missing_keys, left.unexpected_keys

    assert run("tp", work) == [(["norm.weight"], ["more"])] * 2


# What the model's own code makes of it.


class Extra(Chain):
    """Extra state in a part of it, and a key that a hook computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Counted(8, 8).double()
        self.register_state_dict_post_hook(_with_norm)
        self.register_load_state_dict_pre_hook(_without_norm)  # type: ignore[no-untyped-call]


class Counted(nn.Linear):
    seen = 7

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "twice": self.weight.detach() * 2}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def _with_norm(module: nn.Module, values: dict[str, Any], prefix: str, _: Any) -> None:
    values[prefix + "norm"] = torch.stack([v.norm() for v in values.values() if isinstance(v, Tensor)]).norm()


def _without_norm(module: nn.Module, values: dict[str, Any], prefix: str, *_: Any) -> None:
    values.pop(prefix + "norm", None)


class Renamed(Chain):
    """Saved under other names, and loaded from them."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(self._renamed)
        self.register_load_state_dict_pre_hook(_named_back)  # type: ignore[no-untyped-call]

    @staticmethod
    def _renamed(module: nn.Module, values: dict[str, Any], prefix: str, _: Any) -> None:
        for key in [key for key in values if key.startswith(prefix + "layers.")]:
            values[key.replace("layers.", "blocks.")] = values.pop(key)


def _named_back(module: nn.Module, values: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in values if key.startswith(prefix + "blocks.")]:
        values[key.replace("blocks.", "layers.")] = values.pop(key)


def wrapped() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    made = Chain()
    for at in (2, 3):
        made.layers[at] = checkpoint_wrapper(made.layers[at])
    return made


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.allclose(one, other, rtol=1e-10)
    return bool(one == other)


PIPELINE, COPIES = {"pp": 2, "split": ["layers.2"]}, {"dp": 2}
SPREAD_LAYERS = {"layers.0": "colwise", "layers.1": "rowwise"}


@pytest.mark.parametrize("layout", [PIPELINE, COPIES, {"tp": 2}], ids=["pp", "dp", "tp"])
@pytest.mark.parametrize("kind", [Extra, Renamed, wrapped])
def test_it_has_all_that_the_plain_models_code_makes(
    kind: Callable[[], nn.Module], layout: dict[str, Any]
) -> None:
    own, models = kind(), [kind() for _ in range(2)]
    parallel = stretto.Parallel(**layout, microbatches=2)
    job = stretto.capture(
        own, rows(), mean_square, parallel, tp_plan=SPREAD_LAYERS if "tp" in layout else None
    )
    pieces = rows().chunk(2 * layout.get("dp", 1))
    torch.stack([mean_square(own, piece) for piece in pieces]).mean().backward()
    torch.optim.SGD(own.parameters(), lr=0.5).step()
    expected = own.state_dict()

    def work(runner: Runner) -> dict[str, Any]:
        start = runner.state_dict()
        runner.step(rows())
        torch.optim.SGD(runner.parameters(), lr=0.5).step()
        found = runner.state_dict()
        runner.load_state_dict(start)
        assert same(runner.state_dict(), start)
        assert runner.load_state_dict(found) == ([], [])
        assert same(runner.state_dict(), found)
        return found

    for found in stretto.run_threads(lowered(job, "1f1b"), models.__getitem__, work):
        assert list(found) == list(expected)
        assert same(found, expected)
        kind().load_state_dict(found)


def test_extra_state_is_loaded_and_wrong_keys_are_refused_on_all_ranks() -> None:
    models = [Extra() for _ in range(2)]
    job = stretto.capture(Extra(), rows(), mean_square, stretto.Parallel(pp=2, microbatches=2))

    def work(runner: Runner) -> tuple[str, str, Any]:
        values = runner.state_dict(only_on=1) or Extra().state_dict()
        lacking = {key: value for key, value in values.items() if key != "out.bias"}
        wrong = {**values, "out.bias": torch.zeros(3)}
        said = [told(lambda given=given: runner.load_state_dict(given)) for given in (lacking, wrong)]  # type: ignore[misc]
        values["layers.1._extra_state"] = {"seen": 9}
        left = runner.load_state_dict({**values, "more": torch.zeros(1)}, strict=False)
        return said[0], said[1], left

    for lacking, wrong, left in stretto.run_threads(lowered(job, "1f1b"), models.__getitem__, work):
        assert 'Missing key(s) in state_dict: "out.bias"' in lacking
        assert "size mismatch for out.bias" in wrong
        assert "Give what the plain model's state_dict() has, or strict=False" in wrong
        assert left == ([], ["more"])
    assert [one.get_submodule("layers.1").seen for one in models] == [9, 9]
