"""Wait until a device has done all that it was given: what a clock on the host must do before it is read."""

from __future__ import annotations

import torch


def synchronise(device: torch.device) -> None:
    """Nothing on a CPU, whose ops have ended when their calls have."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
