"""A vocabulary that is sharded over tensor-parallel ranks: embedding, logits, cross-entropy.

Each rank has an equal, consecutive part of the vocabulary's rows (Megatron-LM, arXiv 1909.08053).

    1. Embedding: a rank looks up the tokens of its part, gives zeros for the rest; the sum is the embedding.
    2. Logits: a rank has the columns of its part (`split_logits`).
    3. Cross-entropy of split logits needs three numbers for a token from each rank: the highest logit of its
       part, the sum of exponentials below that, and the target's logit. One collective carries them; sums
       below different maxima are put together as in Milakov and Gimelshein, "Online normalizer calculation
       for softmax" (arXiv 1805.02867), so that no one waits for the maximum of all before it adds.

Dims as suffixes: N tokens, P this rank's part of the vocabulary, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stretto.parallelize import ops
from stretto.parallelize.unseen import own_code, unseen


@unseen
def embed(
    module: nn.Embedding, axis: str, size: int, own: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Step 1. `module.weight` has this rank's rows; `own` is the module's forward, and gets the arguments."""
    with _Lookups(module, axis, size):
        return own(*args, **kwargs)


class _Lookups(TorchFunctionMode):
    """While it lasts, a lookup in a rank's rows of a module's table gives the rows of all ranks."""

    def __init__(self, module: nn.Embedding, axis: str, size: int) -> None:
        super().__init__()
        self._rows, self._axis, self._size = module.weight.shape[0], axis, size
        self._others = [p for p in module.parameters() if p is not module.weight]

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if function is F.embedding:
            table = args[1] if len(args) > 1 else given["weight"]
            if table.shape[0] == self._rows and all(table is not p for p in self._others):
                return self._lookup(*args, **given)
        return function(*args, **given)

    def _lookup(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """The rows of tokens; NaN for tokens that are not in the vocabulary. What needs the table in full
        is left as it is, and refused by the proof of placements."""
        if max_norm is not None or scale_grad_by_freq or sparse:
            return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        full = self._rows * self._size
        local = input - ops.index(input, self._axis, self._size) * self._rows
        elsewhere = ((local < 0) | (local >= self._rows)).unsqueeze(-1)
        result = F.embedding(local.masked_fill(elsewhere.squeeze(-1), 0), weight)
        if padding_idx is not None:
            # The padding token's row is read, but never learns.
            padding = padding_idx % full
            result = torch.where((input == padding).unsqueeze(-1), result.detach(), result)
        unknown = ((input < 0) | (input >= full)).unsqueeze(-1)
        fill = torch.zeros_like(unknown, dtype=result.dtype).masked_fill(unknown, math.nan)
        return ops.reduce(torch.where(elsewhere, fill, result), self._axis, self._size)


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
        # A target that is no token has no loss; where the full tensor is at hand, PyTorch refuses it.
        return (total_N.log() - picked_N).masked_fill(ignored_N, 0.0).masked_fill(unknown_N, math.nan)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> Any:
        exp_NP, factor_N, local_N, elsewhere_N, ignored_N = ctx.saved_tensors
        grad_N = grad_N.masked_fill(ignored_N, 0.0)
        hit_N = grad_N.masked_fill(elsewhere_N, 0.0)
        grad_NP = exp_NP * (grad_N * factor_N).unsqueeze(1)
        return grad_NP.scatter_add(1, local_N.unsqueeze(1), -hit_N.unsqueeze(1)), None, None, None, None


@unseen
def cross_entropy(
    logits_NP: Tensor, target_N: Tensor, ignore_index: int, reduction: str, axis: str, size: int
) -> Tensor:
    """`F.cross_entropy` of logits whose columns are sharded over the axis; equal on all ranks."""
    loss_N: Tensor = _CrossEntropy.apply(logits_NP, target_N, ignore_index, axis, size)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return loss_N
    if reduction == "sum":
        return loss_N.sum()
    return loss_N.sum() / (target_N != ignore_index).sum()
