"""What ranks keep in parts: whose rows they have, that these are the model's, and full values of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto.capturing.evaluation import capture_evaluation
from stretto.ir.kept import kept_spec, part_count, part_number
from stretto.runtime.rank_tensors import RankTensors, join
from stretto.runtime.runner import Runner
from stretto.train.clip import GradientClip
from tests.runtime.equality import lowered
from tests.runtime.parts import MODELS, NoSteps, adamw, given, halved, model, plain, plan_of, run, update

CASES = [
    *(("small", layout) for layout in ("zero", "zero of 8", "zero pp", "in groups")),
    *(("gpt", layout) for layout in ("zero of 4", "zero pp", "zero tp", "zero cp", "in groups")),
    *(("experts", layout) for layout in ("zero ep", "in groups, ep")),
]


@pytest.fixture(autouse=True)
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.runtime.runner.RankState", NoSteps)


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_ranks_have_their_rows_and_all_are_the_model(kind: str, layout: str) -> None:
    plan = plan_of(kind, layout)
    full = dict(model(kind).named_parameters())

    def work(runner: Runner) -> tuple[dict[str, int], dict[str, Tensor], set[str]]:
        for known, parameter in runner.tensors.known_parameters():
            number = part_number(plan.job, known, runner.coordinates)
            assert tuple(parameter.shape) == kept_spec(plan.job, known, number).shape
            assert parameter.is_contiguous()
        runner.tensors.check_bound()
        values = {name: parameter.detach() for name, parameter in runner.named_parameters()}
        return runner.coordinates, values, {name for name in values if runner.owns(name)}

    found = run(kind, layout, work)
    for known in plan.job.parameters:
        if known.name != known.tied_to:
            continue
        assert part_count(plan.job, known) > 1
        over = {*known.kept, *(shard.axis for shard in known.shards)}
        groups: dict[tuple[Any, ...], list[Tensor]] = {}
        for at, values, _ in found:
            if known.name in values:
                others = tuple(place for axis, place in at.items() if axis not in over)
                groups.setdefault(others, []).append(values[known.name])
        for parts in groups.values():
            assert torch.equal(join(parts, known, plan.job), full[known.name])
        owned = [values[known.name] for _, values, names in found if known.name in names]
        assert sum(part.numel() for part in owned) == full[known.name].numel()


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_values_in_full_are_those_of_the_plain_model_that_is_updated(kind: str, layout: str) -> None:
    def work(runner: Runner) -> dict[str, Tensor]:
        update(runner, adamw(runner.parameters()), kind, range(2))
        runner.check_copies()
        return runner.state_dict()

    expected = plain(kind, 2)
    for found in run(kind, layout, work):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_values_in_full_are_put_back(kind: str, layout: str) -> None:
    values = model(kind).state_dict()

    def work(runner: Runner) -> dict[str, Tensor]:
        runner.load_state_dict(values)
        return runner.state_dict(only_on=0)

    found = run(kind, layout, work, halved(kind))[0]
    assert all(torch.equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_the_norm_is_that_of_all_gradients(kind: str, layout: str) -> None:
    gradients = given(kind, 0)
    norms = torch.stack([gradient.norm() for gradient in gradients.values()])

    def work(runner: Runner) -> Tensor:
        optimizer = torch.optim.SGD(runner.parameters(), lr=1.0)
        clip = GradientClip(runner, 1.0)
        step = optimizer.step
        kept: list[Tensor] = []
        optimizer.step = lambda: kept.append(clip()) or step()  # type: ignore[method-assign, func-returns-value]
        update(runner, optimizer, kind, [0])
        after = runner.state_dict()
        for name, value in model(kind).state_dict().items():
            change = gradients[name] / (norms.norm() + 1e-6) if name in gradients else 0 * value
            torch.testing.assert_close(value - after[name], change, rtol=1e-9, atol=1e-12)
        return kept[0]

    tied = {p.name: p.tied_to for p in plan_of(kind, layout).job.parameters}
    gradients |= {name: gradients[to] for name, to in tied.items() if to in gradients}
    for norm in run(kind, layout, work):
        torch.testing.assert_close(norm, norms.norm(), rtol=1e-12, atol=0)


def test_models_that_start_apart_are_refused() -> None:
    plan, other = plan_of("small", "zero of 8"), halved("small")
    with pytest.raises(stretto.UsageError, match="has other values on rank 5 than on rank 0"):
        stretto.run_threads(plan, lambda rank: other if rank == 5 else copy.deepcopy(model("small")), id)


def test_copies_that_come_apart_are_refused() -> None:
    def work(runner: Runner) -> None:
        with torch.no_grad():
            if runner.rank == 1:
                dict(runner.named_parameters())["out.weight"].add_(1)
        runner.check_copies()

    run("small", "zero", work)
    with pytest.raises(stretto.UsageError, match=r"'out\.weight' has other values on rank"):
        run("small", "in groups", work)


@pytest.mark.parametrize("how", ["fused", "foreach"])
@pytest.mark.filterwarnings("error")
def test_an_optimizer_may_update_all_at_once(how: str) -> None:
    def work(runner: Runner) -> dict[str, Tensor]:
        update(runner, adamw(runner.parameters(), **{how: True}), "small", range(2))
        with pytest.raises(stretto.UsageError, match="takes the norm of this rank's gradients"):
            torch.nn.utils.clip_grad_norm_(runner.parameters(), 1.0)
        return runner.state_dict(only_on=0)

    found = run("small", "zero of 8", work)[0]
    for name, value in plain("small", 2).items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)


def test_an_optimizer_that_looks_at_full_tensors_is_refused() -> None:
    def work(runner: Runner) -> str:
        matrices = [p for p in runner.parameters() if p.dim() == 2 and p.requires_grad]
        optimizer = torch.optim.Adafactor(matrices)
        with pytest.raises(stretto.UsageError, match="updates differ"):
            update(runner, optimizer, "small", [0])
        return ""

    run("small", "zero of 8", work)


def test_the_models_own_tensors_are_taken() -> None:
    ours = model("small")
    found: list[str] = []

    def work(runner: Runner) -> None:
        own = dict(runner.named_parameters())["out.weight"]
        full = models[runner.rank].get_parameter("out.weight")
        assert own is not full
        with pytest.raises(stretto.UsageError, match="is not what is trained"):
            full.sum()
        found.append(type(full).__name__)

    models = [copy.deepcopy(ours) for _ in range(8)]
    stretto.run_threads(plan_of("small", "zero of 8"), lambda rank: models[rank], work)
    assert found == ["'out.weight'"] * 8


def test_what_is_kept_has_the_parameters_own_dtype() -> None:
    ours = copy.deepcopy(model("gpt")).float()
    _, batch, loss = MODELS["gpt"]
    job = stretto.capture(ours, batch(), loss, stretto.Parallel(dp=2, zero=1), precision="bf16")
    assert {p.spec.dtype for p in job.parameters} == {"bfloat16"}

    def work(runner: Runner) -> dict[str, Tensor]:
        assert {p.dtype for p in runner.parameters()} == {torch.float32}
        return runner.state_dict()

    for values in stretto.run_threads(lowered(job, "1f1b"), lambda _: copy.deepcopy(ours), work):
        assert all(torch.equal(values[name], value) for name, value in ours.state_dict().items())


def test_an_evaluation_shares_what_is_kept() -> None:
    ours, (_, batch, loss) = model("small"), MODELS["small"]
    plan = plan_of("small", "in groups")
    reads = lowered(capture_evaluation(ours, batch(), loss, plan.job), "1f1b")
    other = plan_of("small", "zero of 4")

    def work(runner: Runner) -> None:
        shared = Runner(reads, copy.deepcopy(ours), transport=runner.transport, shares=runner)
        for one, two in zip(shared.parameters(), runner.parameters(), strict=True):
            assert one is two
        with pytest.raises(stretto.UsageError, match="or shards it otherwise"):
            RankTensors(other, runner.rank, copy.deepcopy(ours), runner.tensors)

    run("small", "in groups", work)
