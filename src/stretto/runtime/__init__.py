"""The runtime: walks a plan on `torch.distributed`, or on threads of one process."""

from stretto.runtime.local import run_threads
from stretto.runtime.runner import Runner

__all__ = ["Runner", "run_threads"]
