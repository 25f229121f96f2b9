"""Masks that are causal, or hide nothing, are left to the kernel of attention while a model is captured.

`F.scaled_dot_product_attention` with a mask takes other kernels than with `is_causal=True`, which pass half
of the products over. A mask that depends on constants alone is known (`known`): where it is exactly causal,
the call is made with `is_causal=True` in its place; where it hides nothing, without it. Any other mask stays.

Models of `transformers` (5.17 and later) leave such masks out where they train, and write them out where they
are exported. They do here as they do when they train, by these names:

    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS   what makes masks, by kind of attention; _local_mapping of it
    masking_utils.find_packed_sequence_indices   which tokens belong together, by their positions
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.capturing.known import Known
from stretto.capturing.substitutes import PyTorchCalls
from stretto.capturing.torch_state_adapter import exporting

CAUSAL, NOTHING = "causal", "nothing"
"""What a mask hides: later keys, or none."""

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Of attention's arguments that may be positional."""

KINDS = ("sdpa", "eager")


@contextmanager
def masks_recognised(known: Known, others: Iterable[tuple[Tensor, Tensor]] = ()) -> Iterator[None]:
    """Around one run of the forward. others: as `Known.begin` takes them."""
    known.begin(others)
    with masks_as_in_training(known), PyTorchCalls(partial(_called, known)):
        yield


def _called(known: Known, function: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    if function is not F.scaled_dot_product_attention:
        return known.call(function, args, named)
    given = {**dict(zip(_NAMES, args, strict=False)), **named}
    mask = given.get("attn_mask")
    if not isinstance(mask, Tensor) or given.get("is_causal"):
        return function(*args, **named)
    hides = known.ask(mask, hidden_by)
    lengths = given["query"].shape[-2], given["key"].shape[-2]
    if hides == NOTHING or (hides == CAUSAL and lengths == tuple(mask.shape[-2:])):
        given |= {"attn_mask": None, "is_causal": hides == CAUSAL}
        args, named = tuple(given.pop(name) for name in _NAMES[:3]), given
    return function(*args, **named)


def hidden_by(mask: Tensor) -> str | None:
    """`CAUSAL` or `NOTHING`, if a mask (..., S, T) is exactly that; None if not.

    Truth values mark what is seen. Numbers are added to scores: 0 is seen; -inf is hidden, and so is the
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


@contextmanager
def masks_as_in_training(known: Known) -> Iterator[None]:
    """While the context lasts, masks are left out that are left out in training."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    makers: Any = getattr(masking, "ALL_MASK_ATTENTION_FUNCTIONS", None)
    find: Any = getattr(masking, "find_packed_sequence_indices", None)
    local = dict(getattr(makers, "_local_mapping", {}))
    try:
        for kind in KINDS:
            if makers is not None and kind in makers:
                makers[kind] = _by_shapes(makers[kind])
        if find is not None:
            masking.find_packed_sequence_indices = _packed(find, known)
        yield
    finally:
        if find is not None:
            masking.find_packed_sequence_indices = find
        for kind in KINDS:
            if kind in local:
                makers[kind] = local[kind]
            elif makers is not None and kind in makers:
                del makers[kind]


def _by_shapes(own: Callable[..., Any]) -> Callable[..., Any]:
    """What chooses by shapes alone, as it gets no tensor, chooses as in training."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            return own(*args, **kwargs)
        with exporting(on=False):
            return own(*args, **kwargs)

    return made


def _packed(own: Callable[[Tensor], Any], known: Known) -> Callable[[Tensor], Any]:
    def found(position_ids: Tensor) -> Any:
        """None for one sequence a row, as in training, where positions are known."""
        return None if known.ask(position_ids, _one_after_the_other) else own(position_ids)

    return found


def _one_after_the_other(positions: Tensor) -> bool:
    return bool((positions.diff(dim=-1) == 1).all())
