"""Settings of experts and chunks that cannot work: each is refused at once, with a value that works.

A line of a table: changes | what the message says. A change without a section is of `[parallel]`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from stretto.capturing import capture
from stretto.cli.main import app
from stretto.config import Parallel, load_settings
from stretto.errors import StrettoError, UsageError
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum
from stretto.train import launch

FILE = """
[model]
kind = "moe"
layers = 2
hidden = 16
heads = 2
context = 32
experts = 4

[data]
sequence_length = 32
vocab_size = 300

[training]
steps = 1
global_batch = 8
threads_per_rank = 1
"""

SETTINGS = """
ep=2 | give dp = 2
dp=2 ep=4 | ep = 4 takes its ranks from the data-parallel ones, and dp = 2
ep=0 | parallel.ep = 0: input should be greater than or equal to 1
ep=2.0 | parallel.ep = 2.0: input should be a valid integer
dp=8 ep=8 | must divide model.experts = 4: give less
dp=3 ep=3 training.global_batch=9 | give less, or model.experts = 6
model.kind=gpt model.experts= dp=2 ep=2 | give model.kind = 'moe', or ep = 1
dp=2 ep=2 model.capacity_factor=0 ep_buffer=0.9 | ep_buffer = 0.9: input should be greater than or equal to 1
dp=2 ep=2 model.capacity_factor=0 ep_buffer=nan | ep_buffer = nan: input should be a finite number
dp=2 ep=2 ep_buffer=3 | drop it, or give model.capacity_factor = 0
dp=2 ep=2 ep_overflow=drop | drop it, or give model.capacity_factor = 0
dp=2 ep=2 model.capacity_factor=0 ep_overflow=wait | input should be 'error' or 'drop'
dp=2 ep=2 model.capacity_factor=0 ep_overflow=drop | drop it, or give ep_buffer = 2.0
ampipe_degree=0 | ampipe_degree = 0: input should be 'auto', or input should be greater than or equal to 1
ampipe_degree=2.5 | input should be 'auto', or input should be a valid integer
ampipe_degree=17 | less than two tokens: give 16 or less
ampipe_capacity=whole | give ampipe_degree = 2 or more, or drop it
ampipe_degree=2 ampipe_capacity=all | input should be 'chunk' or 'whole'
model.capacity_factor=0 ampipe_degree=2 ampipe_capacity=whole | or give model.capacity_factor = 1.25
model.kind=gpt model.experts= ampipe_degree=2 ampipe_capacity=whole | drop it, or give model.kind = 'moe'
training.global_batch=1 model.capacity_factor=0.5 ampipe_degree=16 | slot: give model.capacity_factor = 1.0
model.capacity_factor=0.001 | less than one slot: give model.capacity_factor = 0.0079 or more
model.capacity_factor=-1 | input should be greater than or equal to 0
pipe_experts=true | give ep = 2 or more, or drop it
dp=2 ep=2 pipe_experts=1 | pipe_experts = 1: input should be a valid boolean
dp=2 ep=2 model.capacity_factor=0 pipe_experts=true | _data = 2, or give experts a capacity
dp=4 ep=4 pipe_experts=true | cut them with pipe_experts_multi_data = 2
pipe_experts_multi_data=2 | give ep = 2 or more, or drop it
model.top_k=5 | top_k = 5 must not be above experts = 4
model.experts=1 | model.experts = 1: input should be greater than or equal to 2
model.dense_every=1 | leaves none of layers = 2 with experts; give 0 or 2
model.expert_ratio=0.001 | makes experts of width 0; give 0.0625 or more
dp=2 ep=2 training.global_batch=1 | must be a multiple of parallel.microbatches = 1 times parallel.dp = 2
ampipe=2 | did you mean parallel.ampipe_degree?
ep_plan={a='experts'} | is about modules of experts; give ep = 2 or more, or drop it
dp=2 ep=2 ep_plan={'blocks.*.mlp.expert'='experts'} | did you mean 'blocks.*.mlp.experts'?
dp=2 ep=2 ep_plan={'blocks.*.mlp.experts'='rows'} | unknown style 'rows'; the one that there is: 'experts'
dp=2 ep=2 ep_plan={'blocks.*.mlp'='experts'} | name the module that has such
"""

SIZES = (
    "hidden_size=16,intermediate_size=16,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,"
    "max_position_embeddings=32,head_dim=8"
)
THEIRS = """
Llama dp=2 ep=2 | ep_plan={"layers.*.mlp.experts": "experts"}, or ep = 1
Mixtral num_local_experts=3 dp=2 ep=2 | give an ep that divides them, such as 1
Mixtral num_local_experts=4 dp=2 ep=2 pipe_experts=true | cut them with pipe_experts_multi_data = 2
"""
"""Of `transformers`: the class, then keys of its configuration, then changes."""


def rows(table: str) -> list[Any]:
    return [line.split(" | ") for line in table.strip().splitlines()]


def settings(changes: str) -> list[str]:
    return [change if "." in change.partition("=")[0] else f"parallel.{change}" for change in changes.split()]


def named(changes: str) -> list[str]:
    """The settings of a line of `THEIRS`."""
    name, *words = changes.split()
    own = [word for word in words if word.startswith("num_")]
    empty = [f"model.{key}=" for key in ("layers", "hidden", "heads", "context", "experts")]
    model = [f"model.architecture={name}ForCausalLM", f"model.config={{{','.join([SIZES, *own])}}}"]
    others = settings(" ".join(word for word in words if word not in own))
    return ["model.kind=huggingface", *empty, *model, *others]


@pytest.mark.parametrize(
    ("changes", "said"),
    [*((settings(a), b) for a, b in rows(SETTINGS)), *((named(a), b) for a, b in rows(THEIRS))],
)
def test_a_settings_file(
    changes: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before text is read or a rank is started."""
    if "model.kind=huggingface" in changes:
        pytest.importorskip("transformers")

    def late(*_: Any) -> None:
        raise AssertionError("text was read, or ranks were started")

    for name in ("task_of", "_work", "_launch"):
        monkeypatch.setattr(launch, name, late)
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    given = [word for change in [*changes, f"output.run_dir={tmp_path}/run"] for word in ("--set", change)]
    error = CliRunner().invoke(app, ["train", str(path), *given]).exception
    assert isinstance(error, UsageError)
    assert said in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        "data.sequence_length=1",
        "dp=4 ep=4",
        "dp=4 ep=2 training.global_batch=12",
        "dp=2 ep=2 model.capacity_factor=0 ep_buffer=1 ep_overflow=drop",
        "ampipe_degree=16 ampipe_capacity=whole",
        "training.global_batch=1 model.capacity_factor=0.5 ampipe_degree=8",
        "training.global_batch=1 model.capacity_factor=1.0 ampipe_degree=16",
        "model.capacity_factor=0.0079",
        "dp=2 ep=2 pipe_experts=true pipe_experts_multi_data=80",
        "dp=2 ep=2 model.capacity_factor=0 pipe_experts_multi_data=256",
        "dp=2 ep=2 ampipe_degree=4 pipe_experts_multi_data=20",
        "model.dense_every=2",
        "model.expert_ratio=0.0625",
    ],
)
def test_the_values_that_refusals_name_are_taken(changes: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    found = load_settings(path, settings(changes))
    for change in settings(changes):
        section, key, value = re.split(r"[.=]", change, maxsplit=2)
        now = getattr(getattr(found, section), key)
        assert now == (float(value) if value[0].isdigit() else {"true": True}.get(value, value))


def model(capacity: float | None = 1.0, **more: Any) -> MoEGPT:
    sizes = {"vocab_size": 32, "layers": 2, "hidden": 16, "heads": 2, "context": 12, "experts": 4}
    return MoEGPT(MoEConfig(**{**sizes, "capacity_factor": capacity, **more}))


class Alone(nn.Module):
    """Experts that are given tokens alone, as Llama 4's."""

    def __init__(self, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.experts = experts or nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.experts(x)
        return made


def apart() -> nn.Module:
    """Experts that are modules each, as Mixtral's in `transformers` 4."""
    return Alone(nn.ModuleList([nn.Linear(8, 8)]))


TOKENS, ROWS = torch.zeros(8, 13, dtype=torch.int64), torch.zeros(4, 8)
EP: dict[str, Any] = {"ep": 2, "dp": 2}
OWN = {**EP, "ep_plan": {"experts": "experts"}}
CODE: list[tuple[nn.Module, Tensor, dict[str, Any], str]] = [
    (model(), TOKENS, {"ep": 3, "dp": 3}, "give an ep that divides them, such as 2"),
    (model(), TOKENS, {"ep": 2, "dp": 3}, "give dp = 4"),
    (model(), TOKENS, {"ampipe_degree": 7}, "less than two tokens; give 6 or less"),
    (model(), TOKENS, {"tp": 2, "sequence_parallel": True, "ampipe_degree": 8}, "give 6 or less"),
    (model(), TOKENS, {**EP, "pipe_experts_multi_data": 25}, "which are fewer: give 24"),
    (model(None), TOKENS, {**EP, "pipe_experts_multi_data": 97}, "which are fewer: give 96 or less"),
    (model(None), TOKENS, {**EP, "pipe_experts": True}, "pipe_experts_multi_data = 2, or give experts a"),
    (model(), TOKENS, {"ep": 4, "dp": 4, "pipe_experts": True}, "= 2, or give a smaller ep"),
    (model(None), TOKENS, {**EP, "ep_overflow": "drop"}, "drop it, or give ep_buffer = 2.0"),
    (nn.Linear(8, 2), ROWS, EP, "no plan for expert parallelism: give one"),
    (nn.Linear(8, 2), ROWS, {"ampipe_degree": 2}, "no ModuleList of blocks"),
    (Alone(), ROWS, OWN, "leave it out of ep_plan, or give"),
    (apart(), ROWS, EP, "take transformers 5.17 or newer"),
    (apart(), ROWS, OWN, "take transformers 5.17 or newer"),
    (model(), TOKENS, {**EP, "ep_plan": {"blocks.*.moe": "experts"}}, "ep_plan['blocks.*.moe']: the model"),
    (model(), TOKENS[:0], EP, "batch"),
    (model(), TOKENS[:, :1], EP, "give each sequence two tokens or more"),
]


def _loss(model: nn.Module, x: Tensor) -> Any:
    return moe_token_sum(model, x) if isinstance(model, MoEGPT) else model(x).sum()


@pytest.mark.parametrize(("given", "batch", "how", "said"), CODE, ids=[str(how) for *_, how, _ in CODE])
def test_code(given: nn.Module, batch: Tensor, how: dict[str, Any], said: str) -> None:
    with pytest.raises(StrettoError, match=re.escape(said)):
        capture(given, batch, _loss, Parallel(**how))


EXPERTS = {"blocks.*.mlp.experts": "experts"}
PLANS: list[tuple[dict[str, str], str]] = [
    ({"norm.weight": "dim:0"}, "the parameter 'norm.weight'.*'experts'"),
    ({**EXPERTS, "blocks.*.mlp.experts.up": "dim:3"}, "'dim:D', the number"),
    ({**EXPERTS, "blocks.*.mlp.experts.up": "sequence"}, "'dim:D', the number"),
    ({**EXPERTS, "blocks.*.mlp.experts.up": "dim:2:5"}, "64 features of 5"),
]


@pytest.mark.parametrize(("plan", "said"), PLANS)
def test_plans_of_matrices_of_experts(plan: dict[str, str], said: str) -> None:
    with pytest.raises(StrettoError, match=said):
        capture(model(), TOKENS, _loss, Parallel(tp=2), tp_plan=plan)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"ep": 2}, "give dp = 2"),
        ({"ep": True, "dp": 2}, "ep = True: input should be a valid integer"),
        ({**EP, "ep_buffer": float("inf")}, "ep_buffer = inf: input should be a finite number"),
        ({"ep_buffer": 3.0}, "ep_buffer = 3.0"),
        *(({"ampipe_degree": one}, "input should be 'auto', or ") for one in (0, -2, "2", True, 1.5)),
        ({"ampipe_degre": 2}, "ampipe_degre = 2: there is no such setting; did you mean ampipe_degree?"),
        ({"ampipe_capacity": "whole"}, "ampipe_degree = 2"),
        ({"pipe_experts_multi_data": 2}, "give ep = 2 or more, or drop it"),
    ],
    ids=str,
)
def test_arguments(how: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        Parallel(**how)
