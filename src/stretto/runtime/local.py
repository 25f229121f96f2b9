"""Run a plan's ranks as threads of this process: no launcher, no network, the same walk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import nn

from stretto.ir.plan import Plan
from stretto.runtime.runner import Runner
from stretto.runtime.transport import ThreadTransport

T = TypeVar("T")


def run_threads(
    plan: Plan,
    model_of: Callable[[int], nn.Module],
    work: Callable[[Runner], T],
    *,
    seed: int = 0,
    empty: bool = False,
    compile: Literal["inductor"] | None = None,
) -> list[T]:
    """Call `work(runner)` on one thread for each rank and return the results by rank.

    model_of: rank -> the model whose parameters that rank uses; one model for all ranks is right as long
    as no two ranks have the same parameter in full (tied across stages, or copied along dp or tp): each rank
    must then have its own copy. seed, empty, compile: as for `Runner`.

    Raises the first error of any rank; the other ranks are woken and end, as all do when the caller is
    interrupted.
    """
    ends = ThreadTransport.group(plan.world)
    processors = torch.get_num_threads()
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    ended = threading.Semaphore(0)

    def body(end: ThreadTransport) -> None:
        try:
            # PyTorch hands its setting to a new thread's math library with the first parallel op only; a
            # matrix product before that would use all cores, and round in another way than the same one
            # after it.
            torch.set_num_threads(processors)
            runner = Runner(plan, model_of(end.rank), transport=end, seed=seed, empty=empty, compile=compile)
            results[end.rank] = work(runner)
        except BaseException as error:
            errors.append(error)
            end.fail(f"rank {end.rank} failed: {error}")
        finally:
            ended.release()

    threads = [threading.Thread(target=body, args=(end,), name=f"rank {end.rank}") for end in ends]
    try:
        for thread in threads:
            thread.start()
        # Not by `join`, which takes a thread for ended when it is interrupted (Python 3.11).
        for _ in threads:
            ended.acquire()
    except BaseException:
        # Ctrl-C is heard here alone: ranks that wait for each other would go on without anyone to tell.
        ends[0].fail("the run was interrupted")
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(plan.world)]
