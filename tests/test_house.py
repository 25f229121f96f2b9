"""The house keeps its order: nothing imports upward, no two files import each other, no file is too long."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
MOST_LINES = 400

_spec = importlib.util.spec_from_file_location("draw_architecture", ROOT / "docs" / "draw_architecture.py")
assert _spec is not None
assert _spec.loader is not None
house = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(house)
house.read_imports = functools.cache(house.read_imports)


def test_every_file_is_in_a_room_that_the_order_knows() -> None:
    rooms = {house.room_of(module) for module in house.read_imports()}
    assert rooms == set(house.ROOMS), (
        "name the new room in docs/draw_architecture.py, or remove the one that is gone"
    )


def test_nothing_imports_upward() -> None:
    height = {room: -place for place, room in enumerate(house.ROOMS)}
    upward = {
        (module, other)
        for module, others in house.read_imports().items()
        for other in others
        if height[house.room_of(other)] > height[house.room_of(module)]
    }
    assert upward == set()


def test_the_package_does_not_need_the_benchmarks() -> None:
    wanted = re.compile(r"^\s*(from|import) benchmarks\b|import_module\(f?\"benchmarks", re.MULTILINE)
    assert [path for path in house.SOURCE.rglob("*.py") if wanted.search(path.read_text())] == []


def test_no_two_files_import_each_other() -> None:
    imports = house.read_imports()
    pairs = {
        (module, other)
        for module, others in imports.items()
        for other in others
        if module < other and module in imports[other]
    }
    assert pairs == set()


def test_no_file_is_longer_than_a_room() -> None:
    long = {
        path.relative_to(house.SOURCE).as_posix()
        for path in house.SOURCE.rglob("*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES
    }
    assert long == set()


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path) -> None:
    house_of_cards = tmp_path / "cards"
    (house_of_cards / "low").mkdir(parents=True)
    (house_of_cards / "__init__.py").write_text("from cards.low import ace\n")
    (house_of_cards / "low" / "__init__.py").write_text("")
    (house_of_cards / "low" / "ace.py").write_text("import cards.low.king as king\nimport json\n")
    (house_of_cards / "low" / "king.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from cards.low.ace import Suit\n"
        "def play():\n    import cards\n"
    )
    assert house.read_imports(house_of_cards) == {
        "": {"low.ace"},
        "low": set(),
        "low.ace": {"low.king"},
        "low.king": {"low.ace", ""},
    }


def test_the_picture_is_drawn_and_the_page_names_every_room() -> None:
    picture = ElementTree.fromstring(house.draw())
    drawn = {node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")}
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for room in house.ROOMS:
        assert room in drawn
        assert f"| `{room}` |" in page, f"docs/architecture.md says what is in {room}"


NAMED = re.compile(r"`(?:stretto\.)?([a-z_]+(?:\.[A-Za-z_]+)+)`")
FILE = re.compile(r"`(?:src/)?(?:stretto/)?([a-z_]+/[a-z_/]+\.py)`")
NO_NAMES = {"config.devices", "config.json", "planning.order", "planning.reuse"}
"""Keys of files that users write, and files; settings of a section that is called as a room is."""


def test_names_in_comments_and_docs_exist() -> None:
    """Modules by their dotted names, and files, in backticks, of rooms that there are."""
    modules = set(house.read_imports())
    wrong: list[str] = []
    for path in [*house.SOURCE.rglob("*.py"), *(ROOT / "docs").glob("*.md"), *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        for name in NAMED.findall(text):
            room, second, *_ = name.split(".")
            is_room = any(module.startswith(f"{room}.") for module in modules)
            if is_room and name not in NO_NAMES and f"{room}.{second}" not in modules:
                face = house.SOURCE / room / "__init__.py"
                if not re.search(rf"\b{second}\b", face.read_text(encoding="utf-8")):
                    wrong.append(f"{path.relative_to(ROOT)}: {name}")
        for name in FILE.findall(text):
            roots = (ROOT, ROOT / "src", house.SOURCE, ROOT / "tests", ROOT / "docs")
            if not any((root / name).exists() for root in roots):
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert not wrong, wrong
