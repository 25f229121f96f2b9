"""Exported models are read by others and say the same."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.train.tiny import LLAMA, train, write_settings
from tokenizers import Tokenizer
from typer.testing import CliRunner

from stretto.cli.main import app
from stretto.errors import StrettoError, UsageError
from stretto.models.gpt import GPT
from stretto.models.moe import MoEConfig, MoEGPT
from stretto.models.pretrained import load_gpt, save_gpt
from stretto.saving import digests
from stretto.train.checkpoint import load_model
from stretto.train.export import export


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.mark.slow
def test_a_gpt_with_tied_weights_comes_back(folder: Path) -> None:
    path = write_settings(folder, steps=3, run="gpt", model="tie_embeddings = true")
    train(path)
    output = folder / "gpt-out"
    with pytest.raises(UsageError, match="no complete checkpoint"):
        export(folder / "text", output)
    result = CliRunner().invoke(app, ["export", str(folder / "gpt"), "-o", str(output)])
    assert "step-000003" in result.output
    with pytest.raises(UsageError, match="not an empty folder"):
        export(folder / "gpt", output)
    model = load_gpt(output)
    assert isinstance(model, GPT)
    assert model.head.weight is model.embedding.weight
    tokens = torch.arange(16)[None]
    assert torch.equal(model(tokens), load_model(folder / "gpt" / "checkpoints" / "step-000003")[0](tokens))
    assert len([n for n in load_file(output / "model.safetensors") if "head" in n or "embedding" in n]) == 1
    with pytest.raises(UsageError, match="no GPT"):
        load_gpt(folder)
    assert Tokenizer.from_file(str(output / "tokenizer.json")).get_vocab_size() == model.config.vocab_size


def test_a_gpt_with_experts_comes_back(tmp_path: Path) -> None:
    config = MoEConfig(
        vocab_size=32,
        layers=2,
        hidden=16,
        heads=2,
        context=12,
        experts=4,
        capacity_factor=0,
        tie_embeddings=True,
    )
    model = MoEGPT(config, seed=3)
    save_gpt(model, tmp_path)
    found = load_gpt(tmp_path)
    assert isinstance(found, MoEGPT)
    assert found.config == config
    tokens = torch.arange(12)[None]
    assert all(map(torch.equal, found(tokens)[:2], model.eval()(tokens)[:2]))  # logits, losses
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "stretto-moe"


def test_a_llama_is_read_by_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    train(write_settings(folder, steps=3, run="llama", table=LLAMA))
    output = folder / "llama-out"
    trained = load_model(export(folder / "llama", output))[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = torch.arange(16)[None]
    assert torch.equal(model(tokens).logits, trained(tokens).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    assert tokenizer.eos_token_id == 0
    assert tokenizer.decode(tokenizer("seven wizards")["input_ids"]) == "seven wizards"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": 300}, r"lacks most of its model, such as model\.blocks\.\d+\.mlp"),
        ({"hidden": 2**20}, r"has the shape .*, and this model's \[\d+, 1048576\]"),
        ({"layers": 10**9}, "less than or equal to 4096"),
        ({"kind": "huggingface", "architecture": "os.system"}, "settings cannot be read|has no such model"),
    ],
)
def test_a_model_of_another_size_is_refused_before_it_is_made(
    folder: Path, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    """What a checkpoint says of its model is a stranger's, digests and all."""
    if not (folder / "sized").exists():
        train(write_settings(folder, steps=1, run="sized"))
    place = Path(shutil.copytree(folder / "sized" / "checkpoints" / "step-000001", tmp_path / "step-000001"))
    state = json.loads((place / "state.json").read_text())
    state["settings"]["model"] |= change
    (place / "state.json").write_text(json.dumps(state))
    names = json.loads((place / digests.NAME).read_text())["files"]
    (place / digests.NAME).write_bytes(digests.sealed({name: (place / name).read_bytes() for name in names}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StrettoError, match=told):
        export(place, tmp_path / "out")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6  # KiB


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(
    "error",
    [SafetensorError("I/O error: No space left on device"), OSError(errno.ENOSPC, "No space left on device")],
)
def test_a_failed_export_leaves_nothing_and_may_be_tried_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, exists: bool
) -> None:
    if not (folder / "once").exists():
        train(write_settings(folder, steps=2, run="once"))
    output = tmp_path / "out"
    if exists:
        output.mkdir()

    def full(model: GPT, place: Path) -> None:
        (place / "config.json").write_text("{}")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("stretto.train.export.save_gpt", full)
        with pytest.raises(StrettoError, match=r"cannot write .*out: .*No space left on device; see to it"):
            export(folder / "once", output)
    assert list(tmp_path.rglob("*")) == ([output] if exists else [])
    export(folder / "once", output)
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in tmp_path.rglob("*")} == {"out", *names}
    load_gpt(output)
