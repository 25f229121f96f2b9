"""Cells of tables of tests: some cover the claim and are fast, the others say more of it and are slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A cell for the longer run."""
    return pytest.param(*values, marks=pytest.mark.slow)


def lean(names: Iterable[str], fast: Collection[str]) -> list[Any]:
    """All of these names, slow but for those that are `fast`."""
    every = list(names)
    assert set(fast) <= set(every), "a fast cell that is in no table"
    return [name if name in fast else slow(name) for name in every]


def but(names: Iterable[str], others: Collection[str]) -> list[Any]:
    """All of these names, of which `others` are slow."""
    every = list(names)
    return lean(every, [name for name in every if name not in set(others)])
