"""Code blocks of pages, run as a reader would paste them.

A block marked `bash` is run by a shell, one marked `python` by the interpreter, each by itself, in the order
of the page; `toml` is read as TOML. Below `<!-- save: NAME -->` a block is appended to that file instead.
Fragments that need a reader's own names are marked `py`, commands that need other machines or files `sh`,
output `text`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stretto.cli.main import main

ROOT = Path(__file__).parents[1]

BLOCK = re.compile(
    r"^(?:<!-- save: (\S+) -->\n)?```(bash|python|toml|text)\n(.*?)^```", re.DOTALL | re.MULTILINE
)

PAGES = (
    *(
        "schedules",
        "simulate",
        "report",
        "costs",
        "clusters",
        "rehearse",
        "reshard",
        "check",
        "convert",
        "tune",
    ),
    "passes",
)
"""Pages of `docs` whose blocks are pasted. They go on from the README: its files are in the folder."""

NOT_PASTED = (
    # a line that begins so, why it is left out
    ("pip install ", "the package is installed already, from its wheel"),
)

SMALLER = (
    # a line of the examples' settings, a smaller model or fewer steps
    (r"^layers = 96", "layers = 16"),
    (r"^layers = [4-8]$", "layers = 2"),
    (r"^hidden = \d+", "hidden = 64"),
    (r"^heads = 96", "heads = 8"),
    (r"^vocab_size = \d+", "vocab_size = 512"),
    (r"^(context|sequence_length) = \d+", r"\1 = 32"),
    (r"^steps = \d+", "steps = 4"),
    (r"^eval_every = \d+", "eval_every = 2"),
    (r"^microbatches = 192", "microbatches = 32"),
    (r"^global_batch = 1536", "global_batch = 256"),
    (r"^\[data\]$", '[data]\npaths = ["{text}"]'),
)


@dataclass(frozen=True, slots=True)
class Block:
    """language: bash, python, toml. save: the file that it is appended to."""

    page: str
    line: int
    language: str
    code: str
    save: str

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}:\n{self.code}"


def blocks(page: Path) -> Iterator[Block]:
    """Those of a page that are pasted, in their order."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        save, language, code = found.groups()
        lines = [
            line for line in code.splitlines() if not line.startswith(tuple(one for one, _ in NOT_PASTED))
        ]
        if language == "text" and not save:  # output
            continue
        yield Block(
            page.name, text.count("\n", 0, found.start()) + 1, language, "\n".join(lines) + "\n", save or ""
        )


def made_smaller(settings: str, text: Path) -> str:
    """An example's settings with a small model, few steps and this file of text."""
    for pattern, less in SMALLER:
        settings = re.sub(pattern, less.replace("{text}", str(text)), settings, flags=re.MULTILINE)
    return settings


def shell_lines(code: str) -> Iterator[str]:
    """A shell's commands, one after the other, of which a string may go over several lines."""
    line = ""
    for part in code.splitlines():
        line = f"{line}\n{part}" if line else part
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # within quotes
            continue
        if not part.endswith("\\"):
            if words:
                yield line.replace("\\\n", " ")
            line = ""


def in_folder(folder: str, *words: str) -> None:
    """`stretto ...` there, in a process of its own."""
    os.chdir(folder)
    sys.argv = ["stretto", *words]
    main()
