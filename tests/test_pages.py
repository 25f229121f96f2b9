"""What pages show is there: files as they are, commands and settings that are understood, names, links."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from benchmarks.commands import bench

import stretto
from stretto.cli.main import app
from stretto.config import load_settings
from tests.pasted import shell_lines

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BESIDE = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
SHOWN = re.compile(r"<!-- file: (\S+) -->\n```\w*\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^    (?:stretto|python -m benchmarks) .*", re.MULTILINE)
LINK = re.compile(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]+))?\)")
STANDS_FOR = ("...", "CONFIG", "KEY=VALUE", "COMMAND", "RUN")
"""Words in the place of a user's own, in lines that show a command's form."""


def commands() -> Iterator[tuple[Path, list[str]]]:
    """(page, words) of each line of a shell that calls `stretto` or the benchmarks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = BLOCK.findall(text)
        lines = [line for language, code in found if language in ("bash", "sh") for line in shell_lines(code)]
        other = [code for language, code in found if language == ""]
        indented = "\n".join(
            line for line in text.splitlines() if re.match(r"    (stretto|python -m benchmarks) ", line)
        )
        for line in (*lines, *"\n".join([*other, indented]).replace("\\\n", " ").splitlines()):
            line = line.replace("\n", " ").replace("python -m benchmarks ", "stretto benchmarks ")
            found = re.match(r"\s*(?:\$ )?(?:torchrun .*-m )?stretto ([a-z].*)", line)
            if found and not line.startswith("stretto: ") and "Usage" not in line:
                words = shlex.split(re.split(r" && | > ", found[1])[0], comments=True)
                known = ["benchmarks", *root().list_commands(None)]
                if words[0] in known and not set(words) & set(STANDS_FOR):
                    yield page, words


def root() -> Any:
    return typer.main.get_command(app)


def test_files_that_pages_show_are_the_files() -> None:
    shown = [(page, *found) for page in PAGES for found in SHOWN.findall(page.read_text(encoding="utf-8"))]
    assert len(shown) >= 5
    for page, name, text in shown:
        assert text == (ROOT / name).read_text(encoding="utf-8"), f"{page.name} shows another {name}"


def test_commands_in_pages_have_these_options_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stretto.config.complete", lambda values, begin: None
    )  # of weights that commands make
    found = list(commands())
    benchmarks: Any = typer.main.get_command(bench)
    assert len(found) > 60
    for page, (name, *words) in found:
        said = f"{page.name}: stretto {shlex.join([name, *words])}"
        command, group = benchmarks if name == "benchmarks" else root().get_command(None, name), name
        while hasattr(command, "commands"):
            group, words = f"{group} {words[0]}", words[1:]
            command = command.commands[group.split()[-1]]
        try:
            taken = command.make_context(group, list(words)).params
        except Exception as error:  # of typer's own click, whose classes are not public
            pytest.fail(f"{said}: {error}")
        config = ROOT / str(taken.get("config", ""))
        if not config.is_file():  # one that `stretto init` writes
            config = ROOT / "examples" / config.name
        if config.suffix == ".toml" and config.is_file():
            load_settings(config, [*(taken.get("changes") or ()), *(taken.get("named") or ())])


def test_names_of_the_public_face_in_code_of_pages_exist() -> None:
    for page in PAGES:
        for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language not in ("python", "py"):
                continue
            for name in set(re.findall(r"(?<![\w.])stretto\.([A-Za-z_]+)", code)):
                there = name in stretto.__all__ or find_spec(f"stretto.{name}") is not None
                assert there, f"{page.name}: stretto.{name}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *BESIDE]:
        for name, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name}: {name}"
            if anchor and target.suffix == ".md":
                heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in slugs, f"{page.name}: {name}#{anchor}"


def test_recipes_begin_in_files_that_there_are() -> None:
    named = re.findall(r"`(src/\S+?)`", BESIDE[0].read_text(encoding="utf-8"))
    assert len(named) >= 4
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_what_the_package_says_of_itself_agrees() -> None:
    """Version and licence, in the files that users and indexes read."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {stretto.__version__}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation
    assert f"\n## {stretto.__version__}" in BESIDE[1].read_text(encoding="utf-8")
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_index_has_every_page() -> None:
    readme = PAGES[0].read_text(encoding="utf-8")
    index = readme[readme.index("## Pages") :]
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in index] == []
