"""What ranks keep in parts is saved by all and read under any layout, optimizers' state too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto.ir.kept import kept_spec, part_number, shard_spec
from stretto.runtime.runner import Runner
from tests.runtime.parts import NoSteps, adamw, halved, on_meta, plain, plan_of, run, update

WAYS = [
    *(("small", "zero of 8", reads) for reads in ("one", "dp", "pp", "zero", "in groups")),
    *(("small", wrote, "zero of 8") for wrote in ("one", "pp", "zero of 4", "zero of 8", "zero pp")),
    *(("gpt", "zero tp", reads) for reads in ("one", "tp", "zero pp", "zero cp")),
    *(("gpt", wrote, "zero tp") for wrote in ("one", "tp", "zero of 4", "in groups", "zero cp")),
    *(("experts", "zero ep", reads) for reads in ("one", "in groups, ep")),
    *(("experts", wrote, "zero ep") for wrote in ("dp", "in groups, ep")),
]


@pytest.fixture(autouse=True)
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.runtime.runner.RankState", NoSteps)


def write(kind: str, layout: str, place: Path) -> None:
    def work(runner: Runner) -> None:
        optimizer = adamw(runner.parameters())
        update(runner, optimizer, kind, range(2))
        stretto.save(place, runner, optimizer)

    run(kind, layout, work)


@pytest.mark.parametrize(("kind", "wrote", "reads"), WAYS)
def test_training_goes_on_under_another_layout(kind: str, wrote: str, reads: str, tmp_path: Path) -> None:
    write(kind, wrote, tmp_path / "saved")

    def work(runner: Runner) -> dict[str, Tensor]:
        optimizer = adamw(runner.parameters())
        stretto.load(tmp_path / "saved", runner, optimizer)
        for state in optimizer.state.values():
            assert state["step"].item() == 2
        update(runner, optimizer, kind, [2])
        return runner.state_dict(only_on=0)

    found, expected = run(kind, reads, work, halved(kind))[0], plain(kind, 3)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("kind", "reads"), [("small", "zero of 8"), ("gpt", "zero tp")])
def test_a_model_on_meta_gets_memory_for_its_rows_alone(kind: str, reads: str, tmp_path: Path) -> None:
    write(kind, "one", tmp_path / "saved")
    job = plan_of(kind, reads).job

    def work(runner: Runner) -> dict[str, Tensor]:
        for known, parameter in runner.tensors.known_parameters():
            number = part_number(job, known, runner.coordinates)
            assert tuple(parameter.shape) == kept_spec(job, known, number).shape
            assert parameter.untyped_storage().nbytes() == shard_spec(job, known).nbytes
        stretto.load(tmp_path / "saved", runner)
        return runner.state_dict(only_on=0)

    found, expected = run(kind, reads, work, on_meta(kind))[0], plain(kind, 2)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_rank_writes_what_it_keeps(tmp_path: Path) -> None:
    """Rows of 8 ranks, each once; the state of each with them."""
    write("small", "zero of 8", tmp_path / "saved")
    tensors = json.loads((tmp_path / "saved" / "tensors.json").read_text())["tensors"]

    def rows_in(name: str) -> list[tuple[Any, ...]]:
        return sorted((*offsets, *sizes) for offsets, sizes, *_ in tensors[name]["boxes"])

    assert rows_in("model.layers.0.weight") == [(row, 0, 1, 8) for row in range(8)]
    assert rows_in("optimizer.out.weight.exp_avg") == [(row, 0, 1, 8) for row in range(3)]
    assert rows_in("model.fixed") == [(row, 0, 2, 1) for row in range(0, 10, 2)]
    assert rows_in("model.scale") == rows_in("optimizer.scale.step") == [()]
    assert rows_in("model.none") == [(0, 0, 0, 3)]
    written = [file.stat().st_size for file in (tmp_path / "saved").glob("*.distcp")]
    assert len(written) == 8


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_weights_of_a_folder_are_read_by_rows(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from stretto.models.build import huggingface_sum
    from stretto.saving.pretrained import fill
    from tests.runtime.equality import lowered
    from tests.saving.pretrained import write_pretrained
    from tests.saving.test_fill import hollow_model

    folder = write_pretrained(tmp_path / name, name, torch.bfloat16)
    ours = hollow_model(folder, config={"experts_implementation": "batched_mm"})
    tokens = torch.randint(0, 301, (4, 17), generator=torch.Generator().manual_seed(5))
    how = {"dp": 4, "ep": 2, "ep_buffer": 2.0} if name == "mixtral" else {"dp": 3, "tp": 2, "pp": 2}
    rows = tokens[: how["dp"]]
    job = stretto.capture(ours, rows, huggingface_sum, stretto.Parallel(**how, zero=3))  # type: ignore[arg-type]
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    full = sum(value.numel() for value in expected.values())

    def work(runner: Runner) -> dict[str, Tensor]:
        fill(runner, ours, folder)
        assert sum(p.numel() for p in runner.parameters()) < 0.4 * full
        return runner.state_dict()

    for values in stretto.run_threads(lowered(job, "1f1b"), lambda _: ours, work, empty=True):
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[key], value) for key, value in expected.items())


def test_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    def work(runner: Runner) -> None:
        optimizer = adamw(runner.parameters())
        update(runner, optimizer, "small", [0])
        parameter = dict(runner.named_parameters())["layers.0.weight"]
        optimizer.state[parameter]["rows"] = torch.zeros(8)
        with pytest.raises(stretto.UsageError, match="a layout in which ranks have all of it"):
            stretto.save(tmp_path / "saved", runner, optimizer)

    run("small", "zero of 4", work)
