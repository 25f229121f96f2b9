"""Split logits behave as the plain tensor in whatever code does with them: views, writes in place, functions.

Every snippet is code of a user's on logits `x` and targets `t`; its value and all gradients are those of the
plain model, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError
from stretto.parallelize.split_logits import SplitLogits
from tests.parallelize.test_vocabulary import PLAN, VOCAB, Head, check, tokens_of


def of(x: Any, t: Tensor) -> Tensor:
    """The usual loss, on split logits in parts."""
    return F.cross_entropy(x.reshape(-1, VOCAB), t.reshape(-1))


class Doubled(torch.autograd.Function):
    """A function of a user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.by, None


def banned() -> Tensor:
    return torch.arange(VOCAB) >= 6


def noise() -> Tensor:
    return torch.arange(float(VOCAB), dtype=torch.float64).cos()


# Each is a body; what it leaves in `x` goes on to the loss, unless it leaves a `loss`.
WRITES = """
x.div_(2.0)
x /= 2.0
x *= 3
x += noise()
x -= 1.5
x **= 2
x.add_(noise(), alpha=0.5)
x.neg_().mul_(0.5)
torch.Tensor.mul(2 * x, 3); torch.Tensor.sub_(x, noise())
x.masked_fill_(banned(), -3.0)
x[..., 6:] = -3.0
x[:, 1] = 0.25
x[0] *= 2
x[:, :, 2] += 1
x[x > 0.1] = 0.5
x[:, 1:, 3] = x[:, :-1, 2]
x[0, 1, 2] = x[1, 1, 1] * 2
x[..., 6:].fill_(-3.0)
x[:, 1:].mul_(2.0)
x[:, 1:].add_(noise())
x.clamp_(-0.5, 0.5)
x.copy_(x * noise())
x.zero_(); x.add_(noise()); x = x + logits.detach()
F.relu(x, inplace=True)
x = F.relu(x, inplace=True) * 2
x = F.leaky_relu_(x, 0.3)
torch.relu_(x)
torch.nn.ReLU(inplace=True)(x)
F.dropout(x, 0.0, inplace=True)
x.tanh_()
torch.exp_(x)
x.index_fill_(-1, torch.tensor([1, 2], device=x.device), -3.0)
x.scatter_(-1, t.unsqueeze(-1), 0.5)
x.scatter_add_(-1, t.unsqueeze(-1), x[..., :1])
x.index_add_(1, torch.tensor([0, 2], device=x.device), x[:, :2] * 2)
x.transpose(1, 2).mul_(2.0)
x.transpose(1, 2)[:, 3:] = 0.5
x.mT[:, 3:].neg_()
x.select(-1, 2).mul_(3.0)
x.narrow(1, 0, 2).mul_(3.0)
y = x.chunk(2, -1)[1]; x = x.mul_(3.0) + y.shape[-1]
x.unbind(-1); x.mul_(2.0)
y = x.view(-1, VOCAB); y.mul_(2.0)
y = x.view(-1, VOCAB); y.add_(noise())
y = x.view(-1, VOCAB); x.add_(noise()); x = y
y = x.view(-1, VOCAB); x.mul_(2.0); x = y
y = x.reshape(-1, VOCAB); y[..., 6:] = -3.0
y = x.flatten(0, 1); y[2:] = 0.5
y = x[:, 1:].reshape(-1, VOCAB); y.mul_(5.0)
y = x[:, 1:].contiguous(); y.mul_(5.0)
y = x.contiguous(); y.mul_(5.0)
y = x.to(x.dtype); y.add_(noise())
y = x.double(); y.add_(noise())
y = x.clone(); y.add_(noise()); x = x * 2 + y
y = x * 1.0; y.add_(noise()); y.mul_(2.0)
y = x[..., 3]; x.mul_(2.0); loss = y.square().mean() + of(x, t)
y = x.transpose(1, 2); x.mul_(2.0); loss = y[:, 1].square().mean() + of(x, t)
y = x.transpose(1, 2); x[0] = 0.5; loss = y[:, 1].square().mean() + of(x, t)
y = x.permute(2, 0, 1); y[3:] = 0.5; x = x.mul_(2.0)
y = x.full() if hasattr(x, "full") else x; y[..., 6:] = -3.0
for k in range(len(x)): x[k].mul_(1.5)
for k in range(len(x)): x[k][..., 6:] = -3.0
for k in (1, 7): x.view(-1, VOCAB)[k] /= 2
x = x.mul_(2.0) + [row for row in x][0]
x.unsqueeze_(0); x = x[0] * 2
x.transpose_(1, 2); x = x.transpose(1, 2)
x.squeeze_(0).t_() if x.shape[0] == 1 else x.swapaxes_(0, 1).mul_(2.0); x = x.swapaxes(0, 1)
x.detach().mul_(1.0); x = x * 2
with torch.no_grad(): x[..., 6:] = -3.0
with torch.no_grad(): x.div_(2.0)
with torch.no_grad(): torch.add(x, noise(), out=x)
with torch.no_grad(): torch.mul(x, 2.0, out=x)
with torch.no_grad(): x.masked_fill_(banned(), -3.0); x.mul_(2.0)
y = torch.zeros(x.shape, dtype=x.dtype, device=x.device); y[:, 1:] = x[:, 1:]; x = y
y = torch.zeros_like(x); y.copy_(x); x = y
y = torch.empty_like(x).fill_(0.5); y += x; x = y
x.add_(x)
x.addcmul_(logits.detach(), logits, value=0.5)
x.lerp_(x * 2, 0.3)
torch.nn.init.zeros_(x); x = x + logits.clone()
x, _ = x, x.mul_(2.0)
x.register_hook(lambda g: g * 2); x.mul_(1.0)
x.retain_grad(); x = x * 2
x.requires_grad_(); x.requires_grad_(True); x.div_(2)
x.squeeze(0).mul_(2.0); x.unsqueeze(1)[:, 0, 1].add_(1.0)
x.view(x.shape).mul_(2)
y = x.as_strided(x.size(), x.stride()); x.mul_(2); x = x + y
x.diagonal(dim1=0, dim2=1).mul_(2)
x.expand(-1, -1, -1).mul_(2)
x.view_as(x).mul_(2)
x.unflatten(-1, (2, 4)).mul_(2)
"""

USES = """
x = torch.cat([x, 2 * x], dim=1)[:, :5]
x = torch.cat((x, x), -1)[..., 1:VOCAB + 1]
loss = torch.stack((x, -x)).logsumexp(-1).mean()
loss = torch.stack([row for row in x]).square().mean()
loss = sum(row.square().mean() * k for k, row in enumerate(x))
a, b = x; loss = of(a, t[0]) + of(b, t[1]) * 2
loss = torch.einsum("bsv,bsv->bs", x, x).mean()
loss = torch.einsum("bsv,v->bs", [x, noise()]).square().mean()
x = torch.where(banned(), torch.full_like(x, -3.0), x)
x = torch.where(x > 0, x, 0.1 * x)
x = x ** 2
x = 2.0 ** x
x = x.detach() // 1 + x % 1
x = 1 / (x + 3)
x = x - logits
x = abs(x)
x = -x
x = +x
x = x.T.mT.mT.T if x.dim() == 2 else x.mT.mT
x = x @ torch.eye(VOCAB, dtype=x.dtype, device=x.device)
x = noise() * x
x = x.add(noise(), alpha=2)
x = torch.mul(x, 2)
x = torch.div(x, 2)
x = torch.tanh(x / 2) * 2
x = x.float().double()
x = x[:, torch.arange(5, device=x.device)]
x = x[None][0]
x = x[:, ::2].repeat_interleave(2, 1)[:, :5]
x = x[..., [7, 6, 5, 4, 3, 2, 1, 0]]
x = x[-1:].expand(2, -1, -1)
x = x[(slice(None), slice(1, None))]; t = t[:, 1:]
x = x.detach() + 2 * x
x = x.data * x
x = x - x.max(-1, keepdim=True).values
x = x.clamp(max=0.2)
x = x.masked_fill(banned(), -3.0)
x = F.pad(x, (0, 0, 1, 0))[:, :-1]
x = torch.nn.functional.layer_norm(x, x.shape[-1:])
x = x / x.shape[-1] ** 0.5 + x.numel() + x.size(-1) + x.dim() + len(x) + x.ndim
x = x if x is not None and x.requires_grad and x.is_floating_point() else x * 2
x = x * 2 if isinstance(x, torch.Tensor) and torch.is_tensor(x) else x
x = x * 2 if x.grad_fn is not None and not x.is_leaf else x
x = Doubled.apply(x, 2.0)
x = Doubled.apply(x[:, 1:], 2.0); t = t[:, 1:]
x = torch.utils.checkpoint.checkpoint(lambda y: y.sin() + y, x, use_reentrant=False)
x = torch.ops.aten.mul.Tensor(x, 2.0)
x = torch.func.functional_call(nn.Identity(), {}, (x,)) * 2
x = max([x], key=lambda y: y.shape[-1]) * 2
y = {"logits": [x, (x,)]}; x = y["logits"][1][0] * 2
with torch.no_grad(): w = x.softmax(-1)
y = torch.no_grad()(lambda: x[:, 1:])(); x = x[:, 1:] * y; t = t[:, 1:]
with torch.no_grad(): right = (x.argmax(-1) == t).double(); w = right.mean()
with torch.no_grad(): w = x.logsumexp(-1).mean()
loss = of(x, t) + 0.1 * x.logsumexp(-1).square().mean()
loss = of(x, t) * F.nll_loss(F.log_softmax(x.view(-1, VOCAB), -1), t.view(-1))
loss = F.mse_loss(x, torch.zeros_like(x)) + F.kl_div(x.log_softmax(-1), x.softmax(-1).detach())
loss = F.cross_entropy(input=x.view(-1, VOCAB), target=t.view(-1))
loss = F.cross_entropy(torch.cat([x, x]).view(-1, VOCAB), torch.cat([t, t]).view(-1))
loss = nn.CrossEntropyLoss(label_smoothing=0.1)(x.flatten(0, 1), t.flatten())
loss = F.cross_entropy(x.flatten(0, 1), x.detach().softmax(-1).flatten(0, 1))
loss = x.topk(3).values.square().mean()
loss = x.sum() * 0.1 + (x * x).mean()
loss = torch.linalg.vector_norm(x, dim=-1).mean() + x.norm()
loss = x.view(2, 5, 2, 4).mean((0, 1, 3))[1] + x.reshape([-1])[3] + x.reshape(torch.Size([2, 40]))[1, 2]
loss = torch.stack(torch.unbind(x.flatten(0, 1))).pow(2).mean()
loss = torch.broadcast_tensors(x, noise())[0].square().mean()
loss = sum(y.mean() for y in torch.split(x, 3, dim=-1)) + torch.meshgrid(x[0, 0], noise())[0].mean()
"""


def snippets(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line]


def loss_of(snippet: str) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    code = compile(snippet, "snippet", "exec")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["tokens"])
        seen = {**globals(), "x": logits * 1.0, "logits": logits, "t": batch["targets"], "loss": None}
        exec(code, seen)
        found = seen["loss"]
        return of(seen["x"], seen["t"]) if found is None else found  # type: ignore[no-any-return]

    return loss


ALL = snippets(WRITES) + snippets(USES)
TOGETHER = 15
"""Snippets in one capture."""


@pytest.mark.parametrize("at", range(0, len(ALL) // 3, TOGETHER))
def test_code_on_split_logits_gives_the_plain_numbers(at: int) -> None:
    """Every third snippet, several in one capture; alone where that fails."""
    some = ALL[::3][at : at + TOGETHER]
    losses = [loss_of(snippet) for snippet in some]

    def together(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.stack([(k + 1) * loss(model, batch) for k, loss in enumerate(losses)]).mean()

    try:
        check(Head().double(), together, 2)
    except Exception as error:
        for snippet, loss in zip(some, losses, strict=True):
            try:
                check(Head().double(), loss, 2)
            except Exception as alone:
                raise AssertionError(f"{snippet}: {alone}") from error
        raise


@pytest.mark.slow
@pytest.mark.parametrize("snippet", ALL)
def test_the_same_alone_with_two_columns_a_rank(snippet: str) -> None:
    check(Head().double(), loss_of(snippet), VOCAB // 2)


@pytest.mark.parametrize(
    "snippet", ["x[..., 6:] = -3.0", "y = x.view(-1, VOCAB); y.mul_(2.0)", "x = x[:, 1:] * 2"]
)
def test_one_column_a_rank(snippet: str) -> None:
    code = snippet + "; loss = of(x, t[:, : x.shape[1]])"
    check(Head().double(), loss_of(code), VOCAB)


def test_what_cannot_be_done_is_refused() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = model(batch["tokens"])
        x.data = x * 2
        return of(x, batch["targets"])

    batch = {"tokens": tokens_of(1), "targets": tokens_of(2)}
    with pytest.raises(CaptureError, match="their data cannot be exchanged: write"):
        capture(Head(), batch, loss, Parallel(tp=2), tp_plan=PLAN)


def test_writes_by_numbers_need_no_gathered_logits() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = model(batch["tokens"])
        x /= 2
        x[:, 1:].mul_(3)
        return of(x, batch["targets"])

    batch = {"tokens": tokens_of(1), "targets": tokens_of(2)}
    job = capture(Head(), batch, loss, Parallel(tp=2), tp_plan=PLAN)
    gathered = [
        op.collective for ops in job.stages[0].ops.values() for op in ops if op.collective is not None
    ]
    assert all(c.nbytes < 2 * 5 * VOCAB * 4 for c in gathered if c.kind == "all_gather")


def test_split_logits_are_tensors_without_elements() -> None:
    part = torch.randn(2, 3)
    split = SplitLogits(part, "tp", 2)
    assert isinstance(split, Tensor)
    assert (split.shape, split.dtype) == ((2, 6), part.dtype)
    with pytest.raises(ValueError, match="gets logits that are sharded over tensor-parallel ranks"):
        _past_torch_function(split)


def _past_torch_function(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x + 1


def test_functions_are_themselves_again_after_capture() -> None:
    own = torch.autograd.Function.__dict__["apply"]
    check(Head().double(), loss_of("x = Doubled.apply(x, 2.0)"), 2)
    assert torch.autograd.Function.__dict__["apply"] is own
