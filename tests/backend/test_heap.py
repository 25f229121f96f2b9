"""Freed memory stays with the process: blocks that the kernel would clear again for every step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import stretto
import stretto.measure.profile
import stretto.runtime.runner
from stretto.backend import heap

BLOCKS = """
import resource, sys, torch
if "keep" in sys.argv:
    from stretto.backend.heap import keep_freed_memory
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
    clean = {name: value for name, value in os.environ.items() if name not in heap._USERS}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS, *words], env={**clean, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@glibc
def test_a_block_is_not_asked_for_again() -> None:
    assert int(blocks("plain")["faults"]) > 4 * 10_000, "else nothing needs to be kept"
    found = blocks("keep")
    assert found["kept"] == "True True"
    assert int(found["faults"]) < 100


@glibc
def test_what_the_user_says_of_malloc_counts() -> None:
    found = blocks("keep", MALLOC_MMAP_THRESHOLD_="131072")
    assert found["kept"] == "False False"
    assert int(found["faults"]) > 4 * 10_000


@pytest.mark.parametrize("what", ["a runner", "a profile"])
def test_who_computes_on_a_processor_keeps_its_memory(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    room = stretto.runtime.runner if what == "a runner" else stretto.measure.profile
    monkeypatch.setattr(room, "keep_freed_memory", lambda: asked.append(what))
    model = torch.nn.Linear(4, 4)
    job = stretto.capture(
        model,
        {"x": torch.ones(2, 4)},
        loss=lambda model, batch: model(batch["x"]).sum(),
        parallel=stretto.Parallel(microbatches=1),
    )
    plan = stretto.plan(job)
    if what == "a runner":
        stretto.Runner(plan, model)
    assert asked
