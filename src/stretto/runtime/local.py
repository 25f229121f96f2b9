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
    compile: Literal["inductor"] | None = None,
) -> list[T]:
    """Call `work(runner)` on one thread for each rank and return the results by rank.

    model_of: rank -> the model whose parameters that rank uses; one model for all ranks is right as long
    as no two ranks hold the same parameter whole (tied across stages, or copied along dp or tp): each rank
    must then have its own copy. seed, compile: as for `Runner`.

    Raises the first error of any rank; the other ranks are woken and end.
    """
    ends = ThreadTransport.group(plan.world)
    processors = torch.get_num_threads()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def body(end: ThreadTransport) -> None:
        # PyTorch hands its setting to a new thread's math library with the first parallel op only; a matrix
        # product before that would use all cores, and round in another way than the same one after it.
        torch.set_num_threads(processors)
        try:
            runner = Runner(plan, model_of(end.rank), transport=end, seed=seed, compile=compile)
            results[end.rank] = work(runner)
        except BaseException as error:
            errors.append(error)
            end.fail(f"rank {end.rank} failed: {error}")

    threads = [threading.Thread(target=body, args=(end,), name=f"rank {end.rank}") for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(plan.world)]
