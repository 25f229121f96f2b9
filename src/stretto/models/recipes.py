"""How tensors of a model come of those in files: one as it is, or several put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Read = Callable[[str], Tensor]
"""A whole tensor of a file, by its name there."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """names: tensors of files that it takes. makes: names in the model -> what comes of them, on "meta".
    make: puts them together; None where one tensor is taken as it is."""

    names: tuple[str, ...]
    makes: Mapping[str, Tensor]
    make: Callable[[Read], Mapping[str, Tensor]] | None = None
