"""Modules of experts of a user's own: a step in which ranks share them is the plain model's, or is refused.

The refusal says what of the module is not a sum over a token's experts, and where that belongs.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import StrettoError, UsageError
from stretto.parallelize.expert_trial import DENSE, weighed
from tests.parallelize.equality import assert_plan_is_plain
from tests.parallelize.mixtures import planned

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


class LookedUp(Base):
    """Parameters by number, for each row its own."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for k in range(chosen.shape[1]):
            inner = F.gelu(torch.bmm(x.unsqueeze(1), self.up[chosen[:, k]]))
            out = out + weights[:, k : k + 1] * torch.bmm(inner, self.down[chosen[:, k]]).squeeze(1)
        return out


Forward = Callable[..., Tensor]


def kind(name: str, term: Forward | None = None, forward: Forward | None = None) -> type[Base]:
    """`Base` with another term, of (self, x, w, on, e), or with another forward around its own: (x, chosen,
    weights, its own)."""
    more: dict[str, Any] = {} if term is None else {"term": term}
    if forward is not None:
        more["forward"] = lambda self, x, c, w: forward(x, c, w, lambda x: Base.forward(self, x, c, w))
    return type(name, (Base,), more)


Before = kind("Before", lambda self, x, w, on, e: on * self.mlp(x * w, e))
"""Scores before the experts, torchtitan's default."""

Residual = kind("Residual", forward=lambda x, c, w, own: x + own(x))


def divided(self: Any, x: Tensor, w: Tensor, on: Tensor, e: int) -> Tensor:
    made: Tensor = w * self.mlp(x / x.norm(dim=-1, keepdim=True), e)
    return made


class Tabled(Base):
    """A table besides the parameters."""

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
    assert_plan_is_plain(planned(job), model, loss, BATCH, least=1e-3)


SUMS = (
    Before,
    pytest.param(LookedUp, marks=pytest.mark.slow),
    pytest.param(Base, marks=pytest.mark.slow),
)


@pytest.mark.parametrize("kind", SUMS)
def test_sums_over_a_tokens_experts_work(kind: type[nn.Module]) -> None:
    assert_equals(model_of(kind))


OTHER = "a rank's experts by themselves give other results or gradients than all"
REFUSED = (
    (Residual, OTHER),
    (kind("Normed", forward=lambda x, c, w, own: F.layer_norm(own(x), (WIDTH,))), OTHER),
    (kind("Centered", forward=lambda x, c, w, own: own(x - x.mean(0, keepdim=True))), OTHER),
    # By the largest of all tokens: a rank that has all of this one's has others' too.
    (kind("Scaled", forward=lambda x, c, w, own: own(x / x.abs().max())), OTHER),
    # Each expert takes twelve rows, the first.
    (kind("Limited", lambda self, x, w, on, e: w * (on.cumsum(0) <= 12) * self.mlp(x, e)), OTHER),
    (kind("Named", lambda self, x, w, on, e: w * (x if e == 0 else self.mlp(x, e))), OTHER),
    (Tabled, OTHER),
    (Counted, "with a rank's experts alone it fails: IndexError"),
    (kind("Divided", divided), OTHER),
    (kind("Drawn", lambda self, x, w, on, e: w * F.dropout(self.mlp(x, e), 0.5)), OTHER),
)


@pytest.mark.parametrize(("experts", "said"), REFUSED)
def test_what_is_no_such_sum_is_refused(experts: type[nn.Module], said: str) -> None:
    model = model_of(experts)
    with pytest.raises(StrettoError, match=re.escape(said)) as caught:
        capture(model, BATCH, loss, Parallel(**SHARED))
    for word in (
        f"ep = 2 ranks cannot share experts ({experts.__name__})",
        "in the module around",
        "give ep = 1",
    ):
        assert word in str(caught.value)


def test_a_parameter_of_all_experts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"up 4, down 4, scale 8\. Put what its experts share \(scale\)"):
        capture(model_of(Shared), BATCH, loss, Parallel(**SHARED))


def test_a_trial_of_large_experts() -> None:
    """Of parameters that are views, too, forwards that work and others are distinguished."""
    for kind, way in ((Before, "inside"), (Residual, None)):
        model = model_of(kind)
        with torch.device("meta"):
            model.experts.up = nn.Parameter(torch.empty(EXPERTS, 1 << 8, 1 << 13))
            model.experts.down = nn.Parameter(torch.empty(EXPERTS, 1 << 13, 1 << 8))
        assert model.experts.up.numel() > DENSE
        if way is None:
            with pytest.raises(UsageError, match=OTHER):
                weighed(model, "experts", 2, (16, 1 << 8), (16, 2))
        else:
            assert weighed(model, "experts", 2, (16, 1 << 8), (16, 2)) == way


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
    assert weighed(model, "experts", 2, (4, WIDTH), (4, 2)) == "after"
    assert torch.equal(torch.get_rng_state(), before)
    assert float(model.experts.calls) == 0
    assert model.experts.seen == []
    assert all(p.grad is None for p in model.parameters())


# Adapters of `peft`.

PARAMETERS = {"target_modules": ["head"], "target_parameters": ["experts.up", "experts.down"]}


def adapted(**config: Any) -> nn.Module:
    peft: Any = importlib.import_module("peft")
    model = model_of(Base)
    model.ep_plan = {"experts": "experts"}
    found: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=2, **config)).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return found


def test_a_wrapper_has_the_plan_of_what_it_wraps() -> None:
    """Whose names are other ones."""
    assert_equals(adapted(target_modules=["head", "gate"]), ep_plan=None)


@pytest.mark.parametrize(
    "how",
    [
        {"ep": 1, "ep_buffer": None, "ep_plan": None},
        {"ep_plan": None},
        {"ep_plan": {"base_model.model.experts.base_layer.base_layer": "experts"}},
    ],
)
def test_adapters_of_experts_parameters_work(how: dict[str, Any]) -> None:
    """A forward that parametrizes its parameters for a time."""
    assert_equals(adapted(**PARAMETERS), **how)


class Replaced(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.head.weight
        del self.head.weight
        self.head.register_buffer("weight", weight * 2)
        return super().forward(tokens)


def test_another_tensor_is_refused_as_before() -> None:
    torch.manual_seed(3)
    with pytest.raises(StrettoError, match=r"in the place of parameter 'head\.weight'"):
        capture(Replaced(Base()).double(), BATCH, loss, Parallel(dp=2))
