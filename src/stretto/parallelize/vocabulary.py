"""A vocabulary that is spread over tensor-parallel ranks: embedding, logits, cross-entropy.

Each rank holds an equal, consecutive part of the vocabulary's rows (Megatron-LM, arXiv 1909.08053).

    1. Embedding: a rank looks up the tokens of its part, gives zeros for the rest; the sum is the embedding.
    2. Logits: a rank has the columns of its part. `SplitLogits` stands for the whole in the model's code:
       what keeps the vocabulary's dim whole (dtype, views of the other dims, scaling) is done on the part;
       anything else gathers the logits first, so that code which wants them whole gets them whole.
    3. Cross-entropy of split logits needs three numbers for a token from each rank: the highest logit of its
       part, the sum of exponentials below that, and the target's logit. One collective carries them; sums
       below different maxima are put together as in Milakov and Gimelshein, "Online normalizer calculation
       for softmax" (arXiv 1805.02867), so that nobody waits for the maximum of all before it adds.

Dims as suffixes: N tokens, P this rank's part of the vocabulary, R ranks.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.parallelize import ops
from stretto.parallelize.unseen import own_code, unseen


@unseen
def embed(
    module: nn.Embedding, own: Callable[[Tensor], Tensor], tokens: Tensor, axis: str, size: int
) -> Tensor:
    """Step 1. `module.weight` holds this rank's rows; `own` is the module's forward, which may scale what it
    looks up. Returns the embedding, equal on all ranks; NaN for tokens that are not in the vocabulary."""
    rows = module.weight.shape[0]
    local = tokens - ops.index(tokens, axis, size) * rows
    elsewhere = ((local < 0) | (local >= rows)).unsqueeze(-1)
    padding, module.padding_idx = module.padding_idx, None
    try:
        found = own(local.masked_fill(elsewhere.squeeze(-1), 0))
    finally:
        module.padding_idx = padding
    if padding is not None:
        # The padding token's row is read, but never learns.
        found = torch.where((tokens == padding).unsqueeze(-1), found.detach(), found)
    unknown = ((tokens < 0) | (tokens >= rows * size)).unsqueeze(-1)
    fill = torch.zeros_like(unknown, dtype=found.dtype).masked_fill(unknown, math.nan)
    return ops.reduce(torch.where(elsewhere, fill, found), axis, size)


class _CrossEntropy(torch.autograd.Function):
    """Step 3: each token's loss, 0 where the target is ignored, NaN where it is not in the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits_NP: Tensor, target_N: Tensor, ignore_index: int, axis: str, size: int
    ) -> Tensor:
        part = logits_NP.shape[1]
        with own_code():
            highest_N = logits_NP.amax(dim=1)
        # A rank whose part is all -inf (a padded vocabulary) adds nothing, and not NaN.
        base_N = highest_N.masked_fill(highest_N == -math.inf, 0.0)
        exp_NP = (logits_NP - base_N.unsqueeze(1)).exp()
        local_N = target_N - ops.index(target_N, axis, size) * part
        elsewhere_N = (local_N < 0) | (local_N >= part)
        local_N = local_N.masked_fill(elsewhere_N, 0)
        picked_N = logits_NP.gather(1, local_N.unsqueeze(1)).squeeze(1).masked_fill(elsewhere_N, 0.0)
        mine_3N = torch.stack((highest_N, exp_NP.sum(dim=1), picked_N))
        all_R3N = ops.all_gather(mine_3N, 0, axis, size).view(size, *mine_3N.shape)
        highest_RN = all_R3N[:, 0]
        top_N = highest_RN.amax(dim=0)
        total_N = ((highest_RN - top_N).exp() * all_R3N[:, 1]).sum(dim=0)
        picked_N = all_R3N[:, 2].sum(dim=0) - top_N
        ignored_N = target_N == ignore_index
        unknown_N = ((target_N < 0) | (target_N >= part * size)) & ~ignored_N
        factor_N = (highest_N - top_N).exp() / total_N
        ctx.save_for_backward(exp_NP, factor_N, local_N, elsewhere_N, ignored_N)
        # A target that is no token has no loss; where the whole is at hand, PyTorch refuses it.
        return (total_N.log() - picked_N).masked_fill(ignored_N, 0.0).masked_fill(unknown_N, math.nan)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> Any:
        exp_NP, factor_N, local_N, elsewhere_N, ignored_N = ctx.saved_tensors
        grad_N = grad_N.masked_fill(ignored_N, 0.0)
        grad_NP = exp_NP * (grad_N * factor_N).unsqueeze(1)
        hit_N = grad_N.masked_fill(elsewhere_N, 0.0)
        return grad_NP.scatter_add(1, local_N.unsqueeze(1), -hit_N.unsqueeze(1)), None, None, None, None


@unseen
def cross_entropy(
    logits_NP: Tensor, target_N: Tensor, ignore_index: int, reduction: str, axis: str, size: int
) -> Tensor:
    """`F.cross_entropy` of logits whose columns are spread over the axis; equal on all ranks."""
    loss_N: Tensor = _CrossEntropy.apply(logits_NP, target_N, ignore_index, axis, size)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return loss_N
    if reduction == "sum":
        return loss_N.sum()
    return loss_N.sum() / (target_N != ignore_index).sum()


class SplitLogits:
    """Step 2: logits of which this rank has `part`, the columns (last dim) of its part of the vocabulary.

    Looks like the whole tensor to the code that gets it; it is none, so that nothing takes the part for it.
    """

    def __init__(self, part: Tensor, axis: str, size: int) -> None:
        self._part, self._axis, self._size = part, axis, size

    def _like(self, part: Tensor) -> SplitLogits:
        return SplitLogits(part, self._axis, self._size)

    def full(self) -> Tensor:
        """The whole logits, equal on all ranks."""
        if self._size == 1:
            return self._part
        return ops.collect(self._part, -1, self._axis, self._size)

    @property
    def held(self) -> Tensor:
        """What this rank has of them."""
        return self._part

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._part.shape[:-1], self._part.shape[-1] * self._size))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._part.dim()

    ndim = property(dim)
    dtype = property(lambda self: self._part.dtype)
    device = property(lambda self: self._part.device)
    requires_grad = property(lambda self: self._part.requires_grad)

    # What keeps the vocabulary whole is done on the part.

    def to(self, *args: Any, **kwargs: Any) -> SplitLogits:
        return self._like(self._part.to(*args, **kwargs))

    def float(self) -> SplitLogits:
        return self._like(self._part.float())

    def double(self) -> SplitLogits:
        return self._like(self._part.double())

    def contiguous(self) -> SplitLogits:
        return self._like(self._part.contiguous())

    def view(self, *shape: Any) -> Any:
        return self._shaped(shape, Tensor.view)

    def reshape(self, *shape: Any) -> Any:
        return self._shaped(shape, Tensor.reshape)

    def _shaped(self, shape: tuple[Any, ...], call: Callable[[Tensor, Sequence[int]], Tensor]) -> Any:
        if len(shape) == 1 and not isinstance(shape[0], numbers.Integral):
            shape = tuple(shape[0]) if isinstance(shape[0], Sequence) else shape
        numbers_only = all(isinstance(n, numbers.Integral) for n in shape)
        rows = self._part.numel() // self._part.shape[-1]
        whole = self.shape[-1]
        if numbers_only and shape and shape[-1] == whole:
            return self._like(call(self._part, (*shape[:-1], self._part.shape[-1])))
        known = [n for n in shape[:-1] if n != -1] if numbers_only else []
        if numbers_only and shape and shape[-1] == -1 and len(known) == len(shape) - 1:
            count = 1
            for n in known:
                count *= n
            if count == rows:
                return self._like(call(self._part, (*shape[:-1], self._part.shape[-1])))
        return call(self.full(), shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        dims = self.dim()
        if end_dim % dims < dims - 1:
            return self._like(self._part.flatten(start_dim, end_dim))
        return self.full().flatten(start_dim, end_dim)

    def __getitem__(self, at: Any) -> Any:
        places = at if isinstance(at, tuple) else (at,)
        simple = all(isinstance(p, (int, slice)) or p is Ellipsis for p in places)
        named = [p for p in places if p is not Ellipsis]
        if simple and len(named) < self.dim():
            reaches_last = Ellipsis in places and places[-1] is not Ellipsis
            if not reaches_last:
                return self._like(self._part[at])
            if places[-1] == slice(None):
                return self._like(self._part[at])
        elif simple and places[-1] == slice(None):
            return self._like(self._part[at])
        return self.full()[at]

    def __mul__(self, factor: Any) -> Any:
        return self._like(self._part * factor) if _is_number(factor) else self.full() * factor

    __rmul__ = __mul__

    def __neg__(self) -> SplitLogits:
        return self._like(-self._part)

    def __len__(self) -> int:
        return self._part.shape[0]

    def __truediv__(self, divisor: Any) -> Any:
        return self._like(self._part / divisor) if _is_number(divisor) else self.full() / divisor

    def tanh(self) -> SplitLogits:
        return self._like(self._part.tanh())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.full(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is F.cross_entropy:
            found = _cross_entropy(*args, **kwargs)
            if found is not None:
                return found
        if function is torch.tanh and len(args) == 1:
            return args[0].tanh()
        whole = [a.full() if isinstance(a, SplitLogits) else a for a in args]
        named = {k: v.full() if isinstance(v, SplitLogits) else v for k, v in kwargs.items()}
        return function(*whole, **named)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (isinstance(value, nn.Parameter) and value.dim() == 0)


def _on_the_whole(name: str) -> Callable[..., Any]:
    def operator(self: SplitLogits, *args: Any) -> Any:
        whole = [a.full() if isinstance(a, SplitLogits) else a for a in args]
        return getattr(self.full(), name)(*whole)

    return operator


for _name in (
    *("add", "radd", "sub", "rsub", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "floordiv", "mod"),
    *("lt", "le", "gt", "ge", "eq", "ne", "abs"),
):
    setattr(SplitLogits, f"__{_name}__", _on_the_whole(f"__{_name}__"))
SplitLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` as far as parts allow; None for what needs the whole logits."""
    if (
        not isinstance(input, SplitLogits)
        or weight is not None
        or size_average is not None
        or reduce is not None
    ):
        return None
    if label_smoothing or input.dim() != 2 or not isinstance(target, Tensor) or target.dim() != 1:
        return None
    if target.is_floating_point() or reduction not in ("mean", "sum", "none"):
        return None
    return cross_entropy(input._part, target, ignore_index, reduction, input._axis, input._size)
