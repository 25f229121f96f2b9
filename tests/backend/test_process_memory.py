"""Freed memory stays with the process, and garbage is collected rarely while capture or planning goes on."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stretto.backend import process_memory
from stretto.backend.process_memory import RARELY, rarely_collected
from stretto.errors import PlanError
from stretto.planning.make_plan import make_plan
from tests.synthetic import make_costs, make_job

BLOCKS = """
import resource, sys, torch
if "keep" in sys.argv:
    from stretto.backend.process_memory import keep_freed_memory
    print("kept", keep_freed_memory(), keep_freed_memory())
def block():  # of more than glibc keeps by itself
    torch.ones(40 << 20, dtype=torch.uint8)
for _ in range(40):  # glibc cannot use a hole of just the size: several grow together first
    block()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    block()
print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

glibc = pytest.mark.skipif(
    not (hasattr(os, "confstr") and "CS_GNU_LIBC_VERSION" in os.confstr_names), reason="glibc's malloc"
)


def blocks(*words: str, **environment: str) -> dict[str, str]:
    """What a fresh process prints, by first word."""
    clean = {name: value for name, value in os.environ.items() if name not in process_memory._USERS}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS, *words], env={**clean, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@glibc
@pytest.mark.slow
def test_a_block_is_not_asked_for_again() -> None:
    assert int(blocks("plain")["faults"]) > 4 * 10_000, "else nothing needs to be kept"
    found = blocks("keep")
    assert found["kept"] == "True True"
    assert int(found["faults"]) < 100


@pytest.mark.slow
@glibc
def test_what_the_user_says_of_malloc_counts() -> None:
    found = blocks("keep", MALLOC_MMAP_THRESHOLD_="131072")
    assert found["kept"] == "False False"
    assert int(found["faults"]) > 4 * 10_000


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    was = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield 700, 10, 10
    gc.set_threshold(*was)


def test_planning_leaves_the_collector_as_it_was(thresholds: tuple[int, int, int]) -> None:
    job = make_job(2, 4)
    seen: list[tuple[int, int, int]] = []
    make_plan(job, make_costs(job), schedule="auto", say=lambda line: seen.append(gc.get_threshold()))
    assert set(seen) == {RARELY}
    assert gc.get_threshold() == thresholds
    with pytest.raises(PlanError):
        make_plan(job, make_costs(job), max_bytes=1)
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("wish", [(0, 10, 10), (200_000, 100, 5_000)])
def test_who_has_it_collect_less_keeps_that(
    thresholds: tuple[int, int, int], wish: tuple[int, int, int]
) -> None:
    gc.set_threshold(*wish)
    with rarely_collected():
        assert gc.get_threshold() == wish
