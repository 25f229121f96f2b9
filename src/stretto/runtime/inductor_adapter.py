"""What the compiler behind `torch.compile` needs on this machine: the only private names of compiled compute.

Touches `torch._inductor.cpp_builder` and `torch.utils._triton`; the compiling itself goes through
`torch.compile`, which is public.
"""

from __future__ import annotations

import torch
from torch._inductor import cpp_builder
from torch.utils import _triton

from stretto.errors import UsageError


def require_compiler(device: torch.device) -> None:
    """Raise UsageError, which says what to install, unless Inductor can compile for the device.

    On processors it writes C++ and calls a compiler (the one that $CXX names, else g++ or clang++); on
    accelerators it writes Triton.
    """
    if device.type == "cpu":
        try:
            cpp_builder.get_cpp_compiler()
        except Exception as error:  # InvalidCxxCompiler; for a $CXX that cannot be run, what the system says
            raise UsageError(
                'compile="inductor" needs a C++ compiler on this machine, and none was found: install g++ '
                "(Debian and Ubuntu: apt-get install g++) or clang, name it in $CXX, or leave compile out"
            ) from error
    elif not _triton.has_triton():
        raise UsageError(
            f'compile="inductor" needs Triton for {device.type}, and it cannot be used here: install the '
            "triton that belongs to this PyTorch, or leave compile out"
        )
