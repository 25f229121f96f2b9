"""What is asked of a folder of weights and is not in it, or is more than the model takes, is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stretto.errors import UsageError
from stretto.models.gpt import GPT, GPTConfig
from stretto.models.pretrained import CONFIG, WEIGHTS, load_gpt, save_gpt
from stretto.models.weight_files import INDEX, WeightFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_gpt(GPT(GPTConfig(vocab_size=11, layers=1, hidden=8, heads=2, context=4), seed=2), tmp_path)
    load_gpt(tmp_path)
    return tmp_path


def test_a_key_of_the_shape_that_there_is_not(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "hiden": 9}))
    with pytest.raises(UsageError, match=r"no GPT can be read from it: .*'hiden'"):
        load_gpt(folder)


def test_a_weight_that_is_missing(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    name = next(iter(weights))
    save_file({key: one for key, one in weights.items() if key != name}, folder / WEIGHTS)
    with pytest.raises(UsageError, match=rf"(?s)no GPT can be read from it: .*{name}"):
        load_gpt(folder)


def test_a_weight_that_the_model_has_not(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file({**weights, "more.weight": weights[next(iter(weights))].clone()}, folder / WEIGHTS)
    with pytest.raises(UsageError, match=r"(?s)no GPT can be read from it: .*more\.weight"):
        load_gpt(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": 10**9}, r"layers = 1000000000 in config\.json is more than 4,096"),
        ({"layers": 9}, r"model\.safetensors lacks blocks\.1\."),
        ({"hidden": 2**19, "heads": 1}, r"model\.safetensors lacks embedding\.weight, or has it in another"),
        ({"heads": 0}, "no GPT can be read from it"),
        ({"layers": "x"}, "no GPT can be read from it"),
        ({"model_type": []}, "no GPT can be read from it"),
    ],
    ids=str,
)
def test_a_model_of_another_size_is_refused_before_it_is_made(
    folder: Path, change: dict[str, object], told: str
) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **change}))
    with pytest.raises(UsageError, match=told):
        load_gpt(folder)


@pytest.mark.parametrize(
    "listed", [{"a": "../b.safetensors"}, {"a": "/etc/passwd"}, {"a": [1]}, {"a": ""}, [3]]
)
def test_an_index_names_files_beside_it(tmp_path: Path, listed: object) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "b.safetensors")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / INDEX).write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(UsageError, match=rf"{INDEX} cannot be read \("):
        WeightFiles(tmp_path / "in")
