"""Tensors that have a shape and a device and no elements. Uses one private name of PyTorch (2.11 to 2.13):

torch._subclasses.fake_tensor.FakeTensorMode   what an op gives on a device that need not be here
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch._subclasses.fake_tensor import FakeTensorMode


def no_elements() -> AbstractContextManager[object]:
    """While the context lasts, ops compute shapes and dtypes as kernels of the tensors' device give them.

    No kernel runs: an op without a rule of its own raises an error that names it.
    """
    return FakeTensorMode(allow_fallback_kernels=False)
