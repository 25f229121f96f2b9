"""What a model's code lets users see of its steps: small tensors that leave a captured step with the loss.

    stretto.observe("rows", counts)

In a step that is captured it is an op, which capture takes out again (`stretto.capturing.outputs`): what is
left is that the value is needed. Anywhere else it does nothing. Used besides public names of PyTorch:
torch.fx.node.has_side_effect, without which the exporter drops an op that nothing reads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from stretto.errors import UsageError
from stretto.ir.metrics import MOST_ELEMENTS, Joined

_library: Any = torch.library.Library("stretto_seen", "DEF")  # type: ignore[no-untyped-call]
_library.define("observe(Tensor x, str name, str joined) -> Tensor")
# Also of constants, with whose values tracing computes.
_library.impl("observe", lambda x, name, joined: x.new_empty(x.shape), "CompositeExplicitAutograd")

_observe = torch.ops.stretto_seen.observe
has_side_effect(_observe.default)

TARGET = "stretto_seen.observe.default"

_state = threading.local()


@contextmanager
def watched() -> Iterator[None]:
    """While the context lasts, the step under way keeps what it lets see."""
    before = getattr(_state, "on", False)
    _state.on = True
    try:
        yield
    finally:
        _state.on = before


def observe(name: str, value: Tensor, joined: Joined = "sum") -> None:
    """Let users see a small tensor of the forward: `Runner.observed()` gives it, and a trainer logs it.

    It has the name of the module whose code calls this, too. joined: how microbatches, several calls in a
    forward and ranks with other data make one of it: their "sum", or the "max". Outside of a captured step it
    does nothing. It has no gradient, and costs no synchronisation.

    Raises UsageError for what is no small tensor of real numbers.
    """
    if not getattr(_state, "on", False):
        return
    if not isinstance(value, Tensor) or value.is_complex() or value.numel() > MOST_ELEMENTS:
        what = f"one of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(
            f"observe({name!r}, ...) takes a tensor of at most {MOST_ELEMENTS} real numbers, not {what}: "
            "observe a sum or a mean of it"
        )
    if joined not in ("sum", "max"):
        raise UsageError(f"observe({name!r}, ...) joins by 'sum' or 'max', not {joined!r}")
    _observe(value.detach(), name, joined)
