"""Names of the ops of PyTorch by what they do with the dims of their tensors (`stretto.ir.dims`). Touches
nothing."""

from __future__ import annotations


def _names(prefix: str, text: str) -> frozenset[str]:
    return frozenset(f"{prefix}{name}" for name in text.split())


COPIES = _names(
    "aten.",
    "clone.default _to_copy.default detach.default alias.default contiguous.default lift_fresh_copy.default "
    "neg.default positive.default to.dtype",
)
"""Linear in their only operand, element by element."""

SCALED = _names("aten.", "mul.Scalar div.Scalar")
SUMS = _names("aten.", "add.Tensor sub.Tensor rsub.Tensor")
PRODUCTS = _names("aten.", "mul.Tensor")
QUOTIENTS = _names("aten.", "div.Tensor")

FIRST_LINEAR = _names(
    "aten.",
    "gelu_backward.default silu_backward.default tanh_backward.default sigmoid_backward.default "
    "threshold_backward.default hardtanh_backward.default leaky_relu_backward.default elu_backward.default "
    "softplus_backward.default hardswish_backward.default hardsigmoid_backward.default "
    "mish_backward.default logit_backward.default native_dropout_backward.default "
    "log_sigmoid_backward.default softshrink_backward.default hardshrink_backward.default",
)
"""Element by element, and linear in the first operand: gradients of functions of one number."""

POINTWISE = (
    COPIES
    | SCALED
    | SUMS
    | PRODUCTS
    | QUOTIENTS
    | FIRST_LINEAR
    | _names(
        "aten.",
        "add.Scalar sub.Scalar rsub.Scalar fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar "
        "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar div.Tensor_mode div.Scalar_mode lerp.Scalar "
        "lerp.Tensor floor_divide.default floor_divide.Scalar xlogy.Tensor",
    )
    | frozenset(
        f"aten.{name}.{kind}"
        for name in ("lt", "le", "gt", "ge", "eq", "ne", "bitwise_and", "bitwise_or", "bitwise_xor")
        for kind in ("Scalar", "Tensor")
    )
    | _names(
        "aten.",
        "exp.default exp2.default expm1.default log.default log2.default log10.default log1p.default "
        "sqrt.default rsqrt.default reciprocal.default square.default abs.default sign.default sgn.default "
        "sin.default cos.default tan.default asin.default acos.default atan.default sinh.default "
        "cosh.default tanh.default asinh.default acosh.default atanh.default atan2.default erf.default "
        "erfc.default erfinv.default floor.default ceil.default round.default trunc.default frac.default "
        "sigmoid.default relu.default gelu.default silu.default mish.default elu.default celu.default "
        "selu.default leaky_relu.default hardtanh.default hardswish.default hardsigmoid.default "
        "softplus.default softshrink.default hardshrink.default threshold.default logit.default "
        "relu6.default clamp.default clamp.Tensor clamp_min.default clamp_min.Tensor clamp_max.default "
        "clamp_max.Tensor maximum.default minimum.default fmax.default fmin.default hypot.default "
        "logaddexp.default logaddexp2.default copysign.Tensor nan_to_num.default isnan.default "
        "isinf.default isfinite.default bitwise_not.default logical_not.default logical_and.default "
        "logical_or.default logical_xor.default masked_fill.Scalar masked_fill.Tensor where.self "
        "where.ScalarSelf where.ScalarOther where.Scalar addcmul.default addcdiv.default sinc.default "
        "lgamma.default digamma.default deg2rad.default rad2deg.default signbit.default heaviside.default "
        "special_erfcx.default copy.default _conj.default real.default "
        "native_dropout.default bernoulli.p bernoulli.default rand_like.default randn_like.default "
        "mse_loss.default smooth_l1_loss.default huber_loss.default binary_cross_entropy.default "
        "log_sigmoid_forward.default isclose.default",
    )
)
"""Each element of a result depends on the elements at its place alone (with the usual broadcasting)."""

REDUCTION_SETTING = _names(
    "aten.", "mse_loss.default smooth_l1_loss.default huber_loss.default binary_cross_entropy.default"
)
"""Element by element only with reduction "none": their results show which it is."""

REDUCTIONS = _names(
    "aten.",
    "sum.dim_IntList sum.default mean.dim mean.default amax.default amin.default max.dim min.dim "
    "max.default min.default argmax.default argmin.default logsumexp.default prod.dim_int prod.default "
    "any.dim any.default any.dims all.dim all.default all.dims var.correction var_mean.correction "
    "std.correction linalg_vector_norm.default nansum.default median.dim mode.default kthvalue.default "
    "count_nonzero.dim_IntList norm.ScalarOpt_dim norm.Scalar nanmedian.dim",
)
"""Some dims, or all, are reduced. Those that are sums make addends from parts; others need the dim whole."""

ADDING = _names("aten.", "sum.dim_IntList sum.default nansum.default count_nonzero.dim_IntList")

LINEAR_REDUCTIONS = _names("aten.", "sum.dim_IntList sum.default mean.dim mean.default")

ALONG_ONE = {
    "aten._softmax.default": 1,
    "aten._log_softmax.default": 1,
    "aten._safe_softmax.default": 1,
    "aten._softmax_backward_data.default": 2,
    "aten._log_softmax_backward_data.default": 2,
    "aten.cumsum.default": 1,
    "aten.cumprod.default": 1,
    "aten.logcumsumexp.default": 1,
    "aten.cummax.default": 1,
    "aten.cummin.default": 1,
    "aten.sort.default": 1,
    "aten.sort.stable": 2,
    "aten.argsort.default": 1,
    "aten.glu.default": 1,
}
"""Position of the dim along which the op works: it must be whole; shapes stay, and all else is cut freely."""

LINEAR_ALONG_ONE = {
    "aten.cumsum.default": 0,
    "aten._softmax_backward_data.default": 0,
    "aten._log_softmax_backward_data.default": 0,
}
"""Which of them are linear, and in which operand."""

ATTENTION = _names(
    "aten._scaled_dot_product_",
    "flash_attention_for_cpu.default flash_attention.default efficient_attention.default "
    "cudnn_attention.default fused_attention_overrideable.default",
)
ATTENTION_BACKWARD = _names(
    "aten._scaled_dot_product_",
    "flash_attention_for_cpu_backward.default flash_attention_backward.default "
    "efficient_attention_backward.default cudnn_attention_backward.default "
    "fused_attention_overrideable_backward.default",
)
