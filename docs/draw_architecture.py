"""Draws `architecture.svg`: the rooms of `src/stretto`, and which room imports which.

    python docs/draw_architecture.py [SVG]

What is drawn is read from the source files, with `ast`: nothing is imported. Imports inside functions count,
and so do those for type checkers only. `tests/test_house.py` uses the same functions to check the order.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "stretto"

# From top to bottom: a room may import those below it, and none above it.
# `stretto` is the public face, `__init__.py`.
ROOMS = (
    "cli",
    "stretto",
    "tune",
    "train",
    "report",
    "lab",
    "checking",
    "saving",
    "planning",
    "runtime",
    "order",
    "simulating",
    "verifying",
    "bounds",
    "measure",
    "price",
    "schedule",
    "capturing",
    "passes",
    "parallelize",
    "tensor",
    "models",
    "processor",
    "backend",
    "batch",
    "convert",
    "config",
    "ir",
    "files",
    "errors",
)


def room_of(module: str) -> str:
    """`capturing` of `capturing.graph`. The package itself, an empty string, is the room `stretto`;
    `__main__` is the command line's."""
    first = module.split(".")[0]
    return {"": "stretto", "__main__": "cli"}.get(first, first)


def read_imports(source: Path = SOURCE) -> dict[str, set[str]]:
    """For each module of the package, the modules of the package that it imports.

    A module is named `capturing.graph`; the package itself is an empty string.
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


# --- the picture ---------------------------------------------------------------------------------------

WIDTH_PX, LEVEL_PX, BOX_PX, BOX_HEIGHT_PX = 980, 62, 118, 36

STYLE = """
text { font: 12px ui-sans-serif, system-ui, sans-serif; text-anchor: middle; fill: #1b2330; }
.ground { fill: #ffffff; stroke: #d8dde4; }
.room { fill: #e8eef6; stroke: #6d87a8; }
.name { font-weight: 650; }
.lines { font-size: 10px; fill: #5d6878; }
.import { fill: none; stroke: #8fa3bb; }
.upward { fill: none; stroke: #d00000; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #eef2f7; }
  .ground { fill: #14181f; stroke: #2c3440; }
  .room { fill: #1e2836; stroke: #6d87a8; }
  .lines { fill: #9aa6b5; }
  .import { stroke: #52657d; }
}
"""


def room_imports(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """For each room, the other rooms that its files import."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, others in imports.items():
        found[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    return found


def draw(source: Path = SOURCE) -> str:
    """The picture as the text of an SVG.

    A room's level is one above the highest that it imports. Of its imports those are drawn that no other path
    of imports implies; those that go upward are red.
    """
    imports = room_imports(read_imports(source))
    place = {room: at for at, room in enumerate(ROOMS)}
    down = {room: {other for other in imports[room] if place[other] > place[room]} for room in ROOMS}
    level: dict[str, int] = {}
    below: dict[str, set[str]] = {}
    for room in reversed(ROOMS):
        level[room] = 1 + max((level[other] for other in down[room]), default=-1)
        below[room] = down[room].union(*(below[other] for other in down[room]))
    drawn = {
        room: {one for one in down[room] if not any(one in below[other] for other in down[room])}
        for room in ROOMS
    }
    middle = _places(level, drawn)
    top = max(level.values())
    height = (top + 1) * LEVEL_PX + 20

    def ends(room: str) -> tuple[float, float, float]:
        y = 20 + (top - level[room]) * LEVEL_PX
        return middle[room], y, y + BOX_HEIGHT_PX

    out = []
    for room in ROOMS:
        for other in sorted(imports[room], key=place.__getitem__):
            if other in drawn[room] or other not in down[room]:
                (x, _, y), (to_x, to_y, _) = ends(room), ends(other)
                style = "import" if other in drawn[room] else "upward"
                bend = (to_y - y) / 2
                out.append(
                    f'<path class="{style}" d="M{x:.0f} {y} C{x:.0f} {y + bend:.0f} {to_x:.0f} '
                    f'{to_y - bend:.0f} {to_x:.0f} {to_y}"><title>{room} imports {other}</title></path>'
                )
    for room in ROOMS:
        x, y, _ = ends(room)
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in _files(source, room))
        out += [
            f'<rect class="room" x="{x - BOX_PX / 2:.0f}" y="{y}" width="{BOX_PX}" '
            f'height="{BOX_HEIGHT_PX}" rx="5"/>',
            f'<text class="name" x="{x:.0f}" y="{y + 16}">{room}</text>',
            f'<text class="lines" x="{x:.0f}" y="{y + 29}">{lines:,} lines</text>',
        ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" '
            f'width="{WIDTH_PX}" height="{height}" role="img" aria-label="The rooms and what they import">',
            f"<style>{STYLE}</style>",
            f'<rect class="ground" x="0.5" y="0.5" rx="10" width="{WIDTH_PX - 1}" height="{height - 1}"/>',
            *out,
            "</svg>",
            "",
        ]
    )


def _places(level: dict[str, int], drawn: dict[str, set[str]]) -> dict[str, float]:
    """Where the middle of each room is: evenly in its level, in the order of those above that import it."""
    middle: dict[str, float] = {}
    for at in range(max(level.values()), -1, -1):
        rooms = [room for room in ROOMS if level[room] == at]

        def wanted(room: str) -> float:
            above = [middle[one] for one in middle if room in drawn[one]]
            return sum(above) / len(above) if above else WIDTH_PX / 2

        for number, room in enumerate(sorted(rooms, key=wanted)):
            middle[room] = WIDTH_PX * (number + 0.5) / len(rooms)
    return middle


def _files(source: Path, room: str) -> list[Path]:
    if room == "stretto":
        return [source / "__init__.py"]
    folder = source / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [source / f"{room}.py"]


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("architecture.svg")
    out.write_text(draw(), encoding="utf-8")
    print(f"wrote {out}")
