"""Models without the values of their parameters, which come from elsewhere, part by part.

Under `torch.device("meta")` buffers have no values either, and most are in no file: a model computes them as
it is made. Touches PyTorch's hook for parameters that modules register, for the thread that asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def hollow() -> Iterator[None]:
    """Modules that are made within have their parameters on "meta", and their buffers with values.

    The memory of a parameter is given back as it is registered, before anything is written into it.
    """
    own = threading.get_ident()

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != own:
            return None  # as it is; so what is tied stays tied
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(emptied)
    try:
        yield
    finally:
        hook.remove()
