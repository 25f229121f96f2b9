"""Attention kernels that return the log-sum-exp of their rows: where in their arguments is what.

All are (queries, keys, values, ...), backward (gradient, queries, keys, values, ...), as PyTorch's
native_functions.yaml says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.ir.program import Arg, Op, Ref

MASK = "attn_mask"


@dataclass(frozen=True, slots=True)
class Kernel:
    """Positions of arguments. mask: None where it is the keyword `attn_mask`, -1 where the kernel takes none.

    Of a backward also: made, lse: of the forward's results; lengths: of the numbers of queries and keys;
    state: of what the forward has drawn by, which are its results `state_of`. lse_multiple: to what number of
    rows the kernel pads the log-sum-exp; lse_dims: of how many dims it is.
    """

    drop: int
    causal: int
    mask: int | None
    made: int = 0
    lse: int = 0
    lengths: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    state_of: tuple[int, ...] = ()
    lse_multiple: int = 1
    lse_dims: int = 3

    def is_causal(self, op: Op) -> bool:
        return len(op.args) > self.causal and bool(op.args[self.causal])

    def drops(self, op: Op) -> bool:
        return len(op.args) > self.drop and bool(op.args[self.drop])

    def mask_of(self, op: Op) -> str | None:
        at = self.mask
        found = dict(op.kwargs).get(MASK) if at is None else op.args[at] if 0 <= at < len(op.args) else None
        return found.name if isinstance(found, Ref) else None

    def arguments(
        self, op: Op, tensors: Sequence[str], mask: str | None, causal: bool
    ) -> tuple[list[Arg], dict[str, Arg]]:
        """Those of a call like the op's, on other tensors. Keywords that the kernel has not are left out."""
        args, kwargs = list(op.args), {key: arg for key, arg in op.kwargs if key == "scale"}
        args[: len(tensors)] = map(Ref, tensors)
        if len(args) > self.causal:
            args[self.causal] = causal
        if mask is not None and self.mask is None:
            kwargs[MASK] = Ref(mask)
        elif mask is not None and self.mask is not None:
            args[self.mask] = Ref(mask)
        return args, kwargs

    def arguments_backward(
        self,
        op: Op,
        tensors: Sequence[str],
        mask: str | None,
        causal: bool,
        lengths: tuple[int, int],
        state: Sequence[str],
    ) -> tuple[list[Arg], dict[str, Arg]]:
        """The same of a backward. tensors: gradient, queries, keys, values, result, log-sum-exp."""
        args, kwargs = self.arguments(op, tensors[:4], mask, causal)
        args[self.made], args[self.lse] = map(Ref, tensors[4:])
        for at, length in zip(self.lengths, lengths, strict=False):
            args[at] = length
        for at, name in zip(self.state, state, strict=True):
            args[at] = Ref(name)
        return args, kwargs


_NAME = "aten._scaled_dot_product_{}.default"
_CPU, _FLASH = "flash_attention_for_cpu", "flash_attention"
_EFFICIENT, _CUDNN = "efficient_attention", "cudnn_attention"

KERNELS = {
    _NAME.format(_CPU): Kernel(3, 4, None),
    _NAME.format(_FLASH): Kernel(3, 4, -1),
    _NAME.format(_EFFICIENT): Kernel(5, 6, 3),
    _NAME.format(_CUDNN): Kernel(5, 6, 3),
}
BACKWARDS = {
    _NAME.format(f"{_CPU}_backward"): Kernel(6, 7, None, 4, 5),
    _NAME.format(f"{_FLASH}_backward"): Kernel(10, 11, -1, 4, 5, (8, 9), (12, 13), (6, 7)),
    _NAME.format(f"{_EFFICIENT}_backward"): Kernel(9, 11, 4, 5, 6, (), (7, 8), (2, 3), lse_multiple=32),
    _NAME.format(f"{_CUDNN}_backward"): Kernel(13, 14, 8, 4, 5, (11, 12), (6, 7), (6, 7), lse_dims=4),
}
