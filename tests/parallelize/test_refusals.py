"""What cannot be sharded is refused: which module, why, and what to do. What can is right."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError, UsageError
from stretto.ir.action import Phase
from stretto.ir.collectives import ALL_TO_ALL
from stretto.models.gpt import next_token_loss
from stretto.parallelize import ops
from stretto.parallelize.styles import Style, parse_style, plan_of
from stretto.parallelize.tensor import tensor_parallel
from stretto.runtime import Runner
from tests.clusters import cores
from tests.parallelize.equality import assert_plain, batch_of, gpt
from tests.parallelize.random_lines import Running

pytestmark = pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")

BOTH = {"up": "colwise", "down": "rowwise"}
LISTED = {"0": "colwise", "2": "rowwise"}
MLP = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
ATTENTION = {"blocks.*.attention.qkv": "colwise", "blocks.*.attention.out": "rowwise"}


class Two(nn.Module):
    """Two matrices with a norm between, as small as a model gets."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))  # type: ignore[no-any-return]


class Own(nn.Module):
    """Two matrices, what else `parts` has, and code of a test's own: (self, x) -> its result."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        for name, part in parts.items():
            setattr(self, name, part)
        self.register_buffer("highest", torch.zeros(()))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


class TwoMatrices(nn.Module):
    """Neither is around the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]


class Body(nn.Module):
    """The blocks of a GPT alone: the sequence that they cut is never put together."""

    def __init__(self) -> None:
        super().__init__()
        model = gpt()
        self.embedding, self.blocks, self.norm = model.embedding, model.blocks, model.norm
        self.plan = {name: style for name, style in model.tp_plan.items() if name != "head"}  # type: ignore[union-attr]

    def forward(self, batch: Any) -> Tensor:
        x = self.embedding(batch["input_ids"])  # type: ignore[operator]
        for block in self.blocks:  # type: ignore[union-attr]
            x = block(x)
        return x.square().mean()  # type: ignore[no-any-return]


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def sharded(model: nn.Module, plan: Any = None, size: int = 2, sequence: bool = False) -> Any:
    return tensor_parallel(model, size, sequence=sequence, plan=plan)


def captured(model: nn.Module, plan: Any = BOTH, batch: Any = None, loss: Any = mean, **how: Any) -> Any:
    batch = torch.randn(2, 4) if batch is None else batch
    return capture(model, batch, loss, Parallel(tp=2, **how), tp_plan=plan)


def without_norm() -> nn.Module:
    model = gpt()
    model.norm = nn.Identity()
    return model


def kept_highest(model: Any, x: Tensor) -> Tensor:
    h = model.up(x)
    model.highest.copy_(h.detach().max())
    return model.down(h)  # type: ignore[no-any-return]


def tied_apart() -> Any:
    plan = {"embedding": "replicated", "head": "colwise_gather_output", "blocks.*.mlp.up": "colwise"}
    return sharded(gpt(tie_embeddings=True), plan)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no plan": (lambda: sharded(Two()), "has no plan for tensor parallelism: give one"),
    "a pattern of no module": (lambda: sharded(Two(), {**BOTH, "side": "rowwise"}), "tp_plan['side']"),
    "six features of four ranks": (lambda: sharded(Two(6), BOTH, 4), "up: 6 features"),
    "three packs": (lambda: sharded(Two(), {"up": "packed_colwise:3"}), "8 features of 3 packed"),
    "two heads of four ranks": (lambda: sharded(gpt(heads=2), size=4), "the model has heads = 2"),
    "ties that are sharded apart": (tied_apart, "are one tensor"),
    "a norm as a matrix": (lambda: sharded(Two(), {"norm": "colwise"}), "norm (LayerNorm): the style"),
    "two matrices as one": (
        lambda: sharded(nn.Sequential(TwoMatrices()), {"0": "colwise"}),
        "0 (TwoMatrices): the style 'colwise' needs a matrix `weight`. Give styles to modules in it with one "
        "(up, down)",
    ),
    "an embedding as a matrix": (
        lambda: sharded(gpt(), {"embedding": "colwise", **MLP}),
        "embedding: an embedding is sharded by the style 'vocabulary'",
    ),
    "blocks of no list": (lambda: sharded(Two(), BOTH, sequence=True), "needs a list of blocks with rowwise"),
    "a sequence of seven": (
        lambda: captured(
            gpt(),
            None,
            {key: value[:, :7] for key, value in batch_of().items()},
            lambda m, b: m(b["input_ids"]).mean(),
            sequence_parallel=True,
        ),
        "a sequence of 7 cannot be sharded equally over tp = 2",
    ),
    "a sequence without ranks": (lambda: Parallel(sequence_parallel=True), "sequence_parallel"),
    "a plan without ranks": (lambda: Parallel(tp_plan={"up": "colwise"}), "tp_plan"),
}


STYLES: list[tuple[Any, str]] = [
    ("columnwise", "did you mean 'colwise'?"),
    (3, "unknown style 'int'"),
    (
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "leave PrepareModuleInput out",
    ),
    (SequenceParallel(sequence_dim=0), "SequenceParallel along dim 0"),
    (ColwiseParallel(input_layouts=Shard(0)), "input layouts (Shard(dim=0),)"),
    ("packed_colwise:x", "how many matrices"),
    ("packed_colwise:0", "how many matrices"),
    ("colwise:2", "takes nothing after a colon"),
    ("rowwise:2", "takes nothing after a colon"),
]


@pytest.mark.parametrize(("style", "key"), STYLES)
def test_a_style_is_refused(style: Any, key: str) -> None:
    with pytest.raises(UsageError, match=re.escape(key)):
        sharded(Two(), {"up": style})


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    make, key = REFUSED[name]
    with pytest.raises((CaptureError, UsageError), match=re.escape(key)):
        make()


def test_settings_that_do_something_are_taken() -> None:
    assert Parallel(ampipe_capacity="whole", ampipe_degree="auto").ampipe_capacity == "whole"
    plan = {"embedding": "replicated", "head": "vocabulary", "blocks.*.mlp.up": "colwise"}
    how = sharded(gpt(tie_embeddings=True), plan)
    assert not {"embedding.weight", "head.weight"} & how.shards.keys()


class Slopes(nn.Module):
    """Attention with a number for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.slopes = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.q(x).unflatten(-1, (-1, 4)) * self.slopes[:, None]
        return self.o(heads.flatten(-2))  # type: ignore[no-any-return]


class Headed(nn.Module):
    """A head that is used by its weight, behind such attention or not."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attention = Slopes() if attends else nn.Identity()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.attention(self.embed(ids)), self.head.weight)


@pytest.mark.parametrize(
    ("attends", "plan"),
    [
        (False, {"embed": "vocabulary", "head": "vocabulary"}),
        (True, {"attention.q": "colwise", "attention.o": "rowwise"}),
    ],
)
def test_what_code_does_with_weights_and_heads_is_its_own(attends: bool, plan: dict[str, str]) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).reshape(-1, 64), ids.reshape(-1))

    model, ids = Headed(attends).double(), torch.arange(24).view(4, 6)
    assert_plain(captured(model, plan, ids, loss), model, loss, ids)


# Communication that the model's own code starts.

STARTED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "an axis that is not there": (
        lambda x: ops.exchange(x, "cp", 2),
        r"cp = 2, and the job has {'dp': 2} besides pp: name one",
    ),
    "a size of no axis": (lambda x: ops.exchange(x, "dp", 4), r"dp = 4, and the job has {'dp': 2}"),
    "a slice along another axis": (lambda x: ops.own_chunk(x, 1, "tp", 2), r"slice is over tp = 2"),
    "parts that are not equal": (
        lambda x: ops.exchange(x[:3], "dp", 2),
        r"all_to_all over dp = 2: a tensor of shape \[3, 4\] needs a dim 0 that is a multiple of 2",
    ),
    "no dims to exchange": (lambda x: ops.exchange(x.sum(), "dp", 2), r"needs a dim 0: write x.unsq"),
    "no dims to gather": (
        lambda x: ops.all_gather(x.sum(), 0, "dp", 2),
        r"this one has none; write x.unsqueeze",
    ),
}


@pytest.mark.parametrize("name", STARTED)
def test_communication_that_does_not_fit_is_refused_with_its_line(name: str) -> None:
    start, what = STARTED[name]
    model = Own(lambda model, x: model.down(model.up(x)) + start(x).sum())
    with pytest.raises(CaptureError, match=what) as error:
        capture(model, torch.randn(8, 4), loss=mean, parallel=Parallel(dp=2))
    assert f"{__file__}:" in str(error.value)


def test_communication_along_tp_is_refused() -> None:
    model = Own(lambda model, x: model.down(ops.exchange(model.up(x), "tp", 2)))
    with pytest.raises(CaptureError, match="communicates along tp, over which passes"):
        captured(model)


def test_rows_of_a_kind_with_unequal_parts_need_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation, where all rows go to the next rank."""
    permute = replace(ALL_TO_ALL, sent=lambda rows, a, b, size: (0, rows if b == (a + 1) % size else 0))
    monkeypatch.setattr(ops, "_calls", SimpleNamespace(all_to_all=lambda x, *_: x, wait=lambda x: x))
    x = torch.ones(3, 5)
    assert torch.equal(ops.exchange(x, "dp", 2, permute), x)
    with pytest.raises(ValueError, match="needs a dim 0 that is a multiple of 2"):
        ops.exchange(x, "dp", 2)


# Words and objects of PyTorch.


def test_words_and_objects_of_pytorch_mean_the_same() -> None:
    for given, style in (
        (ColwiseParallel(), Style("colwise")),
        ("colwise", Style("colwise")),
        (ColwiseParallel(output_layouts=Replicate()), Style("colwise")),
        (RowwiseParallel(), Style("rowwise")),
        # As sequence-parallel plans give a head and a projection: gathers and scatters are found anyway.
        (ColwiseParallel(input_layouts=Shard(1)), Style("colwise")),
        (RowwiseParallel(output_layouts=Shard(1)), Style("rowwise")),
        (SequenceParallel(), Style("replicated")),
        ("colwise_rep", Style("colwise")),
        ("attributes:heads", Style("replicated")),
        ("packed_colwise:3", Style("packed_colwise", blocks=3)),
    ):
        assert parse_style(given, "") == style
    objects = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    assert plan_of(gpt(), objects)["embedding"] == Style("vocabulary")
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(4, 4)
    jobs = [
        captured(model, plan, batch) for plan in ({"0": ColwiseParallel(), "2": RowwiseParallel()}, LISTED)
    ]
    assert jobs[0] == jobs[1]


# What is right.


def gated(model: Any, x: Tensor) -> Tensor:
    """A gate without a style makes values that all ranks have in full."""
    x = model.first(x)
    return model.down(model.up(x) * model.gate(x).sigmoid().mean(-1, keepdim=True))  # type: ignore[no-any-return]


RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "a full value beside a sharded one": (
        lambda: Own(gated, first=nn.Linear(4, 4), gate=nn.Linear(4, 8)),
        BOTH,
    ),
    # `transformers` plans give rowwise_split_input where the module before left its output in full.
    "an input that is split": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
        {"0": "colwise_gather_output", "2": "rowwise_split_input"},
    ),
    "a buffer of what is sharded": (lambda: Own(kept_highest), BOTH),
    "a matrix alone": (lambda: Own(lambda model, x: model.up(x)), {"up": "colwise"}),
    "a norm between": (Two, BOTH),
}


@pytest.mark.parametrize("name", ["no norm behind the blocks", "a matrix without a style", "blocks alone"])
def test_a_sequence_is_sharded_whatever_is_in_blocks(name: str) -> None:
    if name == "blocks alone":
        body = Body().double()
        plan, loss = body.plan, lambda m, b: m(b)
    else:
        body = without_norm().double() if name.startswith("no") else gpt().double()
        plan = (
            {**MLP, **ATTENTION} if name.startswith("no") else {"blocks.*.mlp.down": "rowwise", **ATTENTION}
        )
        loss = next_token_loss
    job = captured(body, plan, batch_of(), loss, sequence_parallel=True, microbatches=2)
    assert_plain(job, body, loss, batch_of())


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_right(name: str) -> None:
    make, plan = RIGHT[name]
    model, batch = make().double(), torch.randn(4, 4, dtype=torch.float64)
    job = captured(model, plan, batch)
    assert_plain(job, model, mean, batch)
    if plan is BOTH and "beside" in name:
        reductions = [op for op in job.stages[0].ops[Phase.I] if op.target == "comm.all_reduce"]
        assert len(reductions) == 2, "of the gate's one number a row, and of both matrices' partials at once"


def test_statistics_of_a_norm_before_sharded_matrices_are_the_plain_ones() -> None:
    def normed(model: Any, x: Tensor) -> Tensor:
        return model.down(model.up(model.norm(x)))  # type: ignore[no-any-return]

    model, batch = Own(normed, norm=Running(4)).double(), torch.randn(4, 4, dtype=torch.float64)
    plan = stretto.plan(captured(model, BOTH, batch, microbatches=2), cores(), order="list")

    def work(runner: Runner) -> dict[str, Tensor]:
        runner.step(batch)
        return dict(runner.named_buffers())

    for found in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work):
        own = copy.deepcopy(model)
        for part in batch.chunk(2):
            own(part)
        for name, buffer in own.norm.named_buffers("norm"):  # type: ignore[union-attr, operator]
            assert torch.allclose(found[name], buffer, rtol=1e-10, atol=1e-12), name
