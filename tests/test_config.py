"""Settings: what a file says arrives, and every fault is reported with its key, its value and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from stretto.config import GPTSettings, HuggingFaceSettings, TrainSettings, load_settings
from stretto.errors import UsageError
from stretto.files.settings_file import parse_value

Load = Callable[..., TrainSettings]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def read(text: str, *overrides: str) -> TrainSettings:
        path = tmp_path / "tiny.toml"
        path.write_text(text, encoding="utf-8")
        return load_settings(path, overrides)

    return read


def test_the_example_can_be_read() -> None:
    settings = load_settings(Path(__file__).parents[1] / "examples" / "gpt_text.toml")
    assert isinstance(settings.model, GPTSettings)
    assert settings.parallel.pp == 2
    assert settings.name == "gpt_text"


def test_a_files_name_becomes_a_runs_name(tmp_path: Path) -> None:
    for file, name in (("_my run (2).toml", "my-run-2-"), ("é.toml", "run")):
        (tmp_path / file).write_text("")
        assert load_settings(tmp_path / file).name == name


def test_a_model_without_a_kind_is_of_the_documented_one(load: Load) -> None:
    assert load("[model]\nlayers = 3").model == GPTSettings(layers=3)
    assert load("[model]\nkind = 'gpt'\nlayers = 3", "model.kind=").model == GPTSettings(layers=3)


def test_values_arrive_with_their_types(load: Load) -> None:
    settings = load(
        """
        name = "mine"
        precision = "bf16"
        [model]
        kind = "huggingface"
        architecture = "LlamaForCausalLM"
        config = { hidden_size = 64, rope_theta = 1e4 }
        [optimizer]
        lr = 1
        betas = [0.8, 0.9]
        [parallel]
        split = ["model.layers.2"]
        [output]
        run_dir = "elsewhere"
        [checkpoint]
        dir = "kept"
        """
    )
    assert isinstance(settings.model, HuggingFaceSettings)
    assert settings.model.config == {"hidden_size": 64, "rope_theta": 1e4}
    assert settings.optimizer.betas == (0.8, 0.9)
    assert isinstance(settings.optimizer.lr, float)
    assert settings.parallel.split == ["model.layers.2"]
    assert (settings.run_dir, settings.checkpoint_dir) == (Path("elsewhere"), Path("kept"))


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainSettings().optimizer.lr = 1.0


def test_overrides_change_what_the_file_says(load: Load) -> None:
    settings = load(
        "[optimizer]\nlr = 1.0\n[parallel]\nmax_live = 3\n[data]\npaths = ['a']",
        "optimizer.lr=1e-3",
        "model.kind=gpt",
        "model.tie_embeddings=true",
        "data.paths=[b, 'c']",
        "optimizer.betas=[0.8,0.9]",
        "parallel.split=[blocks.1,blocks.2]",
        "parallel.max_live=",
        "parallel.schedule=zb-h1",
    )
    assert settings.optimizer.lr == 1e-3
    assert isinstance(settings.model, GPTSettings)
    assert settings.model.tie_embeddings is True
    assert settings.data.paths == ["b", "c"]
    assert settings.optimizer.betas == (0.8, 0.9)
    assert settings.parallel.split == ["blocks.1", "blocks.2"]
    assert settings.parallel.max_live is None
    assert settings.parallel.schedule == "zb-h1"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1, 2]", [1, 2]),
        ("[a,b.1]", ["a", "b.1"]),
        ('[a, "b,c", 3]', ["a", "b,c", 3]),
        ("[[a,b],[c]]", [["a", "b"], ["c"]]),
        ("[2024-01-01, b]", ["2024-01-01", "b"]),
        ("[]", []),
        ("[a", "[a"),
        ("[a]b[c]", "[a]b[c]"),
        ("a,b", "a,b"),
    ],
)
def test_lists_on_the_command_line_need_no_quotes(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_a_fault_within_a_list_names_the_override(load: Load) -> None:
    with pytest.raises(
        UsageError, match=r"^--set optimizer.betas=\[0.9,2\]: optimizer.betas\[1\] = 2: input"
    ):
        load("", "optimizer.betas=[0.9,2]")
    with pytest.raises(UsageError, match=r"data.paths = 'x': .* valid list; one alone is \[\"x\"\]"):
        load("", "data.paths=x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr = 3", "did you mean optimizer.lr?"),
        ("[model]\nkind='gpt'\nhiden = 3", "did you mean model.hidden?"),
        ("[data]\nseq = 3", "did you mean data.sequence_length?"),
        ("optimiser = 3", "did you mean optimizer?"),
        ("[lr_schedule]\nq = 3", "known are lr_schedule.kind, lr_schedule.warmup_steps"),
        ("[optimizer]\nlr = -1", "optimizer.lr = -1: input should be greater than 0"),
        ("[optimizer]\nlr = '1e-3'", "input should be a valid number"),
        ("[optimizer]\nlr = nan", "input should be a finite number"),
        ("[optimizer]\nbetas = [0.9, 2]", "optimizer.betas[1] = 2: input should be less than 1"),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas[1]: is missing"),
        ("[optimizer]\nbetas = 0.9", "input should be a valid list"),
        ("[training]\nsteps = true", "training.steps = True: input should be a valid integer"),
        ("[data]\npaths = 'x'", "input should be a valid list"),
        ("[data]\npaths = [3]", "data.paths[0] = 3: input should be a valid string"),
        ("precision = 'fp8'", "input should be 'float32' or 'bf16'"),
        (
            "[parallel]\nsplit = 7",
            "input should be a valid string, or input should be a valid list",
        ),
        ("[parallel]\nskip_passes = 'no_ops'", "input should be a valid list"),
        ("name = 'a/b'", "string should match pattern"),
        ("model = 3", "expected a table, [model]"),
        ("optimizer = 3", "expected a table, [optimizer]"),
        ("[model]\narchitecture = 'X'", "is no setting of kind 'gpt', but of 'huggingface'; drop it"),
        ("[model]\nkind = 'huggingface'\narchitecture = 'X'\nlayers = 3", "but of 'gpt' or 'moe'; drop it"),
        ("[model]\nkind = 'gtp'", "did you mean 'gpt'? expected 'gpt' or 'moe'"),
        ("[model]\nkind = 'huggingface'", "model.architecture: is missing"),
        ("[model]\nmlp_ratio = 0.001", "makes an MLP of width 0; give 0.00391 or more"),
        ("[model]\nkind='gpt'\nhidden = 250", "hidden = 250 must be a multiple of heads = 4"),
        ("[model]\nkind='gpt'\nhidden = 12", "hidden / heads = 3 must be even"),
        ("[parallel]\npp = 3\nsplit = ['a']", "a multiple of pp = 3: make them 3, or give pp = 2"),
        ("[parallel]\nsplit = ['a', 'b', 'a']", "split names a more than once"),
        ("[parallel]\npp = 2\nsplit = 'Ettt|tttL'", "write 'embedding,layer*4|layer*4,loss'"),
        ("[parallel]\npp = 2\nsplit = 'Et*8|'", "loss comes once, as the last"),
        (
            "[parallel]\npp = 2\nvirtual_stages = 5\nschedule = 'interleaved-1f1b'",
            "parallel.virtual_stages = 5 must not be above model.layers = 8",
        ),
        (
            "[parallel]\npp = 2\nvirtual_stages = 3\nsplit = ['a', 'b', 'c']",
            "give virtual_stages = 2, or drop it",
        ),
        ("[parallel]\npp = 9", "parallel.pp = 9 must not be above model.layers = 8"),
        ("[parallel]\nmicrobatches = 5", "training.global_batch = 16 must be a multiple of"),
        ("[data]\nsequence_length = 300", "must not be above model.context = 256"),
        (
            "[model]\nkind='huggingface'\narchitecture='X'\nconfig={max_position_embeddings=9}",
            "_position_embeddings = 9",
        ),
        ("name = ", "is not TOML: Invalid value (at"),
    ],
)
def test_a_fault_is_told_with_its_file_key_and_value(
    load: Load, tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load(text)
    lines = str(caught.value).split("\n")
    assert len(lines) == 1
    assert lines[0].startswith(f"{tmp_path / 'tiny.toml'}: ")
    assert expected in lines[0]


def test_every_fault_is_told_at_once_each_with_its_own_source(load: Load, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load("[optimizer]\nlr = -1\n[training]\nstep = 3", "data.vocab_size=none")
    file = tmp_path / "tiny.toml"
    assert str(caught.value).split("\n") == [
        "--set data.vocab_size=none: data.vocab_size = 'none': input should be a valid integer",
        f"{file}: optimizer.lr = -1: input should be greater than 0",
        f"{file}: training.step = 3: there is no such setting; did you mean training.steps?",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("foo", "expected KEY=VALUE with a dotted key"),
        ("a..b=3", "expected KEY=VALUE with a dotted key"),
        ("name.x=3", "name = 'tiny' is a value; it has no 'x'"),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': input should be a valid number"),
    ],
)
def test_a_wrong_override_is_named(load: Load, override: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        load("name = 'tiny'", override)
    assert str(caught.value).startswith(f"--set {override}: ")
    assert expected in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read settings file .*gone\.toml: No such file"):
        load_settings(tmp_path / "gone.toml")
    with pytest.raises(UsageError, match="Is a directory"):
        load_settings(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    with pytest.raises(UsageError, match=r"latin\.toml: not a text file \(.*position 8"):
        load_settings(tmp_path / "latin.toml")
