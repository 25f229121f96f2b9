"""docs/settings.md says what the settings say of themselves."""

from __future__ import annotations

from stretto.config import TrainSettings
from tests.settings_page import PAGE, page


def test_the_page_is_made_of_the_settings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.settings_page"


def test_every_setting_has_words() -> None:
    lines = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(lines) > 50
    assert all(line.split(" | ")[2].rstrip(" |") for line in lines)
    for part in TrainSettings.model_fields:
        assert part in page()
