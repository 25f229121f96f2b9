"""Values of a TOML file are changed, and all else stays as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.convert.written import toml_value
from stretto.errors import UsageError
from stretto.files.edit_toml import edited
from stretto.files.parse import parse_toml

TEXT = """# head
name = "a # b"

[parallel]   # how
pp = 4  # ranks
split = [
    "blocks.1",  # [not a header]
    "blocks.2",
]

# about the next table
[training]
global_batch = 16
"""


def test_values_change_and_comments_stay() -> None:
    made = edited(TEXT, {"parallel.pp": 8, "parallel.dp": 2, "training.global_batch": None}, toml_value)
    assert made == TEXT.replace("pp = 4  # ranks", "pp = 8  # ranks").replace(
        "]\n\n#", "]\ndp = 2\n\n#"
    ).replace("global_batch = 16\n", "")


def test_a_value_of_several_lines_is_replaced_or_goes() -> None:
    assert parse_toml(edited(TEXT, {"parallel.split": None}, toml_value))["parallel"] == {"pp": 4}
    made = parse_toml(edited(TEXT, {"parallel.split": "auto"}, toml_value))
    assert made["parallel"] == {"pp": 4, "split": "auto"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {"parallel": {"pp": 2}}),
        ("[model]\nlayers = 2", {"model": {"layers": 2}, "parallel": {"pp": 2}}),
        ("parallel.pp = 1\n", {"parallel": {"pp": 2}}),
        ('["parallel"]\n"pp" = 1\n', {"parallel": {"pp": 2}}),
        ('text = """\n[parallel]\npp = 1\n"""\n', {"text": "[parallel]\npp = 1\n", "parallel": {"pp": 2}}),
    ],
)
def test_forms(text: str, wanted: dict[str, Any]) -> None:
    assert parse_toml(edited(text, {"parallel.pp": 2}, toml_value)) == wanted


def test_a_table_on_one_line_is_refused() -> None:
    with pytest.raises(UsageError, match="write them as keys of a table"):
        edited("parallel = {pp = 1}\n", {"parallel.pp": 2}, toml_value)


def test_every_example_can_be_edited() -> None:
    for path in (Path(__file__).parents[2] / "examples").glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        wanted = parse_toml(text)
        wanted.setdefault("parallel", {})["pp"] = 64
        made = edited(text, {"parallel.pp": 64}, toml_value)
        assert parse_toml(made) == wanted
        assert [line for line in text.splitlines() if line.startswith("#")] == [
            line for line in made.splitlines() if line.startswith("#")
        ]
