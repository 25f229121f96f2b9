"""What pages show can be pasted: the package is built, installed and left, and its pages' commands are run.

The fast test runs some of the README's commands from the source. The slow one builds the wheel, installs it
in a new environment with the packages of this one but for Stretto, and runs the README and
`tests.pasted.PAGES` in another folder. Both have examples with smaller models and fewer steps.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.forks import Fork, run_forks
from tests.pasted import PAGES, ROOT, blocks, made_smaller, shell_lines
from tests.train.tiny import TIMEOUT_S

README = ROOT / "README.md"
QUICK = {"init", "schedule", "check", "cluster", "convert", "reshard"}
TEXT = Path(os.__file__).parent / "asyncio"
"""Half a megabyte of text."""


def test_every_block_of_the_readme_and_of_these_pages_is_marked() -> None:
    """What is not pasted is marked as a fragment or as output, so that none is left out by mistake."""
    for page in [README, *(ROOT / "docs" / f"{name}.md" for name in PAGES)]:
        fences = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("```")]
        opened = {line.removeprefix("```") for line in fences[::2]}
        assert opened <= {"bash", "python", "toml", "py", "sh", "text", "csv"}, page.name
        found = list(blocks(page))
        assert found, page.name
        for block in found:
            if block.language == "python":
                compile(block.code, str(block), "exec")
            elif block.language == "toml":
                tomllib.loads(block.code)


def test_the_readmes_commands_run(tmp_path: Path) -> None:
    """Those that start no ranks, measure nothing and read nothing that others have made."""
    folder = tmp_path / "work"
    folder.mkdir()
    lines = [line for block in blocks(README) if block.language == "bash" for line in shell_lines(block.code)]
    ours = [words[1:] for words in map(shlex.split, lines) if words[0] == "stretto"]
    assert len(ours) > 18
    assert {words[0] for words in ours} > QUICK
    for words in ours:
        if words[0] not in QUICK:
            continue
        said = tmp_path / "said.txt"
        fork = Fork(
            "tests.pasted:in_folder", (str(folder), *words), {"XDG_CACHE_HOME": str(tmp_path)}, str(said)
        )
        [status] = run_forks([fork], TIMEOUT_S).statuses
        if words[0] == "init":
            made_small(folder / f"{words[1]}.toml")
        assert status == 0, f"stretto {shlex.join(words)}: {said.read_text(encoding='utf-8')}"
    assert (folder / "small.toml").exists()


def smaller_examples(folder: Path) -> None:
    for path in folder.rglob("*.toml"):
        made_small(path)


def made_small(path: Path) -> None:
    path.write_text(made_smaller(path.read_text(encoding="utf-8"), TEXT), encoding="utf-8")


# --- the package --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel: its folder."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("src", "examples"):
        shutil.copytree(
            ROOT / name,
            tree / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels = tmp_path_factory.mktemp("wheels")
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels), str(tree)],
        check=True,
    )
    [wheel] = wheels.glob("stretto-*.whl")
    home = tmp_path_factory.mktemp("new") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    [site] = (home / "lib").glob("python*/site-packages")
    # Its own packages come before a path that is added so, of which no .pth files are read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True
    )
    torchrun = home / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n', encoding="utf-8")
    torchrun.chmod(0o755)
    smaller_examples(site / "stretto" / "examples")
    return home


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_alone_runs_what_pages_show(installed: Path, tmp_path: Path) -> None:
    known = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = f"{installed / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    # The costs and plans of earlier runs are kept in the folder alone.
    known |= {"PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "work"
    folder.mkdir()

    def pasted(language: str, code: str, where: str) -> str:
        shell = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else ["python", "-c", code]
        done = subprocess.run(shell, cwd=folder, env=known, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{where}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    is_from = pasted("python", "import stretto; print(stretto.__file__, stretto.__version__)", "")
    assert is_from.startswith(str(installed)), is_from
    assert pasted("bash", "stretto --version", "").split()[1] == is_from.split()[1]
    for page in [README, *(ROOT / "docs" / f"{name}.md" for name in PAGES)]:
        for block in blocks(page):
            if block.save:
                with open(folder / block.save, "a", encoding="utf-8") as file:
                    file.write(block.code)
            elif block.language != "toml":
                pasted(block.language, block.code, str(block))
    for name in (
        "plan.json",
        "step.svg",
        "report.html",
        "here.json",
        "tuned.toml",
        "small.toml",
        "two_ranks.py",
    ):
        assert (folder / name).exists(), name
