"""docs/settings.md and docs/commands.md say what settings and commands say of themselves."""

from __future__ import annotations

from types import ModuleType

import pytest

from stretto.cli.main import COMMANDS
from stretto.config import TrainSettings
from tests import commands_page, settings_page


@pytest.mark.parametrize("made", [settings_page, commands_page])
def test_a_page_is_made_of_what_it_documents_all_with_words(made: ModuleType) -> None:
    text = made.PAGE.read_text(encoding="utf-8")
    assert text == made.page(), f"write it again: python -m {made.__name__}"
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert [row for row in rows if not row.split(" | ")[2].rstrip(" |")] == []
    if made is commands_page:
        assert [name for name in COMMANDS if f"## `stretto {name}" not in text] == []
    else:
        assert [part for part in TrainSettings.model_fields if part not in text] == []
