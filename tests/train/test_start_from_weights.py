"""`model.pretrained`: a run starts from the weights of a folder, in the tokens of its tokenizer, and goes on
from its own checkpoints.

What ranks read is tested on threads (`tests/saving/test_fill.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.saving.pretrained import write_pretrained
from tests.train.tiny import steps_of, train, write_settings, write_text

from stretto.config import HuggingFaceSettings, MoESettings, load_settings
from stretto.config.pretrained import BUILT_IN
from stretto.errors import UsageError
from stretto.files.say import silent
from stretto.models.gpt import next_token_loss
from stretto.models.moe import MoEConfig, MoEGPT
from stretto.models.pretrained import KINDS, load_gpt, save_gpt
from stretto.models.weight_files import weights_folder
from stretto.train.data import prepare_data
from stretto.train.export import GENERATION, export
from stretto.train.job import refuse_early
from stretto.train.text import given_tokenizer, learn

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
"""Relative, of losses in float32 whose sums are grouped otherwise."""


def write(folder: Path, pretrained: Path | str, *, run: str = "run", model: str = "") -> Path:
    table = f'pretrained = "{pretrained}"\n{model}'
    path = write_settings(folder, steps=2, every=1, run=run, table=table)
    path.write_text(path.read_text().replace("vocab_size = 300\n", ""), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pretrained(tmp_path_factory.mktemp("weights") / "llama", "llama")


def first_batch(path: Path) -> torch.Tensor:
    settings = load_settings(path)
    data = prepare_data(settings.data, silent, given_tokenizer(settings.model))
    return data.train.batch(0, settings.training.global_batch)


def loss_of_transformers(folder: Path, tokens: torch.Tensor) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return float(model(input_ids=tokens, labels=tokens).loss.detach())


def test_a_run_starts_from_weights_goes_on_without_them_and_is_exported(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "llama")
    generation = '{"eos_token_id": [0, 7], "temperature": 0.6}'
    (source / GENERATION).write_text(generation)
    path = write(tmp_path, source)
    train(path)
    steps = steps_of(tmp_path / "run")
    assert steps[1]["loss"] == pytest.approx(loss_of_transformers(source, first_batch(path)), rel=TOLERANCE)

    output = tmp_path / "out"
    export(tmp_path / "run", output)
    trained, start = (transformers.AutoModelForCausalLM.from_pretrained(one) for one in (output, source))
    moved = float((trained.lm_head.weight - start.lm_head.weight).detach().norm())
    assert 0 < moved < 0.1 * float(start.lm_head.weight.detach().norm())
    before, after = (transformers.AutoTokenizer.from_pretrained(one) for one in (source, output))
    assert after.chat_template == before.chat_template
    assert (output / GENERATION).read_text() == generation

    other = shutil.copytree(source, tmp_path / "other")
    with pytest.raises(UsageError, match="other', but the checkpoint"):
        train(path, f"model.pretrained={other}")

    # A checkpoint wins over weights, which need not be there any more; nor need they be to export.
    for file in source.glob("*.safetensors*"):
        file.unlink()
    train(path, f"checkpoint.resume={tmp_path}/run/checkpoints/step-000001")
    assert steps_of(tmp_path / "run")[2]["loss"] == steps[2]["loss"]
    refuse_early(load_settings(path))
    with pytest.raises(UsageError, match="has no weights"):
        refuse_early(load_settings(path, ["checkpoint.resume=never"]))
    shutil.rmtree(source)
    export(tmp_path / "run", tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("seven wizards")["input_ids"] == before("seven wizards")["input_ids"]
    assert (again.eos_token, again.bos_token) == (before.eos_token, before.bos_token)
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(map(torch.equal, same.state_dict().values(), trained.state_dict().values()))


def test_text_becomes_what_the_models_own_tokenizer_makes_of_it(llama: Path, tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, llama))
    data = prepare_data(settings.data, silent, given_tokenizer(settings.model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    documents = [path.read_text() for path in sorted((tmp_path / "text").iterdir())]
    begins = [tokenizer(text)["input_ids"][:50] for text in documents]
    tokens = np.load(data.folder / "train.npy").tolist()
    starts = [at for at, token in enumerate(tokens) if token == tokenizer.bos_token_id]
    assert [tokens[at : at + 50] for at in starts] == begins
    assert starts[0] == 0
    assert all(tokens[at - 1] == tokenizer.eos_token_id for at in starts[1:])
    assert tokens[-1] == tokenizer.eos_token_id


@pytest.mark.slow
def test_an_own_mixture_that_was_exported_is_trained_on(tmp_path: Path) -> None:
    source = tmp_path / "moe"
    source.mkdir()
    write_text(tmp_path / "text")
    tokenizer = learn([path.read_text() for path in (tmp_path / "text").iterdir()], 300)
    config = MoEConfig(
        vocab_size=300,
        layers=2,
        hidden=16,
        heads=2,
        context=16,
        experts=2,
        capacity_factor=0,
        tie_embeddings=True,
    )
    save_gpt(MoEGPT(config, seed=3), source)
    path = write(tmp_path, source, model="aux_weight = 0.0\nz_weight = 0.0")
    with pytest.raises(UsageError, match=r"has no tokenizer\.json: export the run on text again"):
        train(path)
    (source / "tokenizer.json").write_text(tokenizer.to_str())
    settings = load_settings(path).model
    assert isinstance(settings, MoESettings)
    assert (settings.layers, settings.capacity_factor, settings.aux_weight) == (2, 0.0, 0.0)
    train(path)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return next_token_loss(lambda tokens: model(tokens).logits, batch)

    expected = float(loss(load_gpt(source), first_batch(path)).detach())
    assert steps_of(tmp_path / "run")[1]["loss"] == pytest.approx(expected, rel=TOLERANCE)
    export(tmp_path / "run", tmp_path / "out")
    one, two = (load_gpt(folder) for folder in (tmp_path / "out", source))
    assert one.config == two.config.model_copy(update={"aux_weight": 0.0, "z_weight": 0.0})
    assert not torch.equal(one.head.weight, two.head.weight)


def test_settings_get_the_shape_from_the_folder(llama: Path, tmp_path: Path) -> None:
    assert BUILT_IN.keys() == KINDS.keys()
    model = load_settings(write(tmp_path, llama, model="config = { attention_dropout = 0.1 }")).model
    assert isinstance(model, HuggingFaceSettings)
    assert model.architecture == "LlamaForCausalLM"
    shape = {"num_hidden_layers": 2, "attention_dropout": 0.1, "eos_token_id": 0}
    assert model.config.items() >= shape.items()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.kind=gpt", "kind = 'hugg"),
        ("model.architecture=GPT2LMHeadModel", "'LlamaForCausalLM': drop it"),
        ("model.layers=2", "no setting of kind 'huggingface'"),
        ("data.vocab_size=500", "tokenizer that is learned"),
        ("data.sequence_length=65", "max_position_embeddings = 64"),
        ("model.pretrained=./llamas", "'./llamas' does not exist"),
        ("model.pretrained=a/b/c", "'a/b/c' does not exist"),
        ("model.pretrained=exampels", "did you mean examples"),
        ("model.pretrained=no one/none", "'no one/none': .* the Hub"),
        ("model.pretrained=3", "valid string"),
        ("model.pretrained={text}", "no config.json"),
        ("model.config.hiden_size=9", "hiden_size: LlamaConfig"),
        ("model.config.hidden_size=64", r"\[310, 32\], .* \[310, 64\]"),
    ],
)
def test_what_does_not_fit_the_folder_is_refused_before_text_is_read(
    llama: Path, tmp_path: Path, change: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = write(tmp_path, llama)
    with pytest.raises(UsageError, match=words):
        refuse_early(load_settings(path, [change.format(text=tmp_path / "text")]))


def test_a_name_of_the_hub_is_taken_from_its_cache(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    path = write(tmp_path, "someone/small")
    place = tmp_path / "hub" / "models--someone--small"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("1" * 40)
    snapshot = shutil.copytree(llama, place / "snapshots" / ("1" * 40))
    settings = load_settings(path)
    assert settings.model == load_settings(write(tmp_path, llama)).model.model_copy(
        update={"pretrained": "someone/small"}
    )
    refuse_early(settings)
    assert given_tokenizer(settings.model) is not None
    for file in snapshot.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(UsageError, match="has no weights"):
        refuse_early(settings)
    shutil.rmtree(place)
    with pytest.raises(UsageError, match=r"'someone/small' is no folder here, and the Hub reports: .*cache"):
        weights_folder("someone/small")


def test_other_models_and_tokenizers_are_refused(llama: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(llama)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path / "fp8")
    transformers.ViTConfig().save_pretrained(tmp_path / "vit")
    for name, words in (("fp8", "quantised"), ("vit", "is a 'vit'")):
        with pytest.raises(UsageError, match=words):
            load_settings(write(tmp_path, tmp_path / name))
    source = shutil.copytree(llama, tmp_path / "llama")
    model = load_settings(write(tmp_path, source)).model
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([f"<more {n}>" for n in range(10)])
    tokenizer.save_pretrained(source)
    with pytest.raises(UsageError, match=r"311 tokens, .* 310"):
        given_tokenizer(model)
    kind: Any = transformers.PreTrainedTokenizerFast
    kind(tokenizer_object=learn(["some text"], 300)).save_pretrained(source)
    (source / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(UsageError, match="no eos_token"):
        given_tokenizer(model)
    for file in source.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UsageError, match="no fast tokenizer"):
        given_tokenizer(model)
