"""Which ops DTensor may compute as it does, and on what; and losses that reduce, which it gets wrong.

Some of DTensor's thousand rules give wrong values, some wrong gradients, some an error on one rank alone. So
it computes an op only if that is in this table, and only with tensors for which `tests/tensor/sweep` has
shown it right; all else is computed by `stretto.tensor.parts`, right by construction, which gathers more.

    1. Partial tensors go only into ops that are linear in them; else they are reduced first.
    2. A tensor of which some rank has no element goes only into ops of elements.
    3. Of some ops only some dims may be cut.

PyTorch calls a reducing loss on the parts: a mean of means, which is right only where parts are equal and
rows weigh the same, with a gradient that is too large by the number of ranks. Here:

* a loss of elements is computed for each element, then summed, then divided by the full tensor's size; its
  gradient is that of the elements, of a gradient divided by this size;
* `nll_loss`, that of cross-entropy, gives the sum of the rows that count and the sum of their weights; the
  mean is the one over the other. Its backward pass takes the sum of weights as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from stretto.backend.dispatch_adapter import named
from stretto.tensor.clip import has_empty_part
from stretto.tensor.dtensor_adapter import given_back, has_rule, needs_redistribution, propagated

aten = torch.ops.aten


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names(
    """view _unsafe_view reshape permute transpose t unsqueeze squeeze expand select slice split
    split_with_sizes unbind alias detach diagonal"""
)
COPIES = _names("clone _to_copy contiguous detach_")
LINEAR = VIEWS | COPIES | _names("neg sum")
"""Linear in the one tensor that they take: of a Partial one the result is Partial."""
SUMS = _names("add sub")
PRODUCTS = _names("mul div")
MATMULS = _names("mm bmm addmm baddbmm dot mv")
REDUCTIONS = _names(
    """sum mean amax amin any all prod var std var_mean norm linalg_vector_norm logsumexp _foreach_norm"""
)
OF_ROWS = _names(
    """_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax
    embedding embedding_dense_backward cat stack repeat
    select_backward slice_backward native_dropout native_dropout_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"""
)
FILLED = _names(
    """empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty
    new_empty_strided new_full new_ones new_zeros"""
)
"""New tensors of the shape or the kind of another one."""
WRITTEN = _names("zero_ fill_ uniform_ normal_ bernoulli_ bernoulli is_same_size is_pinned")
OPTIMIZERS = _names(
    """_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adam _fused_adamw
    _amp_foreach_non_finite_check_and_unscale_"""
)
NORMS = _names("native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward")

OF_ELEMENTS = FILLED | WRITTEN | OPTIMIZERS | COPIES | _names("alias detach copy_")
TRUSTED = LINEAR | SUMS | PRODUCTS | MATMULS | REDUCTIONS | OF_ROWS | NORMS | OF_ELEMENTS


@cache
def _name(op: Any) -> str:
    return str(op._schema.name).partition("::")[2]


@cache
def _of_elements(op: Any) -> bool:
    name = _name(op)
    return name in OF_ELEMENTS or torch.Tag.pointwise in op.tags or name.startswith("_foreach_")


@cache
def _in_table(op: Any) -> bool:
    known = _name(op) in TRUSTED or _of_elements(op)
    return known and not any(argument.is_out for argument in op._schema.arguments)


def is_trusted(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[DTensor]) -> bool:
    """Whether DTensor's own way is right for an op on such tensors, Partial only where they may be."""
    if not _in_table(op):
        return False
    if not _of_elements(op) and any(
        has_empty_part(x.device_mesh, tuple(x.placements), tuple(x.shape)) for x in tensors
    ):
        return False
    condition = CONDITIONS.get(_name(op))
    return condition is None or condition(op, args, kwargs)


def has_sound_rule(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[DTensor]) -> bool:
    """Whether DTensor has a rule that leaves what an op writes as it lies.

    It is not asked where all tensors have the same placements, for speed: then it has one.
    """
    written = given_back(op, args, kwargs)
    if not written:
        return True
    first = tensors[0].placements
    if all(x.placements == first for x in tensors):
        return True
    try:
        results = propagated(op, args, kwargs)
    except Exception:
        return False
    results = results if isinstance(results, (list, tuple)) else [results]
    for value, result in zip(written, results):
        if isinstance(value, DTensor) and result is not None and value.placements != result.placements:
            return False
    return True


def is_like(op: Any) -> bool:
    """Whether an op makes a new tensor and reads no value of the one that it takes."""
    return _name(op) in FILLED


def keeps_partial(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[DTensor]) -> bool:
    """Whether an op may take the Partial tensors among its arguments as they are."""
    name = _name(op)
    if any(
        p.is_partial("avg") or (p.is_partial() and not p.is_partial("sum"))
        for x in tensors
        for p in x.placements
    ):
        return name in VIEWS or (name in COPIES and name != "_to_copy")
    if name == "_to_copy":
        dtype = kwargs.get("dtype")
        return dtype is None or torch.promote_types(dtype, args[0].dtype) == dtype != torch.bool
    if name in LINEAR:
        return True
    if name in SUMS:
        return len(tensors) == len([x for x in args[:2] if isinstance(x, torch.Tensor)]) == 2
    if name in PRODUCTS and len(args) > 1:
        second = args[1]
        return not (isinstance(second, DTensor) and is_partial(second)) and not kwargs.get("rounding_mode")
    return False


def is_partial(x: DTensor) -> bool:
    """Whether ranks have terms of a tensor, not the tensor."""
    return any(p.is_partial() for p in x.placements)


def _counts_once(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A lookup's gradient that does not ask how often a row was looked up."""
    scaled = args[4] if len(args) > 4 else kwargs.get("scale_grad_by_freq", False)
    return not scaled


def _full_weights(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A norm whose weight and bias each rank has."""
    named = (*zip((argument.name for argument in op._schema.arguments), args), *kwargs.items())
    return all(
        all(p.is_replicate() for p in value.placements)
        for name, value in named
        if name in ("weight", "bias") and isinstance(value, DTensor)
    )


def _of_the_part(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A view of what each rank has, and not of what it must be sent first."""
    return has_rule(op, args, kwargs) and not needs_redistribution(op, args, kwargs)


CONDITIONS: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]] = {
    "embedding_dense_backward": _counts_once,
}
if torch.__version__ < "2.12":
    # It gathers parts in an order of which its views cannot be views, and normalizes by a part of a weight.
    CONDITIONS |= dict.fromkeys(("view", "_unsafe_view", "reshape"), _of_the_part)
    CONDITIONS |= dict.fromkeys(NORMS, _full_weights)


NONE, MEAN, SUM = 0, 1, 2
"""How PyTorch numbers reductions."""

ELEMENT_LOSSES = frozenset(
    {
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.huber_loss.default,
        aten.soft_margin_loss.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_with_logits.default,
    }
)
ELEMENT_LOSS_GRADIENTS = frozenset(
    {
        aten.mse_loss_backward.default,
        aten.smooth_l1_loss_backward.default,
        aten.huber_loss_backward.default,
        aten.soft_margin_loss_backward.default,
        aten.binary_cross_entropy_backward.default,
    }
)
"""The first argument is the gradient, the second the loss's input."""
LABEL_LOSSES = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})

LOSSES = ELEMENT_LOSSES | ELEMENT_LOSS_GRADIENTS | LABEL_LOSSES


def over_the_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[DTensor]) -> Any:
    """What a reducing loss gives, by ops that do not; NotImplemented for all else."""
    if op not in LOSSES or all(set(x.placements) == {Replicate()} for x in tensors):
        return NotImplemented
    given = named(op, args, kwargs)
    reduction = given["reduction"]
    if reduction == NONE or (op in LABEL_LOSSES and reduction == SUM):
        return NotImplemented

    if op in ELEMENT_LOSS_GRADIENTS:
        gradient, x = given["grad_output"], given["self"]
        gradient = gradient / x.numel() if reduction == MEAN else gradient
        return op(**{**given, "grad_output": gradient, "reduction": NONE})
    if op in LABEL_LOSSES:
        total, weights = op(**{**given, "reduction": SUM})
        return total / weights, weights
    losses = op(**{**given, "reduction": NONE})
    return losses.sum() if reduction == SUM else losses.sum() / losses.numel()


def reduction_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How a loss reduces, as PyTorch numbers it."""
    return int(named(op, args, kwargs)["reduction"])
