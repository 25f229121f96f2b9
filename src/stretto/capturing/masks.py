"""Masks that are causal, or hide nothing, are left to the kernel of attention while a model is captured.

`F.scaled_dot_product_attention` with a mask takes other kernels than with `is_causal=True`, which pass half
of the products over. A mask that depends on constants alone is known (`known`): where it is exactly causal,
the call is made with `is_causal=True` in its place; where it hides nothing, without it. Any other mask stays:
one of the batch (padding), a parameter or a buffer, a window, a bias.

Models of `transformers` write masks out where they are exported, and not where they train. They are told to
do as they do when they train (`transformers_adapter`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stretto.capturing.known import Known
from stretto.capturing.transformers_adapter import masks_as_in_training

CAUSAL, NOTHING = "causal", "nothing"
"""What a mask hides: later keys, or none."""

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Of the arguments that attention may be given by position."""


@contextmanager
def masks_recognised(known: Known, others: Iterable[tuple[Tensor, Tensor]] = ()) -> Iterator[None]:
    """Around one run of the forward. others: as `Known.begin` takes them."""
    known.begin(others)
    with masks_as_in_training(known), _Calls(known):
        yield


class _Calls(TorchFunctionMode):
    """Sees every call of a PyTorch function."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return self._known.call(func, args, named)
        given = {**dict(zip(_NAMES, args, strict=False)), **named}
        mask = given.get("attn_mask")
        if not isinstance(mask, Tensor) or given.get("is_causal"):
            return func(*args, **named)
        hides = self._known.ask(mask, hidden_by)
        lengths = given["query"].shape[-2], given["key"].shape[-2]
        if hides == NOTHING or (hides == CAUSAL and lengths == tuple(mask.shape[-2:])):
            given |= {"attn_mask": None, "is_causal": hides == CAUSAL}
            args, named = tuple(given.pop(name) for name in _NAMES[:3]), given
        return func(*args, **named)


def hidden_by(mask: Tensor) -> str | None:
    """`CAUSAL` or `NOTHING`, if a mask (..., S, T) is exactly that; None if not.

    Truth values say what is seen. Numbers are added to scores: 0 is seen; -inf is hidden, and so is the
    lowest number of the dtype, which leaves nothing of a score that it is added to."""
    for dim, stride in enumerate(mask.stride()[:-2]):
        if stride == 0:
            mask = mask.narrow(dim, 0, 1)
    seen = mask
    if mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
            return None
    elif mask.dtype != torch.bool:
        return None
    if bool(seen.all()):
        return NOTHING
    S, T = mask.shape[-2:] if mask.dim() > 1 else (1, 0)
    causal = S == T and bool((seen == torch.ones(S, T, dtype=torch.bool).tril()).all())
    return CAUSAL if causal else None
