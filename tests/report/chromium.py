"""A headless Chromium for tests of pages; anyone who asks is skipped, with the reason, where there is
none."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",
)
TIMEOUT_S = 120


def open_page(page: Path, *flags: str, fragment: str = "") -> str:
    """Open a file in a browser of its own, and return what it prints (the document, with --dump-dom)."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip(f"no browser is installed (looked for {', '.join(NAMES)})")
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", *flags, f"{page.as_uri()}{fragment}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return result.stdout
