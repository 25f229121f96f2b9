"""Where torchrun's launcher starts a process, a fork in its place. The file knows these of PyTorch (2.11 to
2.13), and no other does:

    torch.distributed.elastic.multiprocessing.api.get_subprocess_handler   what makes the handler of a rank
    SubprocessHandler._popen                                               what starts its process
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.elastic.multiprocessing.api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from stretto.train.preload import Preloaded


@contextmanager
def forking(preloaded: Preloaded | None) -> Iterator[list[Any]]:
    """While it lasts, ranks are forks of a process; None starts them as always, and so does one that is
    gone. Gives a list to which the processes of the ranks are added, as `subprocess.Popen` has them."""
    started: list[Any] = []

    class ForkHandler(SubprocessHandler):
        def _popen(self, args: tuple[Any, ...], env: dict[str, str]) -> Any:
            forked = None if preloaded is None else preloaded.fork(env)
            started.append(forked or super()._popen(args, env))
            return started[-1]

    api: Any = torch.distributed.elastic.multiprocessing.api
    before = api.get_subprocess_handler
    api.get_subprocess_handler = ForkHandler
    try:
        yield started
    finally:
        api.get_subprocess_handler = before
