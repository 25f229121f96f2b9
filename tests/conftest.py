"""Settings of all tests: which examples property tests draw, and what runs alone.

In continuous integration property tests draw the same examples every time. Elsewhere they draw new ones, so
that every run on a desk looks further. No example has a deadline: tests share the machine with others.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("desk", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "desk")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the lab are quiet: they measure links, and look for what others have left of theirs."""
    for item in items:
        if item.get_closest_marker("lab"):
            item.add_marker("quiet")
