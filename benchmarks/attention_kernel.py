"""What attention's kernel is worth: a Llama captured as it is, and with its mask written out.

    python -m benchmarks attention-kernel 2048    # tokens of the sequence

One sequence a step, forward and backward, one thread. Three systems take turns: eager PyTorch, Stretto, and
Stretto with masks left as `transformers` makes them while a model is exported. Prints processor time, medians
of the turns, and ratios to eager's, turn by turn.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from benchmarks.compute import VOCABULARY, Setup
from stretto.models.build import build_model, counted_loss_function

MODEL = "llama 512"


@contextmanager
def left_as_they_are(*_: Any) -> Iterator[None]:
    """In the place of `stretto.capturing.masks.masks_recognised`."""
    yield


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "attention-kernel", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tokens", type=int)
    parser.add_argument("--turns", type=int, default=3)
    wished = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = Setup(MODEL, 1, sequence=wished.tokens).settings
    model = build_model(settings, VOCABULARY, seed=0)
    counted = counted_loss_function(settings)
    batch = torch.randint(0, VOCABULARY, (1, wished.tokens + 1))

    def loss(module: nn.Module, tokens: Tensor) -> Tensor:
        total, count = counted(module, tokens)
        return total / count

    def runner() -> stretto.Runner:
        job = stretto.capture(model, batch, loss=loss, parallel=stretto.Parallel(microbatches=1))
        return stretto.Runner(stretto.plan(job, stretto.Cluster()), model)

    kept = runner()
    adapter: Any = importlib.import_module("stretto.capturing.torch_adapter")
    recognised = adapter.masks_recognised
    adapter.masks_recognised = left_as_they_are
    try:
        written = runner()
    finally:
        adapter.masks_recognised = recognised

    systems: dict[str, Callable[[], Any]] = {
        "eager": lambda: loss(model, batch).backward(),  # type: ignore[no-untyped-call]
        "stretto": partial(kept.step, batch),
        "stretto, mask written out": partial(written.step, batch),
    }
    took_s: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(wished.turns + 1):  # the first is a warm-up
        for name, step in systems.items():
            model.zero_grad(set_to_none=True)
            began_s = time.process_time()
            step()
            if turn:
                took_s[name].append(time.process_time() - began_s)
    for name, times_s in took_s.items():
        ratios = (one / other for one, other in zip(times_s, took_s["eager"], strict=True))
        print(f"{name:28s} {statistics.median(times_s):6.2f} s  {statistics.median(ratios):.3f}")
