"""Settings of all tests: which examples property tests draw, and what runs alone.

In continuous integration property tests draw the same examples every time. Elsewhere they draw new ones, so
that every run on a desk looks further. No example has a deadline: tests share the machine with others.

Plans of tests are searched for less long than those of users; what is found is proved and run all the same.
Equal models are traced once. Nothing is found again that runs on this machine have kept, unless a test says
so.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from stretto.backend.process_memory import RARELY
from stretto.passes.step import SEARCH_S
from tests.forks import end_server
from tests.remembered import Remembered, remembering, remembering_exports

LONG = (
    "train/test_kill.py",
    "parallelize/test_mixtures.py",
    "cli/test_tune.py",
    "parallelize/test_layouts.py",
    "parallelize/test_tensor_equality.py",
    "test_equality.py",
    "runtime/test_compile.py",
    "train/test_trainer.py",
    "checking/test_check.py",
    "train/test_evaluation.py",
    "test_public_face.py",
    "parallelize/test_experts.py",
)
"""Files that take longest, 15 to 60 s each. They come first: a worker that begins one last would leave the
others with nothing to do."""

os.environ["STRETTO_REUSE"] = "off"  # also of processes that tests start

settings.register_profile("desk", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "desk")


SEARCHES = (
    *(f"tests.order.test_{name}" for name in ("whole_step", "policies")),
    "tests.planning.test_braid",
    "tests.planning.test_effort",
)


@pytest.fixture(autouse=True, scope="module")
def short_search(request: pytest.FixtureRequest) -> Iterator[None]:
    """Searches for orders take a tenth of the time of the shortest run; not where they are tested."""
    if request.module.__name__ in SEARCHES:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SEARCH_S, "0.025")
        yield


@pytest.fixture(autouse=True, scope="module")
def ranks_are_on_processors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that tests start see no accelerator: several ranks have no room on one. Those of `tests/gpu`
    do."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.startswith("tests.gpu."):
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


_remembered = Remembered()


@pytest.fixture(autouse=True, scope="module")
def equal_models_are_traced_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """A trace that was made serves again; not where capture itself is tested."""
    if request.module.__name__.startswith("tests.capturing."):
        yield
        return
    # By its module, as the package has a function of this name.
    room: Any = import_module("stretto.capturing.trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "_trace", remembering(room._trace, _remembered))
        patch.setattr(room, "_exported", remembering_exports(room._exported, _remembered))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the lab are quiet: they measure links, and look for what others have left of theirs.

    Files in `LONG` come first, then those with most tests.
    """
    for item in items:
        if item.get_closest_marker("lab"):
            item.add_marker("quiet")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no accelerator here"))
    tests = Counter(item.path for item in items)
    first = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: (first.get(item.path, len(LONG)), -tests[item.path]))


def pytest_collection_finish() -> None:
    """What imports have made stays: the collector of garbage need not look through it again and again, nor so
    often through traces and plans. It took a tenth of the processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


def pytest_sessionfinish() -> None:
    end_server()
