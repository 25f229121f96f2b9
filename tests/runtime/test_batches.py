"""Batches of other forms than a dict of tensors with rows first give the plain model's step."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.runtime import Runner
from tests.cells import slow
from tests.clusters import cores
from tests.runtime.equality import Result, assert_equal, plain, run_sharded, tokens

TOLERANCE = 1e-10
ROWS, COLUMNS, WIDTH, KINDS = 8, 8, 8, 61


class Net(nn.Module):
    """Positions of three axes, (3, rows, columns), or of all rows, (1, columns); attention with a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table, self.head = nn.Embedding(KINDS, WIDTH), nn.Linear(WIDTH, KINDS, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))
        self.register_buffer("freq", torch.rand(WIDTH))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * self.freq
        x = self.table(ids) + (angles.sin().sum(0) if angles.dim() == 4 else angles.sin())
        for layer in self.layers:
            query, key, value = layer(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(-2)
        made: Tensor = self.head(x)
        return made


def model() -> nn.Module:
    return Net().double()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["ids"], batch["at"]), batch["labels"])


IDS = tokens(ROWS, columns=COLUMNS)
LABELS = tokens(ROWS, columns=COLUMNS, seed=6)
OF_AXES = (
    torch.stack([torch.arange(COLUMNS).repeat(ROWS, 1) * k for k in (1, 2, 3)]) + torch.arange(ROWS)[:, None]
)
OF_ALL = torch.arange(COLUMNS)[None]

LAYOUTS = [
    {"pp": 2},
    slow({"dp": 2}),
    slow({"tp": 2, "tp_plan": {"layers.*": "colwise_gather_output"}}),
    {"cp": 2},
    slow({"dp": 2, "pp": 2, "cp": 2}),
]


def found_by(
    batch: Any,
    loss: Callable[..., Any],
    layout: dict[str, Any],
    batch_dims: Any = 0,
    precision: str = "float32",
) -> Result:
    layout = {**layout}
    plan = layout.pop("tp_plan", None)
    parallel = stretto.Parallel(microbatches=2, **layout)
    job = stretto.capture(model(), batch, loss, parallel, tp_plan=plan, batch_dims=batch_dims)
    return run_sharded(stretto.plan(job, cluster=cores(), order="list"), model(), batch)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("at", "dim"), [(OF_AXES, 1), (OF_ALL, None)], ids=["axes", "all rows"])
def test_leaves_with_another_batch_dim(layout: dict[str, Any], at: Tensor, dim: int | None) -> None:
    batch = {"ids": IDS, "at": at, "labels": LABELS}
    assert_equal(found_by(batch, loss, layout, {"at": dim}), plain(model(), batch, loss), TOLERANCE)


def test_all_of_the_batch_is_columns_first() -> None:
    """As recurrent models have it."""

    def turned(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model, {name: leaf.transpose(0, 1) for name, leaf in batch.items()})

    rows_first = {"ids": IDS, "at": OF_AXES[0], "labels": LABELS}
    batch = {name: leaf.transpose(0, 1).contiguous() for name, leaf in rows_first.items()}
    assert_equal(found_by(batch, turned, {"dp": 2}, 1), plain(model(), rows_first, loss), TOLERANCE)


Pair = namedtuple("Pair", "inputs targets")


@dataclasses.dataclass
class Rows:
    ids: Tensor
    at: Tensor
    labels: Tensor
    scale: float = 2.0


class Encoding(UserDict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def transformers_encoding(**leaves: Tensor) -> Any:
    import transformers

    return transformers.BatchEncoding(leaves)


def transformers_output(**leaves: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=leaves["ids"], hidden_states=(leaves["at"], leaves["labels"]))  # type: ignore[arg-type]


def by_attributes(model: nn.Module, mb: Any) -> Tensor:
    return cross_entropy(model(mb.ids, mb.at), mb.labels)


FORMS: dict[str, tuple[Callable[..., Any], Callable[[nn.Module, Any], Tensor], Any]] = {
    "a dataclass": (Rows, lambda m, mb: by_attributes(m, mb) * mb.scale, {"at": 1}),
    "a dataclass in a dict": (
        lambda **w: {"w": Rows(**w)},
        lambda m, mb: by_attributes(m, mb["w"]),
        {"w": {"at": 1}},
    ),
    "a mapping read by attributes": (Encoding, by_attributes, {"at": 1}),
    "BatchEncoding": (transformers_encoding, by_attributes, {"at": 1}),
    "a named tuple": (
        lambda ids, at, labels: Pair([ids, at], labels),
        lambda m, mb: cross_entropy(m(*mb.inputs), mb.targets),
        {"inputs": [0, 1]},
    ),
    "an output of transformers": (
        transformers_output,
        lambda m, mb: cross_entropy(m(mb.last_hidden_state, mb.hidden_states[0]), mb.hidden_states[1]),
        {"hidden_states": (1, 0)},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_containers(form: str) -> None:
    make, read, dims = FORMS[form]
    batch = make(ids=IDS, at=OF_AXES, labels=LABELS)
    assert_equal(found_by(batch, read, {"pp": 2}, dims), plain(model(), batch, read), TOLERANCE)


def test_what_does_not_fit_is_told_in_the_batch_s_own_shape() -> None:
    batch = {"ids": IDS, "at": OF_AXES, "labels": LABELS}
    job = stretto.capture(model(), batch, loss, stretto.Parallel(microbatches=2), batch_dims={"at": 1})
    plan = stretto.plan(job, cluster=cores(), order="list")
    runner = Runner(plan, model())
    short = {**batch, "at": OF_AXES[:, :, :-1]}
    with pytest.raises(
        stretto.UsageError, match=r"'at' has shape \[3, 8, 7\]; the plan was made for \[3, 8, 8\]"
    ):
        runner.step(short)
    few = {"ids": IDS[:4], "at": OF_AXES[:, :4], "labels": LABELS[:4]}
    runner.add(stretto.plan(job.with_batch(few), cluster=cores(), order="list"))
    assert abs(float(runner.step(few) - plain(model(), few, loss).loss)) < TOLERANCE
    with pytest.raises(
        stretto.UsageError, match=r"batch of at \[3, 8, 7\], ids .*plans for: at \[3, 8, 8\],.*at \[3, 4, 8\]"
    ):
        runner.step(short)


def test_the_dims_are_in_the_plan_s_file(tmp_path: Any) -> None:
    batch = {"ids": IDS, "at": OF_AXES, "labels": LABELS}
    job = stretto.capture(model(), batch, loss, stretto.Parallel(microbatches=2), batch_dims={"at": 1})
    stretto.plan(job, cluster=cores(), order="list").save(tmp_path / "plan.json")
    plan = stretto.load_plan(tmp_path / "plan.json")
    assert plan.job.batch_dims == (("at", 1),)
    found = Runner(plan, copy.deepcopy(model())).step(batch)
    assert abs(float(found - plain(model(), batch, loss).loss)) < TOLERANCE


def test_check_and_evaluation_read_them() -> None:
    batch = {"ids": IDS, "at": OF_AXES, "labels": LABELS}
    parallel = stretto.Parallel(microbatches=2)
    assert not stretto.check(model(), batch, loss, parallel, batch_dims={"at": 1}).wrong
    ours = model()
    job = stretto.capture(ours, batch, loss, parallel, batch_dims={"at": 1})
    runner = Runner(stretto.plan(job, cluster="local", order="list"), ours)
    evaluation = stretto.Evaluation(runner, ours, batch, loss, parallel=parallel)
    assert abs(evaluation.loss([batch]) - float(plain(model(), batch, loss).loss)) < TOLERANCE
