"""Weights of a folder come to the ranks that have them, and what does not fit is reported before any does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import stretto
from stretto.config import GPTSettings, HuggingFaceSettings
from stretto.config.pretrained import complete
from stretto.errors import RunError, UsageError
from stretto.ir.serialize import job_text
from stretto.models.build import build_model, hollow, huggingface_sum
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.models.pretrained import save_gpt
from stretto.models.weight_files import INDEX, weights_of
from stretto.runtime.rank_tensors import Part
from stretto.runtime.runner import Runner
from stretto.saving.pretrained import fill, read
from tests.runtime.equality import DEEPSEEK_V3, from_transformers, lowered
from tests.saving.pretrained import KINDS, SIZES, write_pretrained

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
"""Relative, of a loss in float32 whose sums are grouped otherwise."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models in bfloat16, as most are."""
    place = tmp_path_factory.mktemp("weights")
    return {name: write_pretrained(place / name, name, torch.bfloat16) for name in KINDS}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """One of which a test changes files."""
    return write_pretrained(tmp_path / "llama", "llama")


def settings_of(folder: Path, **more: Any) -> HuggingFaceSettings:
    values: dict[str, Any] = {"model": {"pretrained": str(folder), **more}}
    complete(values)
    return HuggingFaceSettings(**values["model"])


def hollow_model(folder: Path, tokens: int = 301, **more: Any) -> nn.Module:
    with hollow():
        return build_model(settings_of(folder, **more), tokens, 0)


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2},
    "tp": {"tp": 2, "sequence_parallel": True},
    "ep": {"dp": 2, "ep": 2, "ep_buffer": 2.0},
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "tp"),
        ("mixtral", "ep"),
        pytest.param("mixtral", "pp", marks=pytest.mark.slow),
        pytest.param("llama", "pp", marks=pytest.mark.slow),
        pytest.param("mixtral", "tp", marks=pytest.mark.slow),
    ],
)
def test_each_rank_reads_what_it_holds(folders: dict[str, Path], name: str, layout: str) -> None:
    folder = folders[name]
    options = {**LAYOUTS[layout], "microbatches": 2 // LAYOUTS[layout].get("dp", 1)}
    # Grouped products are not for processors in all versions.
    model = hollow_model(folder, config={"experts_implementation": "batched_mm"})
    assert all(p.is_meta for p in model.parameters())
    tokens = torch.randint(0, 301, (4, 17), generator=torch.Generator().manual_seed(5))
    parallel = stretto.Parallel(**options)
    job = stretto.capture(model, tokens, huggingface_sum, parallel)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def work(runner: Runner) -> tuple[float, int, dict[str, torch.Tensor]]:
        with pytest.raises(RunError, match='no full values: its model is on "meta"'):
            runner.step(tokens)
        fill(runner, model, folder)
        kept = sum(p.numel() for p in runner.parameters())
        return float(runner.step(tokens)), kept, runner.state_dict()

    found = stretto.run_threads(lowered(job, "1f1b"), lambda _: copy.deepcopy(model), work, empty=True)
    expected = float(reference(input_ids=tokens, labels=tokens).loss.detach())
    full = sum(p.numel() for p in reference.parameters())
    for loss, kept, values in found:
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        assert kept < 0.8 * full
        known = reference.state_dict()
        assert values.keys() == known.keys()
        assert all(torch.equal(values[key], known[key]) for key in known)


def test_an_own_model_is_read_and_its_job_does_not_tell(tmp_path: Path) -> None:
    """Its tied weight is in the file once. Costs and plans that were kept are found by the job."""
    made = GPT(
        GPTConfig(vocab_size=64, layers=1, hidden=16, heads=2, context=16, tie_embeddings=True), seed=4
    )
    save_gpt(made, tmp_path)
    values: dict[str, Any] = {"model": {"pretrained": str(tmp_path)}}
    complete(values)
    with hollow():
        model = build_model(GPTSettings(**values["model"]), 64, 0)
    tokens = torch.arange(34).reshape(2, 17)
    job = stretto.capture(model, tokens, next_token_loss, stretto.Parallel(microbatches=2))
    plain = stretto.capture(made, tokens, next_token_loss, stretto.Parallel(microbatches=2))
    assert job_text(job) == job_text(plain)
    runner = Runner(lowered(job, "gpipe"), model, empty=True)
    fill(runner, model, tmp_path)
    assert float(runner.step(tokens)) == pytest.approx(
        float(next_token_loss(made, tokens).detach()), rel=TOLERANCE
    )


def test_an_unfilled_runner_takes_a_checkpoint_or_a_state_dict(llama: Path) -> None:
    model = hollow_model(llama)
    tokens = torch.arange(34).reshape(2, 17)
    job = stretto.capture(model, tokens, huggingface_sum, stretto.Parallel(microbatches=2))
    plan = lowered(job, "gpipe")
    reference = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with pytest.raises(UsageError, match=r"is on the meta device .*Runner\(..., empty=True\)"):
        Runner(plan, model)
    runner = Runner(plan, model, empty=True)
    values = reference.state_dict()
    name = next(iter(values))
    runner.load_state_dict(
        {key: value for key, value in values.items() if key != name and "head" not in key}, False
    )
    with pytest.raises(RunError, match="no full values"):
        runner.step(tokens)
    runner.load_state_dict(values)
    assert float(runner.step(tokens)) == pytest.approx(
        float(reference(input_ids=tokens, labels=tokens).loss.detach()), rel=TOLERANCE
    )


ROOMY = {"vocab_size": 64, "num_key_value_heads": 2, "pad_token_id": None}
MORE: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_head": 2, "n_layer": 2},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8},
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "GptOssForCausalLM": {"num_local_experts": 4, "head_dim": 8},
    "BloomForCausalLM": {"n_head": 2, "n_layer": 2},
    "JetMoeForCausalLM": {"kv_channels": 8},
}
"""Names and layouts in files that are others than those of the modules, and some that are not."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MORE)
def test_every_value_is_the_one_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    from_transformers(architecture, **{**SIZES, **ROOMY, **MORE[architecture]}).save_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model = hollow_model(tmp_path, 64)
    parts = {
        f"model.{n}": Part.all_of(torch.empty_like(p, device="cpu")) for n, p in model.named_parameters()
    }
    parts |= {f"buffer.{n}": Part.all_of(b.clone()) for n, b in model.named_buffers()}
    read(weights_of(model, tmp_path), parts)
    for name, one in (*reference.named_parameters(), *reference.named_buffers()):
        kind = "buffer" if f"buffer.{name}" in parts else "model"
        assert torch.equal(parts[f"{kind}.{name}"].boxes[0][1], one), name


def change(folder: Path, names: dict[str, torch.Tensor | None]) -> None:
    """Give tensors of the files other values; None removes one."""
    index = json.loads((folder / INDEX).read_text())
    for name, value in names.items():
        file = folder / index["weight_map"].get(name, sorted(index["weight_map"].values())[0])
        tensors = {**load_file(file), name: value}
        save_file({key: one for key, one in tensors.items() if one is not None}, file)
        index["weight_map"] = {**index["weight_map"], name: file.name}
        if value is None:
            del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({NORM: None, "model.norm.weight": None}, rf"lack {NORM}, model\.norm\.weight"),
        ({"model.more.weight": torch.ones(3)}, r"model\.more\.weight"),
        ({NORM: torch.ones(31)}, rf"{NORM} is \[31\], and the model's \[32\]"),
        ({NORM: torch.ones(32).to(torch.float8_e4m3fn)}, rf"{NORM} is F8_E4M3"),
        ({NORM: torch.ones(32, dtype=torch.int32)}, rf"{NORM} is torch\.int32"),
        ({"lm_head.weight": torch.ones(310, 32)}, r"lm_head\.weight differ"),
    ],
    ids=["lacking", "too many", "shape", "quantised", "dtype", "untied"],
)
def test_weights_that_do_not_fit_are_refused(
    llama: Path, names: dict[str, torch.Tensor | None], words: str
) -> None:
    weights_of(hollow_model(llama), llama)
    change(llama, names)
    with pytest.raises(UsageError, match=words):
        weights_of(hollow_model(llama), llama)


def test_other_names_of_the_hub_are_read(llama: Path) -> None:
    """Tables of older versions are left. Many are saved without the head, which is tied."""
    change(llama, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert not any("inv_freq" in name for name in weights_of(hollow_model(llama), llama).of)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model.model.save_pretrained(llama / "base")
    names = weights_of(hollow_model(llama), llama / "base").of
    assert names["lm_head.weight"] == names["model.embed_tokens.weight"] == "model.embed_tokens.weight"


def test_files_that_are_not_there_are_named(llama: Path) -> None:
    model = hollow_model(llama)
    first = min(llama.glob("model-*.safetensors"))
    for change, words in (
        (lambda: first.write_bytes(first.read_bytes()[:-10]), f"{first.name} cannot be read"),
        (first.unlink, f"lacks {first.name}"),
        ((llama / INDEX).unlink, "has no weights"),
        ((llama / "pytorch_model.bin").touch, r"pytorch_model\.bin alone"),
    ):
        change()
        with pytest.raises(UsageError, match=words):
            weights_of(model, llama)


def test_buffers_have_values_and_ties_stay(llama: Path) -> None:
    model = hollow_model(llama)
    plain = build_model(settings_of(llama), 301, 0)
    for (name, one), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert not any(p.is_meta for p in plain.parameters())
