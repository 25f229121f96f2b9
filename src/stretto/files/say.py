"""Lines for the user: what takes them."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
"""Takes one line for the user."""


def silent(line: str) -> None:
    """Drops the line: for callers that print nothing."""
