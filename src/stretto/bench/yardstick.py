"""How fast the machine is: what a small step takes that is the same whatever is being timed beside it.

A machine that others use has another speed every minute. Two benches that ran at different minutes compare in
terms of this: a GPT of one block, forward and backward without a plan, has the kinds of ops that steps have
(products of several shapes, attention, norms, element-wise ops), and reads as many weights. A single product
that stays in caches was seen to be 5 % off beside such ops.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from stretto.models.gpt import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig(vocab_size=1024, layers=1, hidden=512, heads=8, context=128)
ROWS = 1
"""The step: some 50 ms on a core, and 15 MB of weights."""


class Yardstick:
    """Times the step, a while at a time; its mean is of all times together."""

    def __init__(self) -> None:
        # Draws nothing from the generator that models are made with.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._model = GPT(CONFIG)
            ids = torch.randint(0, CONFIG.vocab_size, (ROWS, CONFIG.context))
        self._batch = {"input_ids": ids, "labels": ids}
        self._took_ns = self._steps = 0
        self._step()  # the first makes gradients

    def run(self, for_us: float) -> None:
        """Step for about so long, at least once."""
        begin_ns = time.perf_counter_ns()
        while True:
            self._step()
            self._steps += 1
            took_ns = time.perf_counter_ns() - begin_ns
            if took_ns >= for_us * 1e3:
                break
        self._took_ns += took_ns

    def agreed_us(self) -> float:
        """What a step took on average, over all that were run (at least one) and all ranks; equal on all."""
        mine = self._took_ns / 1e3 / self._steps
        told: list[float] = [mine] * (dist.get_world_size() if dist.is_initialized() else 1)
        if dist.is_initialized():
            dist.all_gather_object(told, mine)
        return statistics.fmean(told)

    def _step(self) -> None:
        next_token_loss(self._model, self._batch).backward()  # type: ignore[no-untyped-call]
