"""What cannot be spread is refused: which module, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError, StrettoError, UsageError
from stretto.ir.action import Phase
from stretto.models.gpt import next_token_loss
from stretto.parallelize.styles import Style, parse_style, plan_of
from stretto.parallelize.tensor import tensor_parallel
from tests.parallelize.test_tensor_equality import assert_plain, batch_of, gpt

pytestmark = pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")

PLAN = {"0": "colwise", "2": "rowwise"}


class Two(nn.Module):
    """Two matrices with a norm between, as small as a model gets."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(4, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(self.up(x)))
        return out


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


def mean_of_x(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return mean(model, batch["x"])


def refused(make: Callable[[], Any], text: str, kind: type[StrettoError] = UsageError) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        make()


def test_a_model_without_a_plan() -> None:
    refused(
        lambda: tensor_parallel(Two(), 2, sequence=False), "Two has no plan for tensor parallelism: give one"
    )


def test_a_pattern_that_no_module_has() -> None:
    plan = {"up": "colwise", "side": "rowwise"}
    refused(
        lambda: tensor_parallel(Two(), 2, sequence=False, plan=plan),
        "tp_plan['side']: the model has no module",
    )


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (
            "columnwise",
            "tp_plan['up']: unknown style 'columnwise'; did you mean 'colwise'? known styles: colwise,",
        ),
        (3, "unknown style 'int'"),
        (
            PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "leave PrepareModuleInput out",
        ),
        (SequenceParallel(sequence_dim=0), "SequenceParallel along dim 0 is not supported"),
        ("packed_colwise:x", "must name how many matrices are packed"),
        ("packed_colwise:0", "must name how many matrices are packed"),
        ("attributes", "must name attributes"),
        ("rowwise:2", "takes nothing after a colon"),
        (ColwiseParallel(input_layouts=Shard(0)), "input layouts (Shard(dim=0),) are not supported"),
    ],
)
def test_styles_that_are_none(style: Any, text: str) -> None:
    refused(lambda: plan_of(Two(), {"up": style}), text)


def test_words_and_objects_of_pytorch_mean_the_same() -> None:
    assert parse_style(ColwiseParallel(), "") == parse_style("colwise", "") == Style("colwise")
    assert parse_style(ColwiseParallel(output_layouts=Replicate()), "") == Style("colwise_gather_output")
    assert parse_style(RowwiseParallel(), "") == Style("rowwise")
    # As sequence-parallel plans give a head and a projection: gathers and scatters are found anyway.
    assert parse_style(ColwiseParallel(input_layouts=Shard(1)), "") == Style("colwise")
    assert parse_style(RowwiseParallel(output_layouts=Shard(1)), "") == Style("rowwise")
    assert parse_style(SequenceParallel(), "") == Style("sequence")
    assert parse_style("colwise_rep", "") == Style("colwise_gather_output")
    assert parse_style("packed_colwise:3", "") == Style("packed_colwise", blocks=3)


def test_objects_of_pytorch_give_the_plain_numbers_as_words_do() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
    batch = torch.randn(4, 4, dtype=torch.float64)
    objects = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = Parallel(tp=2, tp_plan=PLAN)
    jobs = [
        capture(model, batch, mean, Parallel(tp=2), tp_plan=objects),
        capture(model, batch, mean, parallel),
    ]
    assert jobs[0] == jobs[1]


def test_features_that_cannot_be_spread_equally() -> None:
    plan = {"up": "colwise", "down": "rowwise"}
    refused(
        lambda: tensor_parallel(Two(6), 4, sequence=False, plan=plan),
        "up: 6 features cannot be spread equally",
    )
    packed = {"up": "packed_colwise:3"}
    refused(
        lambda: tensor_parallel(Two(8), 2, sequence=False, plan=packed),
        "8 features of 3 packed matrices cannot",
    )


def test_heads_that_cannot_be_spread() -> None:
    refused(lambda: tensor_parallel(gpt(heads=2), 4, sequence=False), "the model has heads = 2")


def test_ties_that_are_spread_differently() -> None:
    plan = {"embedding": "replicated", "head": "vocabulary", "blocks.*.mlp.up": "colwise"}
    tied = gpt(tie_embeddings=True)
    how = tensor_parallel(tied, 2, sequence=False, plan=plan)
    assert not {"embedding.weight", "head.weight"} & how.shards.keys()
    plan["head"] = "colwise_gather_output"
    refused(
        lambda: tensor_parallel(tied, 2, sequence=False, plan=plan), "are one tensor, but the tensor-parallel"
    )


def test_a_style_on_a_module_that_cannot_have_it() -> None:
    refused(
        lambda: tensor_parallel(Two(), 2, sequence=False, plan={"norm": "colwise"}),
        "norm (LayerNorm): the style 'colwise' needs a matrix",
    )


def test_attributes_that_cannot_be_divided() -> None:
    model = Two()
    plan = {"up": "attributes:in_features,bias", "down": "rowwise"}
    refused(
        lambda: capture(model, torch.randn(2, 4), mean, Parallel(tp=2), tp_plan=plan),
        "to be divided it must be",
    )
    assert model.up.in_features == 4, "what was divided before the refusal is put back"


def test_a_sequence_that_cannot_be_cut() -> None:
    batch = {key: value[:, :7] for key, value in batch_of().items()}
    parallel = Parallel(tp=2, sequence_parallel=True)

    def loss(model: nn.Module, b: Any) -> Tensor:
        out: Tensor = model(b["input_ids"]).mean()
        return out

    refused(
        lambda: capture(gpt(), batch, loss, parallel),
        "cannot be spread equally over tp = 2: 7 is not",
        CaptureError,
    )


def test_sequence_parallelism_needs_blocks_and_a_norm() -> None:
    plan = {"up": "colwise", "down": "rowwise"}
    refused(
        lambda: tensor_parallel(Two(), 2, sequence=True, plan=plan),
        "needs one list of blocks with rowwise modules",
    )
    model = gpt()
    model.norm = nn.Identity()
    plan = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    for name in ("qkv", "out"):
        plan[f"blocks.*.attention.{name}"] = "colwise" if name == "qkv" else "rowwise"
    refused(
        lambda: tensor_parallel(model, 2, sequence=True, plan=plan), "no norm follows the blocks 'blocks'"
    )
    del plan["blocks.*.mlp.up"]
    refused(
        lambda: tensor_parallel(model, 2, sequence=True, plan=plan),
        "blocks.0.mlp.up (Linear) has no style, and would see a slice of the sequence",
    )


def test_a_loss_that_only_a_part_of_the_model_made() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, Two)
        out: Tensor = model.up(batch).square().mean()
        return out

    refused(
        lambda: capture(Two(), torch.randn(2, 4), loss, Parallel(tp=2), tp_plan={"up": "colwise"}),
        "is spread along dim 1, and the op needs that dim whole",
        CaptureError,
    )


def test_a_parameter_used_in_parts_and_wholly() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(self.up(x) * self.scale) * self.scale
            return out

    model, batch = Mixed().double(), {"x": torch.randn(2, 4, dtype=torch.float64)}
    plan = {"up": "colwise", "down": "rowwise"}
    assert_plain(capture(model, batch, mean_of_x, Parallel(tp=2), tp_plan=plan), model, mean_of_x, batch)


def test_settings_that_do_nothing_are_refused() -> None:
    refused(
        lambda: Parallel(sequence_parallel=True), "sequence_parallel shares the work of tensor-parallel ranks"
    )
    refused(lambda: Parallel(tp_plan={"up": "colwise"}), "tp_plan shares the work of tensor-parallel ranks")
    refused(lambda: Parallel(ep_buffer=3.0), "ep_buffer = 3.0 is about what expert-parallel ranks send")
    refused(lambda: Parallel(dp=2, ep_overflow="drop"), "give ep = 2 or more, or drop it")
    refused(
        lambda: Parallel(ampipe_capacity="whole"),
        "ampipe_capacity = 'whole' is about chunks of the sequence; give ampipe_degree = 2 or more",
    )
    assert Parallel(ampipe_capacity="whole", ampipe_degree="auto").ampipe_capacity == "whole"
    refused(lambda: Parallel(cp=2), "context parallelism is to come")


class Gated(nn.Module):
    """An MLP with a gate; `gate` without a style makes values that all ranks hold whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.up, self.gate, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = self.gate(x).sigmoid().mean(-1, keepdim=True)
        out: Tensor = self.down(self.up(x) * scale)
        return out


def test_a_whole_value_beside_a_spread_one() -> None:
    """Its gradients are addends on the ranks, and are summed where they meet those of whole uses."""
    plan = {"up": "colwise", "down": "rowwise"}
    model, batch = Gated().double(), {"x": torch.randn(2, 4, dtype=torch.float64)}
    job = capture(model, batch, mean_of_x, Parallel(tp=2), tp_plan=plan)
    assert_plain(job, model, mean_of_x, batch)
    sums = [op for op in job.stages[0].ops[Phase.I] if op.target == "comm.all_reduce"]
    assert len(sums) == 1, "both matrices' addends are summed at once"


def test_a_buffer_that_would_differ() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.register_buffer("highest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            self.highest.copy_(h.detach().max())  # type: ignore[operator]
            out: Tensor = self.down(h)
            return out

    refused(
        lambda: capture(
            Counting(), torch.randn(2, 4), mean, Parallel(tp=2), tp_plan={"up": "colwise", "down": "rowwise"}
        ),
        "is spread along dim 1, and the op needs that dim whole",
        CaptureError,
    )


def test_replicated_modules_in_a_block_would_see_a_slice() -> None:
    model = gpt()
    plan = {**model.tp_plan, "blocks.*.attention.qkv": "replicated", "blocks.*.attention.out": "replicated"}  # type: ignore[dict-item]
    refused(
        lambda: tensor_parallel(model, 2, sequence=True, plan=plan),
        "blocks.0.attention.qkv (Linear) has no style, and would see a slice of the sequence",
    )


def test_an_embedding_takes_the_vocabulary_style() -> None:
    plan = {"embedding": "colwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    refused(
        lambda: tensor_parallel(gpt(), 2, sequence=False, plan=plan),
        "embedding: an embedding is spread by the style 'vocabulary', not 'colwise': give it that style, or",
    )
    objects = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    assert plan_of(gpt(), objects)["embedding"] == Style("vocabulary")


def test_a_norm_that_is_called_before_the_blocks_is_not_the_one_after_them() -> None:
    class Early(nn.Module):
        """Its norms stand after the blocks; the first of them is called before."""

        def __init__(self) -> None:
            super().__init__()
            inner = gpt()
            self.embedding, self.blocks = inner.embedding, inner.blocks
            self.early, self.norm, self.head = nn.LayerNorm(32), inner.norm, inner.head

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.early(self.embedding(tokens))  # type: ignore[operator]
            for block in self.blocks:  # type: ignore[union-attr]
                x = block(x)
            out: Tensor = self.head(self.norm(x))  # type: ignore[operator]
            return out

    model = Early().double()
    plan = gpt().tp_plan
    parallel = Parallel(tp=2, sequence_parallel=True, microbatches=2)
    job = capture(model, batch_of(), next_token_loss, parallel, tp_plan=plan)  # type: ignore[arg-type]
    assert_plain(job, model, next_token_loss, batch_of())


def test_a_sequence_that_is_never_put_together() -> None:
    model = gpt()
    plan = model.tp_plan

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = model.embedding(batch["input_ids"])  # type: ignore[operator]
        for block in model.blocks:  # type: ignore[union-attr]
            x = block(x)
        out: Tensor = x.square().mean()
        return out

    class Body(nn.Module):
        """Runs the blocks alone."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.blocks, self.norm = model.embedding, model.blocks, model.norm

        def forward(self, batch: Any) -> Tensor:
            return loss(self, batch)

    refused(
        lambda: capture(
            Body(),
            batch_of(),
            lambda m, b: m(b),
            Parallel(tp=2, sequence_parallel=True),
            tp_plan={k: v for k, v in plan.items() if k != "head"},  # type: ignore[union-attr]
        ),
        "the sequence was cut at blocks.0, and none of norm put it together again",
        CaptureError,
    )


def test_a_module_whose_input_is_whole_can_be_split_there() -> None:
    """`transformers` plans say rowwise_split_input where the module before left its output whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
    batch = {"x": torch.randn(4, 4, dtype=torch.float64)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = model(batch["x"]).square().mean()
        return out

    plan = {"0": "colwise_gather_output", "2": "rowwise_split_input"}
    assert_plain(capture(model, batch, loss, Parallel(tp=2), tp_plan=plan), model, loss, batch)


class Headed(nn.Module):
    """Attention with a number for each head, and a head that is used by its weight."""

    def __init__(self, by_weight: bool) -> None:
        super().__init__()
        self.by_weight = by_weight
        self.embed = nn.Embedding(64, 16)
        self.attention = Slopes()
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if not self.by_weight:
            x = self.attention(x)
        return nn.functional.linear(x, self.head.weight)


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o, self.slopes = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.q(x).unflatten(-1, (-1, 4)) * self.slopes[:, None]
        y: Tensor = self.o(heads.flatten(-2))
        return y


def token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).reshape(-1, 64), ids.reshape(-1))


@pytest.mark.parametrize(
    ("by_weight", "plan", "told"),
    [
        (
            True,
            {"embed": "vocabulary", "head": "vocabulary"},
            ("(head: never called)", "uses such a module by its weight has a part", "'head': 'replicated'"),
        ),
        (
            False,
            {"attention.q": "colwise", "attention.o": "rowwise"},
            (
                "attention is computed in parts: attention.q, attention.o, spread over tp = 2",
                "attention.slopes in it, whole on every rank",
                "{'attention.q': 'replicated', 'attention.o': 'replicated'} into tp_plan",
            ),
        ),
    ],
)
def test_shapes_that_do_not_fit_name_what_is_spread(
    by_weight: bool, plan: dict[str, str], told: tuple[str, ...]
) -> None:
    ids = torch.zeros(4, 6, dtype=torch.int64)
    with pytest.raises(CaptureError) as caught:
        capture(Headed(by_weight), ids, token_loss, Parallel(tp=2), tp_plan=plan)
    assert all(words in str(caught.value) for words in told), str(caught.value)


def test_a_module_around_a_linear_is_told_which_modules_have_a_weight() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.A, self.B = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + self.B(self.A(x))
            return out

    refused(
        lambda: tensor_parallel(nn.Sequential(Adapted()), 2, sequence=False, plan={"0": "colwise"}),
        "0 (Adapted): the style 'colwise' needs a matrix `weight`. Give styles to modules in it with one "
        "(base, A, B), or keep it whole with {'0': 'replicated'} in tp_plan",
    )
