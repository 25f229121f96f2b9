"""Run a plan's ranks as threads of this process: no launcher, no network, the same walk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock
from typing import Literal, TypeVar

import torch
from torch import nn

from stretto.ir.plan import Plan
from stretto.runtime.runner import Runner
from stretto.runtime.transport import ThreadTransport
from stretto.runtime.updates import MakeOptimizer

T = TypeVar("T")


def run_threads(
    plan: Plan,
    model_of: Callable[[int], nn.Module],
    work: Callable[[Runner], T],
    *,
    seed: int = 0,
    empty: bool = False,
    compile: Literal["inductor"] | None = None,
    optimizer: MakeOptimizer | None = None,
) -> list[T]:
    """Call `work(runner)` on one thread for each rank and return the results by rank.

    model_of: rank -> the model whose parameters that rank uses; one model for all ranks is right as long
    as no two ranks have the same parameter in full (tied across stages, or copied along dp or tp): each rank
    must then have its own copy. It is called for one rank at a time; threads share PyTorch's generator, so
    seed that in it. seed, empty, compile, optimizer: as for `Runner`.

    Raises the first error of any rank; the other ranks are woken and end, as all do when the caller is
    interrupted.
    """
    ends = ThreadTransport.group(plan.world)
    processors = torch.get_num_threads()
    errors: list[BaseException] = []
    making = Lock()

    def body(end: ThreadTransport) -> T:
        try:
            # PyTorch hands its setting to a new thread's math library with the first parallel op only; a
            # matrix product before that would use all cores, and round in another way than the same one
            # after it.
            torch.set_num_threads(processors)
            with making:
                model = model_of(end.rank)
            runner = Runner(
                plan, model, transport=end, seed=seed, empty=empty, compile=compile, optimizer=optimizer
            )
            return work(runner)
        except BaseException as error:
            errors.append(error)
            end.fail(f"rank {end.rank} failed: {error}")
            raise

    with ThreadPoolExecutor(plan.world, "rank ") as pool:
        results = [pool.submit(body, end) for end in ends]
        try:
            wait(results)
        except BaseException:
            # Only this thread gets Ctrl-C: ranks that wait for each other would go on.
            ends[0].fail("the run was interrupted")
            raise
    if errors:
        raise errors[0]
    return [result.result() for result in results]
