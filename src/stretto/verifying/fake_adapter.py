"""Tensors that have a shape and a device and no elements. Uses one private name of PyTorch (2.11 to 2.13):

torch._subclasses.fake_tensor.FakeTensorMode   what an op gives on a device that need not be here
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def no_elements() -> Iterator[None]:
    """While the context lasts, ops compute shapes and dtypes as kernels of the tensors' device give them.

    No kernel runs: an op without a rule of its own raises an error that names it. PyTorch writes no log of
    what is raised: anyone who calls an op that may not fit says so.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_fallback_kernels=False):
            yield
    finally:
        log.disabled = before
