"""Values of a TOML file are changed, and all else stays as it was written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stretto.files.parse import parse_toml
from stretto.files.settings_file import edited

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
    made = edited(TEXT, {"parallel.pp": 8, "parallel.dp": 2, "parallel.tp": 3, "training.global_batch": None})
    assert made == TEXT.replace("pp = 4  # ranks", "pp = 8  # ranks").replace(
        "]\n\n#", "]\ndp = 2\ntp = 3\n\n#"
    ).replace("global_batch = 16\n", "")
    for value, wanted in ((None, {"pp": 4}), ("auto", {"pp": 4, "split": "auto"})):
        assert parse_toml(edited(TEXT, {"parallel.split": value}))["parallel"] == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {"parallel": {"pp": 2}}),
        ("[model]\nlayers = 2", {"model": {"layers": 2}, "parallel": {"pp": 2}}),
        ("parallel.pp = 1\n", {"parallel": {"pp": 2}}),
        ("parallel.dp = 1\n[a]\nb = 1\n", {"parallel": {"dp": 1, "pp": 2}, "a": {"b": 1}}),
        ("[parallel]\ndp = 1", {"parallel": {"dp": 1, "pp": 2}}),
        ("parallel = {dp = 1}\n", {"parallel": {"dp": 1, "pp": 2}}),
        ('[parallel]\n[parallel.tp_plan]\na = "b"\n', {"parallel": {"pp": 2, "tp_plan": {"a": "b"}}}),
        ('["parallel"]\n"pp" = 1\n', {"parallel": {"pp": 2}}),
        ('text = """\n[parallel]\npp = 1\n"""\n', {"text": "[parallel]\npp = 1\n", "parallel": {"pp": 2}}),
        (TEXT, {**parse_toml(TEXT), "parallel": {"pp": 2, "split": ["blocks.1", "blocks.2"]}}),
    ],
)
def test_forms(text: str, wanted: dict[str, Any]) -> None:
    assert parse_toml(edited(text, {"parallel.pp": 2})) == wanted


def test_every_example_can_be_edited() -> None:
    for path in (Path(__file__).parents[2] / "examples").glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        wanted = parse_toml(text)
        wanted.setdefault("parallel", {})["pp"] = 64
        made = edited(text, {"parallel.pp": 64})
        assert parse_toml(made) == wanted
        assert re.findall("^#.*", made, re.MULTILINE) == re.findall("^#.*", text, re.MULTILINE)
