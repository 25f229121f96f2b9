"""What is asked of a folder of weights and is not in it, or is more than the model takes, is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from stretto.errors import UsageError
from stretto.models.gpt import GPT, GPTConfig
from stretto.models.pretrained import CONFIG, WEIGHTS, load_gpt, save_gpt


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
