"""Wrong names are told before work begins, each with the right one that is nearest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import pytest

import stretto
from stretto.capturing import torch_adapter
from stretto.config import load_settings
from stretto.errors import UsageError
from stretto.planning import make_plan
from stretto.price.cluster import describe
from stretto.train import launch
from stretto.tune.choices import read_fixed
from tests.capturing.zoo import Chain, mean_square, rows


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        ("model.kind=gtp", "'gpt'"),
        ("model.position=learned", "model.positions"),
        ("parallel.schedule=zb_h1", "'zb-h1'"),
        ("parallel.overlap=windw", "'window'"),
        ("parallel.recompute=selectve", "'selective'"),
        ("training.device=CUDA", "'cuda'"),
        ("optimizer.beta=[0.9,0.9]", "optimizer.betas"),
        ("parallel.split=embeding|loss", "embedding"),
    ],
)
def test_in_settings(tmp_path: Path, change: str, meant: str) -> None:
    path = tmp_path / "run.toml"
    path.touch()
    with pytest.raises(UsageError, match=re.escape(f"did you mean {meant}?")):
        load_settings(path, [change])


def _begun(*_: object, **__: object) -> NoReturn:
    pytest.fail("work had begun")


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"schedule": "eager1f1b"}, "unknown schedule family 'eager1f1b'; did you mean 'eager-1f1b'?"),
        (
            {"split": ["layer.2"], "pp": 2},
            "the module 'layer.2', which the model does not have; did you mean 'layers.2'?",
        ),
        ({"skip_passes": ("dead_op",)}, "did you mean 'dead_ops'?"),
        ({"tp": 2, "tp_plan": {"layer.*.upp": "rowwise"}}, "tp_plan['layer.*.upp']: the model has no module"),
        ({"tp": 2, "tp_plan": {"layers.*": "colwse"}}, "did you mean 'colwise'"),
    ],
)
def test_before_a_model_is_traced(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(torch_adapter, "export_joint", _begun)
    with pytest.raises(UsageError, match=re.escape(message)):
        stretto.capture(Chain(), rows(), mean_square, stretto.Parallel(microbatches=2, **parallel))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"order": "lst"}, "unknown ordering policy 'lst'; did you mean 'list'?"),
        ({"overlap": "windw"}, "overlap is 'windw'; did you mean 'window'?"),
        ({"cluster": "h10x8"}, "no device is called 'h10'; did you mean 'h100'?"),
        ({"cluster": "lokal"}, "did you mean 'local'?"),
        ({"schedule": "zb-h11"}, "did you mean 'zb-h1'?"),
    ],
)
def test_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    job = stretto.capture(Chain(), rows(), mean_square, stretto.Parallel(microbatches=2))
    monkeypatch.setattr(make_plan, "measure_forms", _begun)
    with pytest.raises(UsageError, match=re.escape(message)):
        stretto.plan(job, **given)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    right = tmp_path / "cluster.toml"
    right.touch()
    with pytest.raises(UsageError, match=re.escape(f"did you mean {right}?")):
        describe(str(tmp_path / "clusters.toml"))
    with pytest.raises(UsageError, match=r"No such file or directory; did you mean .*cluster\.toml\?"):
        load_settings(tmp_path / "clustr.toml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.paths=['{folder}/txt']", "did you mean {folder}/text?"),
        ("parallel.schedule={folder}/min.csv", "did you mean {folder}/mine.csv?"),
        ("task.file={folder}/tsk.py", "did you mean {folder}/task.py?"),
        ("checkpoint.resume={folder}/txet", "did you mean {folder}/text?"),
        ("model.architecture=LamaForCausalLM", "did you mean 'LlamaForCausalLM'?"),
    ],
)
def test_before_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, message: str
) -> None:
    if "architecture" in change:
        pytest.importorskip("transformers")
    for name in ("text", "mine.csv", "task.py"):
        (tmp_path / name).touch()
    path = tmp_path / "run.toml"
    path.write_text('[model]\nkind = "huggingface"\narchitecture = "LlamaForCausalLM"\n' * ("arch" in change))
    settings = load_settings(path, [change.format(folder=tmp_path), f"output.run_dir={tmp_path}/run"])
    monkeypatch.setattr("stretto.train.data._build", _begun)
    monkeypatch.setattr(torch_adapter, "export_joint", _begun)
    with pytest.raises(UsageError, match=re.escape(message.format(folder=tmp_path))):
        launch.start(settings, [])


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ("tpp=2", "did you mean 'tp'?"),
        ("schedule=zbh1", "did you mean 'zb-h1'?"),
        ("pp", "expected KEY=VALUE"),
    ],
)
def test_in_what_a_tuning_is_not_to_choose(fixed: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        read_fixed([fixed])
