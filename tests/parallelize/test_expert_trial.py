"""Modules of experts of a user's own: a step in which ranks share them is the plain model's, or is refused.

The refusal says what of the module is not a sum over a token's experts, and where that belongs.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import StrettoError, UsageError
from stretto.parallelize.expert_trial import DENSE, ExpertTrial
from stretto.planning.make_plan import make_plan
from stretto.price.flat import described_costs
from stretto.runtime import Runner, run_threads
from stretto.runtime.rank_tensors import join
from tests.clusters import cores

WIDTH, INNER, EXPERTS, VOCAB = 8, 6, 4, 16


class Base(nn.Module):
    """Scores are applied after the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.4)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            hit = chosen == e
            w, on = (weights * hit).sum(1, keepdim=True), hit.any(1, keepdim=True)
            out = out + self.term(x, w, on, e)
        return out

    def term(self, x: Tensor, w: Tensor, on: Tensor, e: int) -> Tensor:
        return w * self.mlp(x, e)

    def mlp(self, x: Tensor, e: int) -> Tensor:
        return F.gelu(x @ self.up[e]) @ self.down[e]


class Before(Base):
    """Scores before the experts, torchtitan's default."""

    def term(self, x: Tensor, w: Tensor, on: Tensor, e: int) -> Tensor:
        return on * self.mlp(x * w, e)


class Unweighted(Base):
    """Scores are for nobody."""

    def term(self, x: Tensor, w: Tensor, on: Tensor, e: int) -> Tensor:
        return on * self.mlp(x, e)


class LookedUp(Base):
    """Parameters by number, for each row its own."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for k in range(chosen.shape[1]):
            inner = F.gelu(torch.bmm(x.unsqueeze(1), self.up[chosen[:, k]]))
            out = out + weights[:, k : k + 1] * torch.bmm(inner, self.down[chosen[:, k]]).squeeze(1)
        return out


class Dropped(Base):
    """Drops by a module, with a chance of nothing while it is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def mlp(self, x: Tensor, e: int) -> Tensor:
        return self.dropout(super().mlp(x, e))


class Residual(Base):
    def forward(self, *args: Tensor) -> Tensor:
        return args[0] + super().forward(*args)


class Normed(Base):
    def forward(self, *args: Tensor) -> Tensor:
        return F.layer_norm(super().forward(*args), (WIDTH,))


class Centered(Base):
    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True), *args)


class Scaled(Base):
    """By the largest of all tokens: a rank that has all of this one's has others' too."""

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return super().forward(x / x.abs().max(), *args)


class Limited(Base):
    """Each expert takes twelve rows, the first."""

    def term(self, x: Tensor, w: Tensor, on: Tensor, e: int) -> Tensor:
        return w * (on.cumsum(0) <= 12) * self.mlp(x, e)


class LimitedFromBehind(Base):
    """Six, the last."""

    def term(self, x: Tensor, w: Tensor, on: Tensor, e: int) -> Tensor:
        return w * (on.flip(0).cumsum(0).flip(0) <= 6) * self.mlp(x, e)


class Named(Base):
    def term(self, x: Tensor, w: Tensor, on: Tensor, e: int) -> Tensor:
        return w * x if e == 0 else super().term(x, w, on, e)


class Tabled(Base):
    """A table beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made: Tensor = super().forward(x, chosen, weights)
        return made + (self.table[chosen] * weights.unsqueeze(-1)).sum(1)


class Counted(Base):
    """The number of experts is written down."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return sum((weights * (chosen == e)).sum(1, keepdim=True) * self.mlp(x, e) for e in range(EXPERTS))  # type: ignore[return-value]


class Divided(Base):
    """Not finite for rows of zeros."""

    def mlp(self, x: Tensor, e: int) -> Tensor:
        return super().mlp(x / x.norm(dim=-1, keepdim=True), e)


class Drawn(Base):
    def mlp(self, x: Tensor, e: int) -> Tensor:
        return F.dropout(super().mlp(x, e), 0.5)


class Shared(Base):
    """A parameter of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def mlp(self, x: Tensor, e: int) -> Tensor:
        return super().mlp(x * self.scale, e)


class Model(nn.Module):
    def __init__(self, experts: nn.Module, choices: int = 2) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.head, self.choices = experts, nn.Linear(WIDTH, VOCAB), choices

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        top, chosen = self.gate(x).softmax(-1).topk(self.choices, -1)
        made: Tensor = self.head(x + self.experts(x, chosen, top))
        return made


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens), tokens.flatten())


def model_of(kind: type[nn.Module], **how: Any) -> Model:
    torch.manual_seed(3)
    return Model(kind(), **how).double()


BATCH = torch.randint(0, VOCAB, (8, 6), generator=torch.Generator().manual_seed(4))
SHARED: dict[str, Any] = {"dp": 2, "ep": 2, "ep_plan": {"experts": "experts"}}


def assert_equals(model: nn.Module, **how: Any) -> None:
    job = capture(model, BATCH, loss, Parallel(**{**SHARED, "ep_buffer": 4.0, **how}))
    plan = make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))

    def work(runner: Runner) -> tuple[float, dict[str, Tensor]]:
        value = float(runner.step(BATCH))
        return value, {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}

    found = run_threads(plan, lambda _: copy.deepcopy(model), work)
    own = copy.deepcopy(model)
    want = sum(loss(own, part) for part in BATCH.chunk(2)) / 2
    want.backward()  # type: ignore[union-attr]
    assert abs(found[0][0] - want.item()) <= 1e-10  # type: ignore[union-attr]
    for parameter in plan.job.parameters:
        held = [grads[parameter.name] for _, grads in found if parameter.name in grads]
        plain = own.get_parameter(parameter.name).grad
        if plain is None:
            assert not held, parameter.name
            continue
        whole = join(held, parameter, plan.job)
        assert (whole - plain).norm() <= 1e-10 * max(float(plain.norm()), 1e-3), parameter.name


SUMS = (
    Before,
    LookedUp,
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Base, Unweighted, Dropped)),
)


@pytest.mark.parametrize("kind", SUMS)
def test_sums_over_a_tokens_experts_work(kind: type[nn.Module]) -> None:
    assert_equals(model_of(kind))


@pytest.mark.slow
def test_weights_inside_go_in_slices_too() -> None:
    assert_equals(model_of(Before), pipe_experts_multi_data=3)


@pytest.mark.slow
def test_of_one_choice_any_function_of_a_token_works() -> None:
    assert_equals(model_of(Residual, choices=1))


OTHERS = "depends on other tokens"
REFUSED = (
    (Residual, "is no sum over the token's experts, as with an added input"),
    (Normed, "is no sum over the token's experts"),
    (Centered, OTHERS),
    (Scaled, OTHERS),
    (Limited, OTHERS),
    (LimitedFromBehind, OTHERS),
    (Named, "does it know them by number"),
    (Tabled, "something beside its own parameters"),
    (Counted, "with a rank's experts alone it fails: IndexError"),
    (Divided, "rows of zeros, with which buffers are filled, give numbers that are not finite"),
    (Drawn, "it draws at random, other than by nn.Dropout"),
)


@pytest.mark.parametrize(("kind", "said"), REFUSED)
def test_what_is_no_such_sum_is_refused(kind: type[nn.Module], said: str) -> None:
    model = model_of(kind)
    with pytest.raises(StrettoError, match=re.escape(said)) as caught:
        capture(model, BATCH, loss, Parallel(**SHARED))
    told = str(caught.value)
    assert f"ep = 2 ranks cannot share experts ({kind.__name__})" in told
    assert "in the module around it" in told
    assert "give ep = 1" in told


def test_the_way_out_works() -> None:
    assert capture(model_of(Residual), BATCH, loss, Parallel(dp=2)).size("dp") == 2


def test_a_parameter_of_all_experts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"up 4, down 4, scale 8\. Put what its experts share \(scale\)"):
        capture(model_of(Shared), BATCH, loss, Parallel(**SHARED))


def test_a_trial_of_large_experts() -> None:
    """Of parameters that are views, too, forwards that work and others are told apart."""
    for kind, way in ((Before, "inside"), (Residual, None)):
        model = model_of(kind)
        with torch.device("meta"):
            model.experts.up = nn.Parameter(torch.empty(EXPERTS, 1 << 8, 1 << 13))
            model.experts.down = nn.Parameter(torch.empty(EXPERTS, 1 << 13, 1 << 8))
        assert model.experts.up.numel() > DENSE
        trial = ExpertTrial(model, "experts", 2)
        given = torch.empty(16, 1 << 8, device="meta"), torch.empty(16, 2, device="meta")
        if way is None:
            with pytest.raises(UsageError, match="no sum"):
                trial.weighed(model.experts, *given)
        else:
            assert trial.weighed(model.experts, *given) == way


class InTraining(Base):
    """Evaluations are of another kind."""

    def forward(self, *args: Tensor) -> Tensor:
        made: Tensor = super().forward(*args)
        return made if self.training else made - made.mean(0)


def test_a_trial_is_of_training_or_of_evaluation() -> None:
    model = model_of(InTraining)
    trial = ExpertTrial(model, "experts", 2)
    given = torch.empty(4, WIDTH), torch.empty(4, 2)
    assert trial.weighed(model.experts, *given) == "after"
    with pytest.raises(UsageError, match="depends on other tokens"):
        trial.weighed(model.eval().experts, *given)


class Scales(Base):
    def __init__(self, scale: float = 1.0, act: nn.Module | None = None) -> None:
        super().__init__()
        self.scale, self.act = scale, act or nn.SiLU()


def test_layers_that_are_equal_share_a_trial() -> None:
    trial = ExpertTrial(model_of(Scales), "experts", 2)
    assert trial.serves(Scales().double())
    hooked = Scales().double()
    hooked.act.register_forward_hook(lambda *_: None)
    for other in (Scales(2.0), Scales(1), Scales(act=nn.GELU()), Before(), hooked, Scales().eval()):
        assert not trial.serves(other.double())
    assert not trial.serves(Scales().float())


def test_a_trial_leaves_nothing_behind() -> None:
    class Remembers(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.seen: list[int] = []

        def forward(self, x: Tensor, *args: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(x.shape[0])
            return super().forward(x, *args)

    model = model_of(Remembers)
    before = torch.get_rng_state()
    trial = ExpertTrial(model, "experts", 2)
    assert trial.weighed(model.experts, torch.empty(4, WIDTH), torch.empty(4, 2)) == "after"
    assert torch.equal(torch.get_rng_state(), before)
    assert float(model.experts.calls) == 0
    assert model.experts.seen == []
    assert all(p.grad is None for p in model.parameters())
