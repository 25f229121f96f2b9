"""`stretto settings` and `stretto init`: all settings are printed, examples are written and can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import stretto
from stretto.cli.main import COMMANDS, app
from stretto.config import TrainSettings, load_settings
from stretto.config.fields import sections
from stretto.errors import UsageError
from tests.runtime.launch import REPOSITORY

EXAMPLES = sorted(path.stem for path in (REPOSITORY / "examples").glob("*.toml"))


def said(*words: str) -> str:
    ran = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_every_setting_is_printed_with_its_default_and_words_on_80_columns() -> None:
    text = said("settings")
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert {one.name for one in sections()} == {"", "data.sources", *TrainSettings.model_fields} - {
        "name",
        "precision",
        "compile",
        "cuda_graph",
    }
    for section in sections():
        for row in section.rows:
            assert row.text
            start = f"  {row.key} (none)\n" if row.default is None else f"  {row.key} = {row.default}"
            assert (start if row.default != "" else f"  {row.key} (must be given)") in text
            assert row.text in words
    assert "stretto.Cluster(...)" in text
    assert "peak_tflops (must be given)" in text


def test_a_table_and_a_key_are_printed_alone() -> None:
    assert said("settings", "parallel").startswith("[parallel]")
    assert "[model]" not in said("settings", "parallel")
    one = said("settings", "parallel.zero")
    assert "zero = 0" in one
    assert "pp = 1" not in one
    assert 'precision = "float32", or "bf16"' in said("settings", "precision")
    assert said("settings", "model").count("[model], kind = ") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("settings", "paralel"), "there is no setting 'paralel'; did you mean 'parallel'?"),
        (("settings", "paralel.zeroo"), "did you mean 'parallel.zero'?"),
        (("settings", "q"), "tables are model, data"),
        (("init", "gpt_txt"), "there is no example 'gpt_txt'; did you mean 'gpt_text'?"),
        (("init", "gpt_text", "--all"), "gpt_text or --all: give one of them"),
        (("trian",), "there is no command `stretto trian`; did you mean 'train'?"),
        (("cluster", "shwo"), "there is no command `stretto cluster shwo`; did you mean 'show'?"),
        (("lab", "q"), "there is no command `stretto lab q`; known are run, check"),
    ],
)
def test_wrong_names_are_met_with_the_nearest(words: tuple[str, ...], message: str) -> None:
    ran = CliRunner().invoke(app, list(words), prog_name="stretto")
    assert isinstance(ran.exception, UsageError)
    assert message in str(ran.exception)


def test_a_name_without_a_near_one_lists_all_commands() -> None:
    ran = CliRunner().invoke(app, ["qqqq"])
    assert str(ran.exception).endswith(", ".join(COMMANDS))


def test_examples_are_listed_a_sentence_each() -> None:
    listed = said("init")
    assert [line.split()[0] for line in listed.splitlines() if line[:1].isalpha()] == EXAMPLES
    assert max(map(len, listed.splitlines())) <= 90


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_written_once_with_what_it_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stretto.config.complete", lambda values, begin: None)  # of weights that runs make
    assert f"train with: stretto train {name}.toml" in said("init", name)
    settings = load_settings(f"{name}.toml")
    assert settings == load_settings(REPOSITORY / "examples" / f"{name}.toml").model_copy(
        update={"task": settings.task}
    )
    if settings.task is not None:
        assert Path(settings.task.file).parent == Path()
        assert (
            Path(settings.task.file).read_bytes()
            == (REPOSITORY / "examples" / settings.task.file).read_bytes()
        )
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=f"{name}.toml.*there already; nothing was written"):
        CliRunner().invoke(app, ["init", f"examples/{name}.toml"], catch_exceptions=False)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_all_examples_are_written_as_they_are_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said("init", "--all")
    own = {
        path.relative_to(REPOSITORY): path.read_bytes()
        for path in (REPOSITORY / "examples").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    written = {
        path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert written == own
    with pytest.raises(UsageError, match="nothing was written"):
        CliRunner().invoke(app, ["init", "--all"], catch_exceptions=False)


def test_the_version_is_the_packages() -> None:
    assert said("--version") == f"stretto {stretto.__version__}\n"
