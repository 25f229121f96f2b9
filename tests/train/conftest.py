"""Runs inside the test process are planned for a machine of which no step could be faster than predicted: so
no file of a run depends on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.train.tiny import described

from stretto.train import trainer


@pytest.fixture(scope="module", autouse=True)
def _described() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "make_plan", described)
        yield
