"""`stretto.async_save`: what is saved is what was there when it was called, whatever steps follow."""

from __future__ import annotations

import errno
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

import stretto
from stretto.runtime.runner import Runner
from stretto.runtime.transport import ThreadTransport
from stretto.saving import folder
from stretto.saving.beside import Copies, Saving, only_writer
from stretto.saving.digests import METADATA
from stretto.saving.tensors import Parts, stored_in
from tests.saving.test_face import adamw, run, train


def boxes_of(place: Path) -> set[tuple[object, ...]]:
    """All that is stored, by digests."""
    stored = stored_in(place)
    return {(name, box.offsets, box.digest) for name, one in stored.items() for box in one.boxes}


@pytest.mark.parametrize("layout", ["one", "pp dp"])
def test_steps_that_are_taken_meanwhile_change_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    original, stepped = FileSystemWriter.write_data, threading.Event()

    def late(*arguments: Any) -> Any:
        assert stepped.wait(60.0)
        return original(*arguments)

    def work(runner: Runner) -> None:
        optimizer = adamw(runner.named_parameters())
        for number, steps in enumerate((1, 2)):
            train(runner, optimizer, steps)
            stretto.save(tmp_path / f"between-{number}", runner, optimizer, "more")
        again = adamw(runner.named_parameters())
        stretto.load(tmp_path / "between-0", runner, again)
        monkeypatch.setattr(FileSystemWriter, "write_data", late)
        first = stretto.async_save(tmp_path / "beside-0", runner, again, "more")
        train(runner, again, 2)
        assert not first.done
        assert not (tmp_path / "beside-0").exists()
        stepped.set()
        second = stretto.async_save(tmp_path / "beside-1", runner, again, "more")
        assert first.done, "one at a time"
        train(runner, again, 1)
        second.wait()

    run(layout, work)
    for number in range(2):
        assert boxes_of(tmp_path / f"between-{number}") == boxes_of(tmp_path / f"beside-{number}")
    assert boxes_of(tmp_path / "beside-0") != boxes_of(tmp_path / "beside-1")


def test_a_save_and_a_load_wait_for_the_one_beside_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FileSystemWriter.write_data

    def late(*arguments: Any) -> Any:
        if threading.current_thread().name == "saving":
            time.sleep(0.5)
        return original(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", late)

    def work(runner: Runner) -> None:
        first = stretto.async_save(tmp_path / "a", runner, extra="first")
        stretto.save(tmp_path / "a", runner, extra="second")
        assert first.done
        first.wait()
        assert stretto.load(tmp_path / "a", runner) == "second"
        stretto.async_save(tmp_path / "b", runner, extra="third")
        assert stretto.load(tmp_path / "b", runner) == "third"

    run("pp", work)


def test_ends_for_several_threads_do_not_mix() -> None:
    ends = ThreadTransport.group(2, timeout_s=10.0)
    pairs = [[end.beside() for _ in range(2)] for end in ends]
    with ThreadPoolExecutor(4) as pool:
        # As two saves of which one is the first on rank 0, the other on rank 1.
        asked = [
            (save, pool.submit(pairs[rank][save].all_gather, (save, rank)))
            for rank, save in [(0, 0), (1, 1), (1, 0), (0, 1)]
        ]
        for save, gathered in asked:
            assert gathered.result() == [(save, 0), (save, 1)]
        waiting = pool.submit(pairs[0][1].all_gather, None)
        ends[1].fail("it is over")
        with pytest.raises(stretto.RunError, match="it is over"):
            waiting.result()


def test_another_save_at_the_same_place_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FileSystemWriter.finish

    def work(runner: Runner) -> None:
        def disturbed(*arguments: Any) -> None:
            original(*arguments)
            metadata = folder.partial_of(tmp_path / "a") / METADATA
            data = metadata.read_bytes()
            folder.begin(tmp_path / "a")  # as another program does
            metadata.write_bytes(data)

        stretto.save(tmp_path / "a", runner, extra="before")
        with monkeypatch.context() as patched:
            patched.setattr(FileSystemWriter, "finish", disturbed)
            with pytest.raises(
                stretto.StrettoError, match=r"another save wrote.*What was at .* is as it was"
            ):
                stretto.save(tmp_path / "a", runner)
        assert stretto.load(tmp_path / "a", runner) == "before"

    run("one", work)


def test_a_disk_that_is_full_is_told_on_all_ranks_and_the_next_save_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FileSystemWriter.write_data

    def full(writer: FileSystemWriter, plan: Any, planner: Any) -> Any:
        if plan.storage_data.prefix == "__1_":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(writer, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    together = threading.Barrier(2)

    def work(runner: Runner) -> None:
        for _ in range(2):  # told by `wait`, and where no one waits by the next save
            failing = stretto.async_save(tmp_path / "a", runner)
            with pytest.raises(stretto.StrettoError, match="the disk is full"):
                failing.wait()
        left = stretto.async_save(tmp_path / "a", runner)
        while not left.done:
            pass
        together.wait()
        monkeypatch.setattr(FileSystemWriter, "write_data", original)
        with pytest.raises(stretto.StrettoError, match="the disk is full"):
            stretto.async_save(tmp_path / "a", runner)
        assert not list(tmp_path.iterdir())
        together.wait()
        stretto.async_save(tmp_path / "a", runner).wait()

    run("pp", work)
    assert run("one", lambda runner: stretto.load(tmp_path / "a", runner)) == [None]


def test_only_an_optimizer_of_all_that_trains_is_waited_by_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, hooks = Copies.of, list[Any]()

    def noted(self: Copies, parts: Parts, hooked: torch.optim.Optimizer | None) -> Parts:
        hooks.append(hooked)
        return original(self, parts, hooked)

    monkeypatch.setattr(Copies, "of", noted)

    def work(runner: Runner) -> None:
        first, *others = runner.parameters()
        every, some = (torch.optim.SGD(some, lr=0.1) for some in ([first, *others], others))
        for optimizer in (every, some, None):
            stretto.async_save(tmp_path / "a", runner, optimizer).wait()
        assert hooks == [every, None, None]
        first.requires_grad_(False)
        assert only_writer(runner, some) is some

    run("one", work)


def test_a_device_that_fails_is_not_taken_for_a_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def work(runner: Runner) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", fail)
            with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
                stretto.async_save(tmp_path / "a", runner)

    run("one", work)


def test_without_memory_for_copies_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    def work(runner: Runner) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", none)
            with pytest.raises(stretto.StrettoError, match=r"can't allocate .*asynchronous = false"):
                stretto.async_save(tmp_path / "a", runner)
        assert not list(tmp_path.iterdir())

    run("one", work)


def test_saves_at_once_leave_pythons_switches_as_they_were() -> None:
    """Ranks that are threads save together, and one ends before another that began later."""
    before_s = sys.getswitchinterval()
    ends = [threading.Event(), threading.Event()]
    both = threading.Barrier(3)

    def written(end: threading.Event) -> None:
        both.wait(60)
        end.wait(60)

    saves = [Saving(partial(written, end)) for end in ends]
    both.wait(60)
    for end, save in zip(ends, saves, strict=True):
        end.set()
        save.wait()
    assert sys.getswitchinterval() == before_s
