"""Masks of `transformers` (5.17 and later) as they are when a model trains, while it is captured.

Its functions that make masks leave out a mask that attention's `is_causal=True` stands for. They do not while
a model is exported, since an exported model may be given another length than it was exported with; a captured
step has one length. And without a cache they look for sequences that are packed into one row, in positions
whose elements they do not know then.

    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS   what makes masks, by kind of attention; _local_mapping of it
    masking_utils.find_packed_sequence_indices   which tokens belong together, by their positions

Where a release has no such names, masks are written out, and `masks` recognises them in attention's calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from stretto.capturing.known import Known
from stretto.capturing.torch_state_adapter import not_exporting

KINDS = ("sdpa", "eager")
"""Kinds of attention whose masks are tensors."""


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
    """What chooses by shapes alone, as it is given no tensor, chooses as in training."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            return own(*args, **kwargs)
        with not_exporting():
            return own(*args, **kwargs)

    return made


def _packed(own: Callable[[Tensor], Any], known: Known) -> Callable[[Tensor], Any]:
    def found(position_ids: Tensor) -> Any:
        """None for one sequence a row, as in training, where positions are known."""
        return None if known.ask(position_ids, _one_after_the_other) else own(position_ids)

    return found


def _one_after_the_other(positions: Tensor) -> bool:
    return bool((positions.diff(dim=-1) == 1).all())
