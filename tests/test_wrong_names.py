"""Wrong names are told before work begins, each with the right one that is nearest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import pytest

import stretto
from stretto.capturing import torch_adapter
from stretto.cli.plan import make as plan_of
from stretto.config import TrainSettings, load_settings
from stretto.errors import UsageError, meant, nearest
from stretto.files.near import near_path
from stretto.ir.stage_maps import families
from stretto.planning import make_plan
from stretto.price.cluster import describe
from stretto.schedule.families import FAMILIES
from stretto.train import launch
from stretto.tune.choices import read_fixed
from tests.capturing.zoo import Chain, mean_square, rows


def test_the_nearest_name_is_found_whatever_its_case() -> None:
    assert nearest("GPT", ["gpt", "moe"]) == "gpt"
    assert nearest("zb_h1", ["zb-h1", "gpipe"]) == "zb-h1"
    assert nearest("zzz", ["zb-h1"]) is None
    assert nearest(3, ["3"]) is None
    assert meant("zb_h1", ["zb-h1"]) == "did you mean 'zb-h1'? "
    assert meant("zb_h1", ["zb-h1"], "; {}") == "; did you mean 'zb-h1'?"
    assert meant("zzz", ["zb-h1"], "; {}") == ""


def test_the_nearest_path_is_found_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "gpt_text.toml").touch()
    right = tmp_path / "examples" / "gpt_text.toml"
    assert near_path(tmp_path / "exampels" / "gpt_txt.toml") == f"; did you mean {right}?"
    assert near_path(tmp_path / "examples" / "gpt_text.tml") == f"; did you mean {right}?"
    assert near_path(tmp_path / "examples" / "zzzzzz.toml") == "", "an ending alone is no likeness"
    assert near_path("a\0b") == ""
    monkeypatch.chdir(tmp_path)
    assert near_path("exampels/gpt_text.toml", "{} ") == "did you mean examples/gpt_text.toml? "


def test_the_names_of_schedules_are_those_of_the_families() -> None:
    assert families() == tuple(FAMILIES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "model.kind=gtp",
            "model.kind = 'gtp': did you mean 'gpt'? expected 'gpt' or 'moe' or",
        ),
        ("model.position=learned", "did you mean model.positions?"),
        (
            "parallel.schedule=zb_h1",
            "schedule family 'zb_h1'; did you mean 'zb-h1'? choose one of: gpipe",
        ),
        ("parallel.overlap=windw", "parallel.overlap = 'windw': "),
        ("parallel.overlap=windw", "; did you mean 'window'?"),
        ("parallel.recompute=selectve", "; did you mean 'selective'?"),
        ("lr_schedule.kind=cosin", "; did you mean 'cosine'?"),
        ("training.device=CUDA", "; did you mean 'cuda'?"),
        ("precision=bf61", "; did you mean 'bf16'?"),
        ("compile=inductr", "; did you mean 'inductor'?"),
        ("optimizer.beta=[0.9,0.9]", "did you mean optimizer.betas?"),
        ("parallel.split=embeding|loss", "did you mean embedding?"),
    ],
)
def test_in_settings(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.touch()
    with pytest.raises(UsageError, match=re.escape(message)):
        load_settings(path, [change])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overlap": "windw"}, "overlap = 'windw'.*; did you mean 'window'"),
        ({"ep_overflow": "dropp"}, "; did you mean 'drop'"),
        ({"recompute": "ful"}, "; did you mean 'full'"),
    ],
)
def test_in_code(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stretto.Parallel(**given)


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
    ],
)
def test_before_a_model_is_traced(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(torch_adapter, "export_joint", _begun)
    with pytest.raises(UsageError, match=re.escape(message)):
        stretto.capture(Chain(), rows(), mean_square, stretto.Parallel(microbatches=2, **parallel))


def test_patterns_of_a_plan_for_tensor_parallelism() -> None:
    plan = {"layers.*.up": "colwise", "layer.*.upp": "rowwise"}
    with pytest.raises(UsageError, match=r"tp_plan\['.*'\]: the model has no module of that name"):
        stretto.capture(Chain(), rows(), mean_square, stretto.Parallel(tp=2, tp_plan=plan))
    with pytest.raises(UsageError, match="unknown style 'colwse'; did you mean 'colwise'"):
        stretto.capture(Chain(), rows(), mean_square, stretto.Parallel(tp=2, tp_plan={"layers.*": "colwse"}))


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
    monkeypatch.setattr(make_plan, "pricing", _begun)
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
        ("parallel.schedule={folder}/min.csv", "cannot read schedule {folder}/min.csv"),
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


def test_before_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_adapter, "export_joint", _begun)
    with pytest.raises(UsageError, match="did you mean 'captured'"):
        plan_of(TrainSettings.model_validate({"planning": {"order": "captred"}}), stretto.Cluster())


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
