"""What a loss function returns: the mean loss of a microbatch, or its sum with how many it counts.

def loss(model, microbatch):
    logits, labels = model(microbatch["input_ids"]), microbatch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | int | float]]

MEANT = (
    "return its mean loss, a scalar tensor (of a model's output, its loss), or (sum, count): the sum, and "
    "how many it is of"
)


def loss_and_count(returned: Any, loss: Callable[..., Any]) -> tuple[Tensor, Tensor | float | None]:
    """The loss of a microbatch, with its count where it is a sum (None: it is a mean); both of one element.

    A count that is the same for every microbatch, a number of Python, is a float. Raises UsageError
    with what `loss` should return.
    """
    code = getattr(loss, "__code__", None)
    where = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
    what = f"loss(model, microbatch){where}"
    # A named tuple has names for its items, and none of them is a count.
    is_output = hasattr(returned, "_fields") and "count" not in returned._fields
    if isinstance(returned, tuple) and len(returned) == 2 and not is_output:
        total, count = returned
        return _scalar(total, what, " as the sum of (sum, count)"), _count(count, what)
    return _scalar(returned, what, ""), None


def _scalar(value: Any, what: str, part: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    raise UsageError(f"{what} returned {_named(value)}{part}: {_advice(value)}")


def _count(value: Any, what: str) -> Tensor | float:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise UsageError(
                f"{what} returned {_named(value)} as the count of (sum, count): give one number, as "
                "(labels != -100).sum(); to return a loss that is a mean, return nothing besides it"
            )
        if value.requires_grad:
            raise UsageError(
                f"{what} returned a count that depends on a parameter: (sum, count) are the sum of "
                "the losses and how many they are, which must follow from the microbatch alone, as "
                "(labels != -100).sum()"
            )
        return value
    if isinstance(value, numbers.Real):
        if not 0 < float(value) < math.inf:
            raise UsageError(f"{what} returned the count {value}: (sum, count) is a mean over more than none")
        return float(value)
    raise UsageError(f"{what} returned {_named(value)} as the second of two: {MEANT}")


def _named(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _advice(value: Any) -> str:
    if value is None:
        return f"it lacks a return; {MEANT}"
    if isinstance(value, numbers.Number):
        return f"a number has no gradient; {MEANT} (without .item() and float())"
    return MEANT
