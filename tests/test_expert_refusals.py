"""Settings of experts and chunks that cannot work: each is refused at once, with a value that works.

One table for settings files, where `stretto train` ends before text is read or a rank is started, and one for
code. A row's last entry is what the message must say, the nearest value that works in it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.cli.main import main
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

EP = ("parallel.dp=2", "parallel.ep=2")
DROPLESS = "model.capacity_factor=0"

SETTINGS: list[tuple[str, str]] = [
    ("parallel.ep=2", "dp = 1 is no multiple of it; give dp = 2"),
    ("parallel.dp=2 parallel.ep=4", "ep = 4 takes its ranks from the data-parallel ones, and dp = 2"),
    ("parallel.ep=0", "parallel.ep = 0: input should be greater than or equal to 1"),
    ("parallel.ep=2.0", "parallel.ep = 2.0: input should be a valid integer"),
    ("parallel.dp=8 parallel.ep=8", "must divide model.experts = 4: give parallel.ep = 4"),
    (
        "parallel.dp=3 parallel.ep=3 training.global_batch=9",
        "parallel.ep = 2 and parallel.dp = 4, or model.experts = 6",
    ),
    ("model.kind=gpt model.experts= parallel.dp=2 parallel.ep=2", "give model.kind = 'moe', or ep = 1"),
    (
        f"{' '.join(EP)} {DROPLESS} parallel.ep_buffer=0.9",
        "ep_buffer = 0.9: input should be greater than or equal to 1",
    ),
    (f"{' '.join(EP)} {DROPLESS} parallel.ep_buffer=nan", "ep_buffer = nan: input should be a finite number"),
    (f"{' '.join(EP)} parallel.ep_buffer=3", "drop it, or give model.capacity_factor = 0"),
    (f"{' '.join(EP)} parallel.ep_overflow=drop", "drop it, or give model.capacity_factor = 0"),
    (f"{' '.join(EP)} {DROPLESS} parallel.ep_overflow=wait", "input should be 'error' or 'drop'"),
    (f"{DROPLESS} parallel.ep_overflow=drop", "give ep = 2 or more, or drop it"),
    (
        f"{' '.join(EP)} {DROPLESS} parallel.ep_overflow=drop",
        "drop it, or give parallel.ep_buffer = 2.0",
    ),
    ("parallel.ampipe_degree=0", "0 is neither 'auto' nor a number of chunks from 1 to 65,536"),
    ("parallel.ampipe_degree=2.5", "2.5 is neither 'auto' nor a number of chunks from 1 to 65,536"),
    ("parallel.ampipe_degree=two", "'two' is neither 'auto' nor a number of chunks from 1 to 65,536"),
    ("parallel.ampipe_degree=17", "less than two tokens: give 16 or less"),
    ("parallel.ampipe_capacity=whole", "give ampipe_degree = 2 or more, or drop it"),
    ("parallel.ampipe_degree=2 parallel.ampipe_capacity=all", "input should be 'chunk' or 'whole'"),
    (
        f"{DROPLESS} parallel.ampipe_degree=2 parallel.ampipe_capacity=whole",
        "drop it, or give model.capacity_factor = 1.25",
    ),
    (
        "model.kind=gpt model.experts= parallel.ampipe_degree=2 parallel.ampipe_capacity=whole",
        "drop it, or give model.kind = 'moe'",
    ),
    (
        "training.global_batch=1 model.capacity_factor=0.5 parallel.ampipe_degree=16",
        "the 2 tokens that share an expert's slots is less than one slot: give parallel.ampipe_degree = 8, "
        "or model.capacity_factor = 1.0 or more",
    ),
    ("model.capacity_factor=0.001", "less than one slot: give model.capacity_factor = 0.0079 or more"),
    ("model.capacity_factor=-1", "input should be greater than or equal to 0"),
    ("parallel.pipe_experts=true", "give ep = 2 or more, or drop it"),
    (f"{' '.join(EP)} parallel.pipe_experts=1", "pipe_experts = 1: input should be a valid boolean"),
    (
        f"{' '.join(EP)} {DROPLESS} parallel.pipe_experts=true",
        "parallel.pipe_experts_multi_data = 2, or give model.capacity_factor = 1.25",
    ),
    (
        "parallel.dp=4 parallel.ep=4 parallel.pipe_experts=true",
        "a rank has only one of model.experts = 4: cut them with parallel.pipe_experts_multi_data = 2, or "
        "parallel.ep = 2",
    ),
    ("parallel.pipe_experts_multi_data=2", "give ep = 2 or more, or drop it"),
    (
        f"{' '.join(EP)} parallel.pipe_experts_multi_data=81",
        "80 slots of an expert, which are fewer: give 80 or less",
    ),
    (
        f"{' '.join(EP)} {DROPLESS} parallel.pipe_experts_multi_data=65536",
        "256 rows of a rank's buffer, which are fewer: give 256 or less",
    ),
    (
        f"{' '.join(EP)} parallel.ampipe_degree=4 parallel.pipe_experts_multi_data=21",
        "20 slots of an expert, which are fewer: give 20 or less",
    ),
    ("model.top_k=5", "top_k = 5 must not be above experts = 4"),
    ("model.experts=1", "model.experts = 1: input should be greater than or equal to 2"),
    ("model.dense_every=1", "leaves none of layers = 2 with experts; give 0 or 2"),
    ("model.expert_ratio=0.001", "makes experts of width 0; give 0.0625 or more"),
    (
        f"{' '.join(EP)} training.global_batch=1",
        "must be a multiple of parallel.microbatches = 1 times parallel.dp = 2",
    ),
    ("parallel.ampipe=2", "did you mean parallel.ampipe_degree?"),
    ("parallel.ep_plan={a='experts'}", "is about modules of experts; give ep = 2 or more, or drop it"),
    (
        f"{' '.join(EP)} parallel.ep_plan={{'blocks.*.mlp.expert'='experts'}}",
        "the model has no module of that name; did you mean 'blocks.*.mlp.experts'?",
    ),
    (
        f"{' '.join(EP)} parallel.ep_plan={{'blocks.*.mlp.experts'='rows'}}",
        "unknown style 'rows'; the one that there is: 'experts'",
    ),
    (f"{' '.join(EP)} parallel.ep_plan={{'blocks.*.mlp'='experts'}}", "name the module that holds such"),
]

HUGGING = "model.kind=huggingface model.layers= model.hidden= model.heads= model.context= model.experts= "
SIZES = (
    "hidden_size=16,intermediate_size=16,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,"
    "max_position_embeddings=32,head_dim=8"
)
THEIRS: list[tuple[str, str]] = [
    (
        f"model.architecture=LlamaForCausalLM model.config={{{SIZES}}} {' '.join(EP)}",
        'no plan for expert parallelism: give one, ep_plan={"layers.*.mlp.experts": "experts"}, or ep = 1',
    ),
    (
        f"model.architecture=MixtralForCausalLM model.config={{{SIZES},num_local_experts=3}} {' '.join(EP)}",
        "3 experts, which cannot be shared equally by ep = 2 ranks: give an ep that divides them, such as 1",
    ),
    (
        f"model.architecture=MixtralForCausalLM model.config={{{SIZES},num_local_experts=4}} {' '.join(EP)} "
        "parallel.pipe_experts=true",
        "cut them with pipe_experts_multi_data = 2",
    ),
    (
        f"model.architecture=GptOssForCausalLM model.config={{{SIZES}}} parallel.ampipe_degree=2",
        "choose that attention where the model has it (transformers: attn_implementation='sdpa')",
    ),
    (
        f"model.architecture=MixtralForCausalLM model.config={{{SIZES},attn_implementation='eager'}} "
        "parallel.ampipe_degree=2",
        "choose that attention where the model has it (transformers: attn_implementation='sdpa')",
    ),
]


def _refused(
    tmp_path: Path,
    changes: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def late(*_: Any) -> None:
        raise AssertionError("text was read, or ranks were started")

    for name in ("task_of", "_work", "_launch"):
        monkeypatch.setattr(launch, name, late)
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    given = [word for change in changes.split() for word in ("--set", change)]
    run_dir = f"output.run_dir={tmp_path / 'run'}"
    monkeypatch.setattr(sys, "argv", ["stretto", "train", str(path), *given, "--set", run_dir])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2, told
    assert said in told


@pytest.mark.parametrize(("changes", "said"), SETTINGS)
def test_a_settings_file(
    changes: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _refused(tmp_path, changes, said, monkeypatch, capsys)


@pytest.mark.parametrize(("changes", "said"), THEIRS)
def test_a_settings_file_of_a_model_of_transformers(
    changes: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    _refused(tmp_path, HUGGING + changes, said, monkeypatch, capsys)


@pytest.mark.parametrize(
    "changes",
    [
        "data.sequence_length=1",
        "parallel.dp=4 parallel.ep=4",
        "parallel.dp=4 parallel.ep=2 training.global_batch=12",
        f"{' '.join(EP)} {DROPLESS} parallel.ep_buffer=1 parallel.ep_overflow=drop",
        "parallel.ampipe_degree=16 parallel.ampipe_capacity=whole",
        "training.global_batch=1 model.capacity_factor=0.5 parallel.ampipe_degree=8",
        "training.global_batch=1 model.capacity_factor=1.0 parallel.ampipe_degree=16",
        "model.capacity_factor=0.0079",
        f"{' '.join(EP)} parallel.pipe_experts=true parallel.pipe_experts_multi_data=80",
        f"{' '.join(EP)} {DROPLESS} parallel.pipe_experts_multi_data=256",
        f"{' '.join(EP)} parallel.ampipe_degree=4 parallel.pipe_experts_multi_data=20",
        "model.dense_every=2",
        "model.expert_ratio=0.0625",
    ],
)
def test_the_values_that_refusals_name_are_taken(changes: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    settings = load_settings(path, changes.split())
    for change in changes.split():
        section, key, value = re.split(r"[.=]", change, maxsplit=2)
        now = getattr(getattr(settings, section), key)
        assert now == (float(value) if value[0].isdigit() else {"true": True}.get(value, value))


def model(capacity: float | None = 1.0, **more: Any) -> MoEGPT:
    sizes = {"vocab_size": 32, "layers": 2, "hidden": 16, "heads": 2, "context": 12, "experts": 4}
    return MoEGPT(MoEConfig(**{**sizes, "capacity_factor": capacity, **more}))


class Alone(nn.Module):
    """Experts that are given tokens alone, as Llama 4's."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.experts(x)
        return made


class Apart(Alone):
    """Experts that are modules each, as Mixtral's in `transformers` 4."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8)])  # type: ignore[assignment]


TOKENS = torch.zeros(8, 13, dtype=torch.int64)
CODE: list[tuple[Any, Any, dict[str, Any], str]] = [
    (model(), TOKENS, {"ep": 3, "dp": 3}, "give an ep that divides them, such as 2"),
    (model(), TOKENS, {"ep": 8, "dp": 8}, "give an ep that divides them, such as 4"),
    (model(), TOKENS, {"ampipe_degree": 7}, "less than two tokens; give 6 or less"),
    (model(), TOKENS, {"ampipe_degree": 65536}, "less than two tokens; give 6 or less"),
    (
        model(),
        TOKENS,
        {"ep": 2, "dp": 2, "pipe_experts_multi_data": 25},
        "24 slots of an expert, which are fewer: give 24",
    ),
    (
        model(None),
        TOKENS,
        {"ep": 2, "dp": 2, "pipe_experts_multi_data": 97},
        "96 rows of a rank's buffer, which are fewer: give 96 or less",
    ),
    (
        model(None),
        TOKENS,
        {"ep": 2, "dp": 2, "pipe_experts": True},
        "pipe_experts_multi_data = 2, or give experts a",
    ),
    (
        model(),
        TOKENS,
        {"ep": 4, "dp": 4, "pipe_experts": True},
        "pipe_experts_multi_data = 2, or give a smaller ep",
    ),
    (model(None), TOKENS, {"ep": 2, "dp": 2, "ep_overflow": "drop"}, "drop it, or give ep_buffer = 2.0"),
    (nn.Linear(2, 2), torch.zeros(4, 2), {"ep": 2, "dp": 2}, "no plan for expert parallelism: give one"),
    (nn.Linear(2, 2), torch.zeros(4, 2), {"ampipe_degree": 2}, "no ModuleList of blocks"),
    (
        Alone(),
        torch.zeros(4, 8),
        {"ep": 2, "dp": 2, "ep_plan": {"experts": "experts"}},
        "leave it out of ep_plan, or give",
    ),
    *(
        (
            Apart(),
            torch.zeros(4, 8),
            {"ep": 2, "dp": 2, **plan},
            "take transformers 5.17 or newer, which has",
        )
        for plan in ({}, {"ep_plan": {"experts": "experts"}})
    ),
    (
        model(),
        TOKENS,
        {"ep": 2, "dp": 2, "ep_plan": {"blocks.*.moe": "experts"}},
        "ep_plan['blocks.*.moe']: the model has no",
    ),
    (model(), TOKENS[:0], {"ep": 2, "dp": 2}, "batch"),
    (model(), TOKENS[:, :1], {"ep": 2, "dp": 2}, "give each sequence two tokens or more"),
]


def _loss(model: nn.Module, x: Tensor) -> Any:
    return moe_token_sum(model, x) if isinstance(model, MoEGPT) else model(x).sum()


@pytest.mark.parametrize(("given", "batch", "how", "said"), CODE, ids=[str(how) for *_, how, _ in CODE])
def test_code(given: nn.Module, batch: Tensor, how: dict[str, Any], said: str) -> None:
    with pytest.raises(StrettoError, match=re.escape(said)):
        capture(given, batch, _loss, Parallel(**how))


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"ep": 2}, "give dp = 2"),
    ({"ep": -1}, "ep = -1: input should be greater than or equal to 1"),
    ({"ep": 2.0, "dp": 2}, "ep = 2.0: input should be a valid integer"),
    ({"ep": True, "dp": 2}, "ep = True: input should be a valid integer"),
    ({"ep": 2, "dp": 2, "ep_buffer": float("inf")}, "ep_buffer = inf: input should be a finite number"),
    ({"ep": 2, "dp": 2, "ep_overflow": "dropp"}, "input should be 'error' or 'drop'"),
    ({"ampipe_degree": -2}, "-2 is neither 'auto' nor a number of chunks from 1 to 65,536"),
    ({"ampipe_degre": 2}, "ampipe_degre = 2: there is no such setting; did you mean ampipe_degree?"),
    ({"pipe_experts_multi_data": 2}, "give ep = 2 or more, or drop it"),
]


@pytest.mark.parametrize(("how", "said"), ARGUMENTS, ids=[str(how) for how, _ in ARGUMENTS])
def test_arguments(how: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        Parallel(**how)
