"""Names of the ops of PyTorch by what they do with the dims of their tensors (`stretto.ir.dims`)."""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    """Targets by names, with ".default" where no overload is named."""
    return frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in text.split())


COPIES = names("clone _to_copy detach alias contiguous lift_fresh_copy neg positive to.dtype")
"""Linear in their only operand, element by element."""

CONJUGATES = names("_conj conj_physical real")
"""Likewise, of complex numbers."""

SCALED = names("mul.Scalar div.Scalar")
SUMS = names("add.Tensor sub.Tensor rsub.Tensor")
PRODUCTS = names("mul.Tensor")
QUOTIENTS = names("div.Tensor")

FIRST_LINEAR = names(
    """gelu_backward silu_backward tanh_backward sigmoid_backward threshold_backward hardtanh_backward
    leaky_relu_backward elu_backward softplus_backward hardswish_backward hardsigmoid_backward
    mish_backward logit_backward native_dropout_backward log_sigmoid_backward softshrink_backward
    hardshrink_backward"""
)
"""Element by element, and linear in the first operand: gradients of functions of one number."""

POINTWISE = (
    COPIES
    | CONJUGATES
    | SCALED
    | SUMS
    | PRODUCTS
    | QUOTIENTS
    | FIRST_LINEAR
    | names(
        """add.Scalar sub.Scalar rsub.Scalar fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar div.Tensor_mode div.Scalar_mode lerp.Scalar
    lerp.Tensor floor_divide floor_divide.Scalar xlogy.Tensor"""
    )
    | frozenset(
        f"aten.{name}.{kind}"
        for name in ("lt", "le", "gt", "ge", "eq", "ne", "bitwise_and", "bitwise_or", "bitwise_xor")
        for kind in ("Scalar", "Tensor")
    )
    | names(
        """exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square abs sign sgn sin cos tan asin acos
    atan sinh cosh tanh asinh acosh atanh atan2 erf erfc erfinv floor ceil round trunc frac sigmoid relu
    gelu silu mish elu celu selu leaky_relu hardtanh hardswish hardsigmoid softplus softshrink
    hardshrink threshold logit relu6 clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max
    clamp_max.Tensor maximum minimum fmax fmin hypot logaddexp logaddexp2 copysign.Tensor nan_to_num
    isnan isinf isfinite bitwise_not logical_not logical_and logical_or logical_xor masked_fill.Scalar
    masked_fill.Tensor where.self where.ScalarSelf where.ScalarOther where.Scalar addcmul addcdiv sinc
    lgamma digamma deg2rad rad2deg signbit heaviside special_erfcx copy complex polar angle native_dropout
    bernoulli.p bernoulli rand_like randn_like mse_loss smooth_l1_loss huber_loss binary_cross_entropy
    log_sigmoid_forward isclose"""
    )
)
"""Each element of a result depends on the elements at its place alone (with the usual broadcasting)."""

REDUCTION_SETTING = names("mse_loss smooth_l1_loss huber_loss binary_cross_entropy")
"""Element by element only with reduction "none": their results show which it is."""

REDUCTIONS = names(
    """sum.dim_IntList sum mean.dim mean amax amin max.dim min.dim max min argmax argmin logsumexp
    prod.dim_int prod any.dim any any.dims all.dim all all.dims var.correction var_mean.correction
    std.correction linalg_vector_norm nansum median.dim mode kthvalue count_nonzero.dim_IntList
    norm.ScalarOpt_dim norm.Scalar nanmedian.dim"""
)
"""Some dims, or all, are reduced. Those that are sums make partial sums from parts; others need the full
dim."""

DIM_THIRD = names("linalg_vector_norm norm.ScalarOpt_dim kthvalue")
"""Which of them take the dim as the third argument, not the second."""

ADDING = names("sum.dim_IntList sum nansum count_nonzero.dim_IntList")

LINEAR_REDUCTIONS = names("sum.dim_IntList sum mean.dim mean")

ALONG_ONE = {
    name: place
    for place, text in {
        (1, -1): """_softmax _log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort
            glu""",
        (2, -1): "_softmax_backward_data _log_softmax_backward_data sort.stable topk",
        (1, 0): "select.int unbind.int stack gather scatter_add scatter.src scatter.value scatter_reduce.two",
        (2, 0): "select_backward slice_scatter select_scatter",
    }.items()
    for name in names(text)
}
"""Position of the dim along which the op works, and which it is where none is named. It must be full, and
all else is cut freely."""

LINEAR_ALONG_ONE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        names(
            """cumsum _softmax_backward_data _log_softmax_backward_data gather select.int unbind.int
            select_backward"""
        ),
        (0,),
    ),
    **dict.fromkeys(names("slice_scatter select_scatter"), (0, 1)),
    **dict.fromkeys(names("scatter_add scatter.src"), (0, 2)),
}
"""Which of them are linear, and in which operands together; a stack is in all."""

ATTENTION = names(
    """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable"""
)
ATTENTION_BACKWARD = frozenset(name.replace(".default", "_backward.default") for name in ATTENTION)

MIXTURE, MIXTURE_BACKWARD = "stretto_experts.mixture.default", "stretto_experts.mixture_backward.default"
"""A module of experts, until a rank's ops are in its place (`stretto.parallelize.expert_op`)."""

OWN = "stretto_moe.own.default"
"""A view of what a rank has of a value, whose rows it puts in an order of its own."""

LIKELIHOODS = names("nll_loss_forward nll_loss2d_forward")
"""(input, target, weight, reduction, ignore_index)"""
