"""What split logits and their views share: the part, and the gathered tensor once something needs it.

The version counter of the gathered tensor tells of writes to it, through whatever view. Touches `ops` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.parallelize import ops
from stretto.parallelize.unseen import hidden


@dataclass(slots=True)
class Storage:
    """What logits and their views share. gathered: the whole, once something needed it; version: its count
    of writes at that time; whole: the part is out of use."""

    part: Tensor
    axis: str
    size: int
    gathered: Tensor | None = None
    version: int = 0
    whole: bool = False

    def gather(self) -> Tensor:
        if self.gathered is None:
            with torch.enable_grad():  # it serves later uses too
                if self.size == 1:  # the model alone (`parallelize.alone`)
                    with hidden():
                        made = self.part.clone()
                else:
                    made = ops.collect(self.part, -1, self.axis, self.size)
                if min(made.numel() // max(made.shape[-1], 1), self.part.shape[-1]) == 1:
                    made = made.clone()  # a view that an autograd function returns cannot be written to
            self.gathered, self.version = made, made._version
        return self.gathered

    def in_parts(self) -> bool:
        """Whether the part still has the values of the logits."""
        if self.gathered is not None and self.gathered._version != self.version:
            self.whole = True
        return not self.whole
