"""Cross-entropy of logits whose vocabulary is sharded, in one collective.

1. Of a log-softmax, the likelihood that alone reads it, and the gradients of both, one loss is found.
2. Each rank finds three numbers for a token: the highest logit of its part, the sum of exponentials below
   that, and the target's logit. One gather carries them; sums below different maxima are put together as
   in Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
3. The gradient needs no collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.program import VIEW, Arg, Const, Op, Ref, TensorSpec
from stretto.passes.layout.emit import GATHER, Emitter
from stretto.passes.layout.lookups import outside, own_rows

LOG_SOFTMAX, NLL = "aten._log_softmax.default", "aten.nll_loss_forward.default"
NLL_BACKWARD = "aten.nll_loss_backward.default"
LOG_SOFTMAX_BACKWARD = "aten._log_softmax_backward_data.default"
NONE, MEAN = 0, 1
"""How PyTorch numbers reductions."""


@dataclass(slots=True)
class TokenLoss:
    """The ops of one loss; nll_grad, logits_grad: of the backward, None in an evaluation. is_split: whether
    ranks have columns of the logits. Names of values that the gradient needs come with the forward."""

    log_softmax: Op
    nll: Op
    nll_grad: Op | None
    logits_grad: Op | None
    is_split: bool = False
    exps: str = ""
    factor: str = ""
    own: str = ""
    elsewhere: str = ""
    ignored: str = ""
    total: str = ""

    @property
    def logits(self) -> str:
        return self.log_softmax.args[0].name  # type: ignore[no-any-return]

    @property
    def target(self) -> str:
        return self.nll.args[1].name  # type: ignore[no-any-return]

    def forward(self, out: Emitter, logits: str, target: str) -> tuple[str, str]:
        """Step 2: the loss, and how many tokens it counts. logits: a rank's columns."""
        start = self.nll.name

        def op(what: str, name: str, *args: Arg, **kwargs: Arg) -> str:
            return out.emit(f"aten.{name}", *args, name=f"{start}_{what}", kwargs=kwargs)

        def ref(x: str) -> Ref:
            return Ref(x)

        rows, part = out.specs[logits].shape
        dtype = out.specs[logits].dtype
        highest = op("highest", "amax.default", ref(logits), (1,))
        # A rank whose part is all -inf (a padded vocabulary) adds nothing, and not NaN.
        empty = op("empty", "eq.Scalar", ref(highest), -math.inf)
        base = op("base", "masked_fill.Scalar", ref(highest), ref(empty), 0.0)
        below = op("below", "sub.Tensor", ref(logits), ref(op("column", "unsqueeze.default", ref(base), 1)))
        self.exps = op("exps", "exp.default", ref(below))
        self.own, self.elsewhere = own_rows(out, target, part)
        column = op("place", "unsqueeze.default", ref(self.own), 1)
        picked = op("found", "gather.default", ref(logits), 1, ref(column))
        picked = op("row", "squeeze.dim", ref(picked), 1)
        picked = op("picked", "masked_fill.Scalar", ref(picked), ref(self.elsewhere), 0.0)
        summed = op("summed", "sum.dim_IntList", ref(self.exps), (1,))
        mine = op("mine", "stack.default", (ref(highest), ref(summed), ref(picked)))
        every = out.emit(GATHER, ref(mine), 0, 1, out.axis, out.size, name=f"{start}_numbers")
        every = out.emit(VIEW, ref(every), (out.size, 3, rows), name=f"{start}_of_ranks")
        tops, sums, hits = (op(f"number_{k}", "select.int", ref(every), 1, k) for k in range(3))
        top = op("top", "amax.default", ref(tops), (0,))
        scale = op("scale", "exp.default", ref(op("off", "sub.Tensor", ref(tops), ref(top))))
        scaled = op("scaled", "mul.Tensor", ref(scale), ref(sums))
        total = op("total", "sum.dim_IntList", ref(scaled), (0,))
        hit = op("hit", "sub.Tensor", ref(op("hits", "sum.dim_IntList", ref(hits), (0,))), ref(top))
        mine_off = op("own_scale", "exp.default", ref(op("own_off", "sub.Tensor", ref(highest), ref(top))))
        self.factor = op("factor", "div.Tensor", ref(mine_off), ref(total))
        self.ignored = op("ignored", "eq.Scalar", ref(target), self.nll.args[4])
        counts = op("counts", "bitwise_not.default", ref(self.ignored))
        unknown = op(
            "no_token", "bitwise_and.Tensor", ref(outside(out, target, part * out.size)), ref(counts)
        )
        each = op("loss", "sub.Tensor", ref(op("log", "log.default", ref(total))), ref(hit))
        each = op("counted", "masked_fill.Scalar", ref(each), ref(self.ignored), 0.0)
        # A target that is no token has no loss; where the full tensor is at hand, PyTorch refuses it.
        each = op("tokens", "masked_fill.Scalar", ref(each), ref(unknown), math.nan)
        number = op("number", "sum.default", ref(counts))
        self.total = op("count", "_to_copy.default", ref(number), dtype=Const("dtype", dtype))
        if self.nll.args[3] == NONE:
            return each, self.total
        result = op("sum", "sum.default", ref(each))
        if self.nll.args[3] == MEAN:
            result = op("mean", "div.Tensor", ref(result), ref(self.total))
        return result, self.total

    def backward(self, out: Emitter, grad: str, spec: TensorSpec) -> str:
        """Step 3: the gradient of a rank's columns. grad: of the loss; spec: of the target."""
        assert self.logits_grad is not None
        start = self.logits_grad.name

        def op(what: str, name: str, *args: Arg) -> str:
            return out.emit(f"aten.{name}", *args, name=f"{start}_{what}" if what else start)

        if self.nll.args[3] == MEAN:
            grad = op("mean", "div.Tensor", Ref(grad), Ref(self.total))
        if self.nll.args[3] != NONE:
            grad = op("each", "expand.default", Ref(grad), spec.shape)
        grad = op("counted", "masked_fill.Scalar", Ref(grad), Ref(self.ignored), 0.0)
        hit = op("hit", "masked_fill.Scalar", Ref(grad), Ref(self.elsewhere), 0.0)
        scale = op("scale", "mul.Tensor", Ref(grad), Ref(self.factor))
        column = op("column", "unsqueeze.default", Ref(scale), 1)
        soft = op("soft", "mul.Tensor", Ref(self.exps), Ref(column))
        place = op("place", "unsqueeze.default", Ref(self.own), 1)
        source = op("source", "unsqueeze.default", Ref(op("less", "neg.default", Ref(hit))), 1)
        return op("", "scatter_add.default", Ref(soft), 1, Ref(place), Ref(source))


def token_losses(ops: Iterable[Op], uses: Mapping[str, Sequence[Op]]) -> dict[str, TokenLoss]:
    """Step 1. uses: value -> the ops that read it. Returns each loss by the names of its ops."""
    found = (_token_loss(op, uses) for op in ops if op.target == LOG_SOFTMAX)
    return {
        part.name: loss
        for loss in found
        if loss is not None
        for part in (loss.log_softmax, loss.nll, loss.nll_grad, loss.logits_grad)
        if part is not None
    }


def _token_loss(op: Op, uses: Mapping[str, Sequence[Op]]) -> TokenLoss | None:
    made = op.outputs[0]
    if made is None or len(made.shape) != 2 or op.args[1] % 2 != 1 or op.args[2]:
        return None
    by_target: dict[str, list[Op]] = {}
    for user in uses.get(op.name, ()):
        by_target.setdefault(user.target, []).append(user)
    nll, *more = by_target.pop(NLL, [None])
    nll_backward, *others = by_target.pop(NLL_BACKWARD, [None])
    backward, *rest = by_target.pop(LOG_SOFTMAX_BACKWARD, [None])
    if nll is None or more or others or rest or by_target or nll.args[2] is not None:
        return None
    if (nll_backward is None) != (backward is None):
        return None
    if nll_backward is not None and backward is not None:
        alike = nll_backward.args[2:6] == nll.args[1:5]
        alone = [user.name for user in uses.get(nll_backward.name, ())] == [backward.name]
        if not alike or not alone or backward.args[1] != Ref(op.name) or backward.outputs[0] is None:
            return None
        if backward.outputs[0].dtype != made.dtype:
            return None
    return TokenLoss(op, nll, nll_backward, backward)
