"""What ranks compute while they are compared with each other, and while communication is measured beside.

A calibration is for jobs that nobody has yet. How far ranks come apart, and what compute loses beside a
transfer, depend on the machine, and less (assumed) on what they compute.
So they do what one tensor-parallel rank does for a microbatch of a small GPT: products, attention, norms,
element-wise ops of the sizes of a step. Touches no device.
"""

from __future__ import annotations

import torch

from stretto.capture import capture
from stretto.config import ParallelSettings
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss

SEQUENCE = 256
CONFIG = GPTConfig(vocab_size=1024, layers=4, hidden=512, heads=8, context=SEQUENCE)
"""A tenth of a second on one core: many waits at which ranks are compared."""


def yardstick() -> Job:
    """The job: one stage, tp=2, one microbatch of one row."""
    with torch.device("meta"):
        model = GPT(CONFIG)
        ids = torch.zeros((1, SEQUENCE), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    return capture(model, batch, next_token_loss, ParallelSettings(pp=1, tp=2, microbatches=1))
