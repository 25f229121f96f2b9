"""Draws `architecture.svg`: the rooms of `src/stretto`, and which room imports which.

    python docs/draw_architecture.py [SVG]

What is drawn is read from the source files, with `ast`: nothing is imported. Imports inside functions count,
and so do those for type checkers only. `tests/test_house.py` uses the same functions to check the order.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "stretto"

# From top to bottom: a room may import those below it, and none above it.
# `stretto` is the public face, `__init__.py`.
ROOMS = (
    "cli",
    "bench",
    "stretto",
    "train",
    "report",
    "lab",
    "check",
    "saving",
    "planning",
    "runtime",
    "order",
    "simulate",
    "verify",
    "bounds",
    "price",
    "measure",
    "schedule",
    "capture",
    "passes",
    "parallelize",
    "tensor",
    "models",
    "backend",
    "batch",
    "ir",
    "config",
    "files",
    "errors",
)


def room_of(module: str) -> str:
    """`capture` of `capture.graph`; the package itself, an empty string, is the room `stretto`."""
    return module.split(".")[0] or "stretto"


def read_imports(source: Path = SOURCE) -> dict[str, set[str]]:
    """For each module of the package, the modules of the package that it imports.

    A module is named `capture.graph`; the package itself is an empty string.
    """
    files = {_module(path.relative_to(source)): path for path in source.rglob("*.py")}
    package = source.name
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                # What is imported from a folder may be a file of it.
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
        found[module] = {
            owner
            for name in names
            if name == package or name.startswith(f"{package}.")
            if (owner := _owner(name[len(package) + 1 :], files)) != module
        }
    return found


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _owner(name: str, files: dict[str, Path]) -> str:
    """The file that an imported name is in: the longest beginning of it that is a module."""
    while name not in files:
        name = name.rpartition(".")[0]
    return name
