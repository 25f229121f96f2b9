"""Gradients that know that they are of a part, and PyTorch's clipping by norm, which must know.

What works on each element works on a `PartGradient` as on any tensor. What makes one number of all elements
(a norm, a sum, a mean) is refused: of a part it is not what the plain model has. Results are plain tensors,
except those that have one operand's elements alone (`.detach()`, `.float()`, `.square()`, `.flatten()`).

Private parts of PyTorch: `torch._C.DisableTorchFunctionSubclass`, and `_clip_grads_with_norm_` of
`torch.nn.utils.clip_grad`, which `clip_grad_norm_` calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from stretto.errors import UsageError

_COPIES = ("clone", "cpu", "cuda", "as_subclass", "copy_")
"""What gives a tensor of the caller's own: it is not followed."""


class PartGradient(torch.Tensor):
    """The gradient of a part of a tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            if isinstance(result, (torch.Tensor, list, tuple)) and name not in _COPIES:
                return _judged(name, result, args)
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def _judged(name: str, result: Any, args: Any) -> Any:
    """The result, marked if it is the part's; raises UsageError if it is one number of its elements."""
    operands = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    part = next((x for x in operands if type(x) is PartGradient), None)
    if part is None:
        return result
    for one in result if isinstance(result, (list, tuple)) else (result,):
        if (
            isinstance(one, torch.Tensor)
            and one.numel() == 1 < part.numel()
            and one.is_floating_point()
            and one.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()
        ):
            raise UsageError(
                f"{name} of a gradient of shape {list(part.shape)}, which is this rank's part of a sharded "
                "parameter's: it makes one number of the part, which is not that of the full tensor. For "
                "the norm of all gradients take stretto.train.clip.GradientClip; for this rank's part "
                "alone, gradient.as_subclass(torch.Tensor)"
            )
    alone = sum(isinstance(x, torch.Tensor) for x in operands) == 1
    follows = (
        alone
        and isinstance(result, torch.Tensor)
        and result is not part
        and result.numel() == part.numel()
        and not name.endswith("_like")
    )
    return result.as_subclass(PartGradient) if follows else result


def guard_torch_clip(is_partial: Callable[[torch.Tensor], bool]) -> None:
    """From now on `torch.nn.utils.clip_grad_norm_` refuses gradients of parameters on a rank that lacks some
    of the model's, or parts of them. is_partial: whether a parameter is such a one."""
    plain = clip_grad._clip_grads_with_norm_

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        kept = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(map(is_partial, kept)):
            raise UsageError(
                "torch.nn.utils.clip_grad_norm_ takes the norm of this rank's gradients, and the rank has "
                "a part of the model: ranks would scale theirs by different factors. Make "
                "clip = stretto.train.clip.GradientClip(runner, max_norm) once, on every rank, and call "
                "clip() before the optimizer's step"
            )
        plain(kept, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = clip
