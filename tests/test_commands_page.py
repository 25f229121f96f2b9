"""docs/commands.md says what the command line says of itself."""

from __future__ import annotations

from stretto.cli.main import COMMANDS
from tests.commands_page import PAGE, page


def test_the_page_is_made_of_the_commands() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.commands_page"


def test_every_command_and_option_has_words() -> None:
    text = page()
    rows = [line for line in text.splitlines() if line.startswith(("| `", "| `["))]
    assert len(rows) > 60
    assert [row for row in rows if not row.split(" | ")[2].rstrip(" |")] == []
    assert [name for name in COMMANDS if f"## `stretto {name}" not in text] == []
