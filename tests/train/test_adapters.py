"""`[model.adapter]`: a run trains an adapter of a folder's weights, which `peft` then reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tests.saving.pretrained import write_pretrained
from tests.train.tiny import steps_of, train, write_settings

from stretto.config import load_settings
from stretto.errors import UsageError
from stretto.files.say import silent
from stretto.models.adapters import plain_names
from stretto.models.build import build_model, hollow
from stretto.models.weight_files import weights_of
from stretto.train.checkpoint import load_model
from stretto.train.checkpoint_files import find
from stretto.train.data import prepare_data
from stretto.train.export import export
from stretto.train.job import refuse_early
from stretto.train.text import given_tokenizer

OF_LLAMA = 'target_modules = ["q_proj", "down_proj"]'
OF_EXPERTS = 'target_modules = ["v_proj"]\ntarget_parameters = ["mlp.experts.down_proj"]'


def write(folder: Path, weights: Path, adapter: str) -> Path:
    table = f'pretrained = "{weights}"\n[model.adapter]\nr = 2\n{adapter}\n'
    path = write_settings(folder, steps=2, every=2, run="run", table=table)
    path.write_text(path.read_text().replace("vocab_size = 300\n", ""), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [("llama", OF_LLAMA), pytest.param("mixtral", OF_EXPERTS, marks=pytest.mark.slow)],
)
def test_a_run_trains_an_adapter_that_peft_reads(kind: str, adapter: str, tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / kind, kind)
    path = write(tmp_path, source, adapter)
    train(path)
    steps = steps_of(tmp_path / "run")
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    start = {name: p.clone() for name, p in base.state_dict().items()}
    settings = load_settings(path)
    data = prepare_data(settings.data, silent, given_tokenizer(settings.model))
    tokens = data.train.batch(0, settings.training.global_batch)
    # B begins with zeros: at first an adapter changes nothing.
    plain = float(base(input_ids=tokens, labels=tokens).loss.detach())
    assert steps[1]["loss"] == pytest.approx(plain, rel=1e-5)

    output = tmp_path / "out"
    export(tmp_path / "run", output)
    assert {one.name for one in output.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (output / "model.safetensors").exists()
    of_peft: Any = peft
    loaded = of_peft.PeftModel.from_pretrained(base, output).eval()
    trained, _ = load_model(find(tmp_path / "run"))
    assert torch.equal(loaded(input_ids=tokens).logits, trained(input_ids=tokens).logits)
    moved = {name: p for name, p in loaded.named_parameters() if "lora_B" in name}
    assert moved
    assert all(float(p.detach().norm()) > 0 for p in moved.values())
    names = plain_names(loaded.get_base_model())
    found = {plain: loaded.get_base_model().state_dict()[name] for name, plain in names.items()}
    assert found.keys() == start.keys()
    assert all(torch.equal(found[name], value) for name, value in start.items())

    # Without a name the base that the folder says.
    again = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert type(again).__name__ == type(base).__name__


def test_each_rank_reads_its_parts_and_draws_the_same_adapter(tmp_path: Path) -> None:
    """Weights of the model are read; those of an adapter are drawn, whole, before."""
    source = write_pretrained(tmp_path / "llama", "llama")
    model = load_settings(write(tmp_path, source, OF_LLAMA)).model
    one, other = (build_model(model, 310, 7, empty=True) for _ in range(2))
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert p.is_meta != ("lora_" in name)
        assert p.requires_grad is ("lora_" in name)
        assert p.is_meta or torch.equal(p, q)
    of = weights_of(one, source).of
    assert of["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"] == (
        "model.layers.0.self_attn.q_proj.weight"
    )
    assert not any("lora_" in name for name in of)
    with hollow():
        assert weights_of(build_model(model, 310, 7), source).of == of
    refuse_early(load_settings(tmp_path / "run.toml", ["parallel.tp=2"]))  # of a model that has no values


REFUSED = (
    ("lora_alph = 3", r"model\.adapter\.lora_alph: peft .* has no such setting; did you mean 'lora_alpha'"),
    ('target_modules = ["nothing"]', "model.adapter: peft cannot adapt LlamaForCausalLM: Target modules"),
)


@pytest.mark.parametrize(("adapter", "message"), REFUSED)
def test_what_peft_does_not_take_is_refused_before_work_begins(
    adapter: str, message: str, tmp_path: Path
) -> None:
    source = write_pretrained(tmp_path / "llama", "llama")
    path = write(tmp_path, source, adapter)
    with pytest.raises(UsageError, match=message):
        refuse_early(load_settings(path, ["parallel.tp=2"]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("use_dora = true", "use_dora starts from the values of full weights"),
        ("init_lora_weights = 'pissa'", "init_lora_weights = 'pissa' starts from the values of full weights"),
        (
            "trainable_token_indices = [1, 2]",
            "trainable_token_indices starts from the values of full weights",
        ),
        ("layer_replication = [[0, 1]]", "layer_replication starts from the values of full weights"),
        (
            "megatron_core = 'megatron.core'",
            "megatron_core names a program, and a file of settings runs none",
        ),
    ],
)
def test_what_starts_from_values_is_refused(line: str, message: str, tmp_path: Path) -> None:
    source = write_pretrained(tmp_path / "llama", "llama")
    with pytest.raises(UsageError, match=message):
        load_settings(write(tmp_path, source, line))


def test_an_adapter_needs_weights(tmp_path: Path) -> None:
    table = 'kind = "huggingface"\narchitecture = "LlamaForCausalLM"\n[model.adapter]\nr = 2\n'
    with pytest.raises(UsageError, match="adapter changes weights that there are: give pretrained"):
        load_settings(write_settings(tmp_path, steps=1, every=1, run="run", table=table))
