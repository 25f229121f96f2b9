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


@pytest.mark.parametrize("more", [False, True])
def test_weights_that_are_not_those_of_the_model(folder: Path, more: bool) -> None:
    weights = load_file(folder / WEIGHTS)
    name = "more.weight" if more else next(iter(weights))
    one = weights.pop(name, torch.ones(2))
    save_file({**weights, **({name: one} if more else {})}, folder / WEIGHTS)
    with pytest.raises(UsageError, match=rf"the weights (have|lack) {name}"):
        load_gpt(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": 10**9}, r"layers = 1000000000: input should be less than or equal to 4096"),
        ({"layers": 9}, r"the weights lack blocks\.1\."),
        ({"hidden": 2**19, "heads": 1}, r"embedding\.weight is \[11, 8\]"),
        ({"hiden": 9}, "hiden = 9: there is no such setting; did you mean hidden\\?"),
        ({"heads": 0}, "heads = 0: input should be greater than or equal to 1"),
        ({"layers": "x"}, "layers = 'x': input should be a valid integer"),
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
