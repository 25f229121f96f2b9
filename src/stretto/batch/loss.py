"""What a loss function returns: the mean loss of a microbatch, or its sum with how many it counts.

def loss(model, microbatch):
    logits, labels = model(microbatch["input_ids"]), microbatch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()

Beside either it may return metrics by name, which a step joins over microbatches and ranks: `(loss, {...})`,
`(sum, count, {...})`.

    "accuracy": (right, count)    the sum of all over the sum of what they count
    "entropy": x                  the mean of the microbatches' values
    "tokens": (n, "sum")          the sum
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.ir.metrics import MOST_ELEMENTS, RETURNED

Number = Tensor | int | float
Metrics = Mapping[str, Number | tuple[Number, Number | str]]
Loss = Callable[
    [nn.Module, Any],
    Tensor | tuple[Tensor, Number] | tuple[Tensor, Metrics] | tuple[Tensor, Number, Metrics],
]

MEANT = (
    "return its mean loss, a scalar tensor (of a model's output, its loss), or (sum, count): the sum, and "
    "how many it is of; and last in the tuple, if you wish, a dict of metrics, (loss, {'name': tensor})"
)


def loss_and_count(returned: Any, loss: Callable[..., Any]) -> tuple[Tensor, Tensor | float | None]:
    """The loss of a microbatch, with its count where it is a sum (None: it is a mean); both of one element.

    A count that is the same for every microbatch, a number of Python, is a float. Raises UsageError
    with what `loss` should return.
    """
    what = _what(loss)
    if has_metrics(returned):
        returned = returned[0] if len(returned) == 2 else tuple(returned[:2])
    # A named tuple has names for its items, and none of them is a count.
    is_output = hasattr(returned, "_fields") and "count" not in returned._fields
    if isinstance(returned, tuple) and len(returned) == 2 and not is_output:
        total, count = returned
        return _scalar(total, what, " as the sum of (sum, count)"), _count(count, what)
    return _scalar(returned, what, ""), None


def has_metrics(returned: Any) -> bool:
    """Whether metrics are the last of what a loss function, or a step, returned."""
    return isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[-1], Mapping)


def loss_alone(stepped: Any) -> Tensor:
    """The loss of what `Runner.step` returned."""
    loss: Tensor = stepped[0] if isinstance(stepped, tuple) else stepped
    return loss


def metrics_of(returned: Any, loss: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors to be added up over microbatches and ranks, by the names that `stretto.ir.metrics` joins them
    by; none where the loss function returns no metrics. Raises UsageError with what it should return."""
    for name, given in returned[-1].items() if has_metrics(returned) else ():
        what = f"{_what(loss)} returned metrics, of which {name!r}"
        value, how = given if isinstance(given, tuple) and len(given) == 2 else (given, "mean")
        if isinstance(how, str):
            if how not in ("mean", "sum"):
                raise UsageError(f"{what} is joined by {how!r}: give 'mean', 'sum', or a count")
            yield f"{RETURNED}{how}/{name}", _small(value, what)
        else:
            yield f"{RETURNED}total/{name}", _small(value, what)
            count = _small(how, f"{what} has a count that")
            if count.numel() != 1:
                raise UsageError(f"{what} has a count of shape {list(count.shape)}: give one number")
            yield f"{RETURNED}count/{name}", count


def _small(value: Any, what: str) -> Tensor:
    if isinstance(value, numbers.Real):
        return torch.full((), float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or value.is_complex() or value.numel() > MOST_ELEMENTS:
        raise UsageError(
            f"{what} is {_named(value)}: give a number, or a tensor of at most {MOST_ELEMENTS} real numbers; "
            "alone for the mean of microbatches, (x, 'sum') for the sum, (x, count) for a sum over a count"
        )
    return value.detach()


def _what(loss: Callable[..., Any]) -> str:
    code = getattr(loss, "__code__", None)
    where = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
    return f"loss(model, microbatch){where}"


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
