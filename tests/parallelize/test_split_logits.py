"""Split logits behave as the plain tensor in whatever code does with them: views, writes in place, functions.

Every snippet is code of a user's on logits `x` and targets `t`; its value and all gradients are those of the
plain model, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.verifying import verify
from tests.parallelize.equality import step
from tests.runtime.equality import lowered, plain

ROWS, TOKENS, HIDDEN, VOCAB = 2, 5, 4, 8
PLAN = {"embedding": "vocabulary", "head": "vocabulary"}


class Head(nn.Module):
    """An embedding and an output head."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCAB, HIDDEN, padding_idx=padding)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.embedding(tokens))


def on_logits(loss: Callable[[Any, Tensor], Tensor]) -> Any:
    return lambda model, batch: loss(model(batch["tokens"]), batch["targets"])


def mean(logits: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits, targets))


def flat(logits: Any, targets: Tensor) -> tuple[Any, Tensor]:
    return logits.view(-1, VOCAB), targets.reshape(-1)


def divergences(logits: Any, targets: Tensor) -> Tensor:
    wanted = F.one_hot(targets, VOCAB).double().log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="none")


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": mean,
    "sum": lambda x, t: F.cross_entropy(*flat(x, t), reduction="sum"),
    "none": lambda x, t: F.cross_entropy(*flat(x, t), reduction="none").square().mean(),
    "ignored": lambda x, t: F.cross_entropy(*flat(x, t.masked_fill(t == 3, 2)), ignore_index=2),
    "shifted": lambda x, t: F.cross_entropy(*flat(x[..., :-1, :].contiguous(), t[:, 1:])),
    "scaled": lambda x, t: F.cross_entropy(*flat(2.0 * torch.tanh(x / 2.0), t)),
    # What parts cannot do is done on the full logits.
    "smoothed": lambda x, t: F.cross_entropy(*flat(x, t), label_smoothing=0.1),
    "weighted": lambda x, t: F.cross_entropy(*flat(x, t), weight=torch.arange(1.0, VOCAB + 1).double()),
    "probabilities": lambda x, t: F.cross_entropy(x.view(-1, VOCAB), F.one_hot(t.flatten(), VOCAB).double()),
    "by hand": lambda x, t: -x.log_softmax(-1).gather(-1, t.unsqueeze(-1)).mean(),
    "transposed": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "distilled": lambda x, t: divergences(x / 2, t).sum(-1).mean(),
    "mixed shape": lambda x, t: x.view(ROWS, TOKENS, 2, -1).square().mean(),
}


def tokens_of(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("weighted", "probabilities", "none") else name
        for name in LOSSES
    ],
)
def test_losses_on_split_logits(name: str, tp: int) -> None:
    check(Head().double(), on_logits(LOSSES[name]), tp)


def test_what_is_summed_over_the_vocabulary_and_then_averaged_is_proved() -> None:
    """The sum of a slice of columns is no slice of rows, though it could be one by its shape."""
    batch = {"tokens": tokens_of(1), "targets": tokens_of(2)}
    loss = on_logits(LOSSES["distilled"])
    verify(lowered(capture(Head().double(), batch, loss, Parallel(tp=2), tp_plan=PLAN), "1f1b"))


def test_the_padding_token_never_learns() -> None:
    grads = check(Head(padding=3).double(), on_logits(mean), 2)
    assert not grads["embedding.weight"][3].any()


@pytest.mark.parametrize("added", [-float("inf"), pytest.param(-1000.0, marks=pytest.mark.slow), 1000.0])
def test_parts_whose_logits_are_far_apart(added: float) -> None:
    """Each rank adds up below the maximum of its own part; one whose part is all -inf adds nothing."""
    model = Head().double()
    with torch.no_grad():
        model.head.bias[VOCAB // 2 :] += added

    check(model, on_logits(mean), 2, tokens_of(2) % (VOCAB // 2))


def check(model: nn.Module, loss: Any, tp: int, targets: Tensor | None = None) -> dict[str, Tensor]:
    batch = {"tokens": tokens_of(1), "targets": tokens_of(2) if targets is None else targets}
    expected = plain(copy.deepcopy(model), batch, loss)
    told, grads = step(capture(model, batch, loss, Parallel(tp=tp), tp_plan=PLAN), model, batch)
    assert torch.allclose(told, expected.loss, rtol=1e-12, atol=0)
    for parameter, want in expected.grads.items():
        assert want is not None
        assert torch.allclose(grads[parameter], want, rtol=1e-10, atol=1e-14), parameter
    return grads


def test_only_numbers_for_each_token_are_communicated() -> None:
    batch = {"tokens": tokens_of(1), "targets": tokens_of(2)}
    job = capture(Head(), batch, on_logits(mean), Parallel(tp=2), tp_plan=PLAN)
    found = [op.collective for ops in job.stages[0].ops.values() for op in ops if op.collective is not None]
    hidden, numbers = ROWS * TOKENS * HIDDEN * 4, 2 * 3 * ROWS * TOKENS * 4
    # Embedding; both ranks' three numbers a token; the gradient of the head's input, or of the table.
    assert len(found) == 3
    assert ("all_gather", numbers) in [(c.kind, c.nbytes) for c in found]
    assert sum(c.nbytes for c in found) <= numbers + 2 * hidden


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
x += noise()
x **= 2
x.masked_fill_(banned(), -3.0)
x[..., 6:] = -3.0
x[:, 1:, 3] = x[:, :-1, 2]
x[..., 6:].fill_(-3.0)
x.copy_(x * noise())
x.zero_(); x.add_(noise()); x = x + logits.detach()
x = F.relu(x, inplace=True) * 2
F.dropout(x, 0.0, inplace=True)
x.scatter_add_(-1, t.unsqueeze(-1), x[..., :1])
x.index_add_(1, torch.tensor([0, 2], device=x.device), x[:, :2] * 2)
x.narrow(1, 0, 2).mul_(3.0)
y = x.chunk(2, -1)[1]; x = x.mul_(3.0) + y.shape[-1]
y = x.view(-1, VOCAB); y.add_(noise())
y = x.reshape(-1, VOCAB); y[..., 6:] = -3.0
y = x.to(x.dtype); y.add_(noise())
y = x[..., 3]; x.mul_(2.0); loss = y.square().mean() + of(x, t)
y = x.permute(2, 0, 1); y[3:] = 0.5; x = x.mul_(2.0)
y = x.full() if hasattr(x, "full") else x; y[..., 6:] = -3.0
x = x.mul_(2.0) + [row for row in x][0]
x.squeeze_(0).t_() if x.shape[0] == 1 else x.swapaxes_(0, 1).mul_(2.0); x = x.swapaxes(0, 1)
with torch.no_grad(): x[..., 6:] = -3.0
with torch.no_grad(): x.masked_fill_(banned(), -3.0); x.mul_(2.0)
y = torch.zeros(x.shape, dtype=x.dtype, device=x.device); y[:, 1:] = x[:, 1:]; x = y
x.add_(x)
torch.nn.init.zeros_(x); x = x + logits.clone()
x, _ = x, x.mul_(2.0)
x.register_hook(lambda g: g * 2); x.mul_(1.0)
x.requires_grad_(); x.requires_grad_(True); x.div_(2)
y = x.as_strided(x.size(), x.stride()); x.mul_(2); x = x + y
x.unflatten(-1, (2, 4)).mul_(2)
"""

USES = """
x = torch.cat([x, 2 * x], dim=1)[:, :5]
x = torch.cat((x, x), -1)[..., 1:VOCAB + 1]
loss = torch.stack([row for row in x]).square().mean()
loss = sum(row.square().mean() * k for k, row in enumerate(x))
a, b = x; loss = of(a, t[0]) + of(b, t[1]) * 2
loss = torch.einsum("bsv,bsv->bs", x, x).mean()
loss = torch.einsum("bsv,v->bs", [x, noise()]).square().mean()
x = torch.where(banned(), torch.full_like(x, -3.0), x)
x = x.detach() // 1 + x % 1
x = x.T.mT.mT.T if x.dim() == 2 else x.mT.mT
x = x @ torch.eye(VOCAB, dtype=x.dtype, device=x.device)
x = x[:, torch.arange(5, device=x.device)]
x = x[:, ::2].repeat_interleave(2, 1)[:, :5]
x = x[(slice(None), slice(1, None))]; t = t[:, 1:]
x = x - x.max(-1, keepdim=True).values
x = F.pad(x, (0, 0, 1, 0))[:, :-1]
x = torch.nn.functional.layer_norm(x, x.shape[-1:])
x = x / x.shape[-1] ** 0.5 + x.numel() + x.size(-1) + x.dim() + len(x) + x.ndim
x = x if x is not None and x.requires_grad and x.is_floating_point() else x * 2
x = Doubled.apply(x[:, 1:], 2.0); t = t[:, 1:]
x = torch.utils.checkpoint.checkpoint(lambda y: y.sin() + y, x, use_reentrant=False)
x = torch.ops.aten.mul.Tensor(x, 2.0)
x = torch.func.functional_call(nn.Identity(), {}, (x,)) * 2
y = {"logits": [x, (x,)]}; x = y["logits"][1][0] * 2
y = torch.no_grad()(lambda: x[:, 1:])(); x = x[:, 1:] * y; t = t[:, 1:]
with torch.no_grad(): right = (x.argmax(-1) == t).double(); w = right.mean()
loss = of(x, t) + 0.1 * x.logsumexp(-1).square().mean()
loss = of(x, t) * F.nll_loss(F.log_softmax(x.view(-1, VOCAB), -1), t.view(-1))
loss = F.cross_entropy(torch.cat([x, x]).view(-1, VOCAB), torch.cat([t, t]).view(-1))
loss = nn.CrossEntropyLoss(label_smoothing=0.1)(x.flatten(0, 1), t.flatten())
loss = F.cross_entropy(x.flatten(0, 1), x.detach().softmax(-1).flatten(0, 1))
loss = torch.linalg.vector_norm(x, dim=-1).mean() + x.norm()
loss = x.view(2, 5, 2, 4).mean((0, 1, 3))[1] + x.reshape([-1])[3] + x.reshape(torch.Size([2, 40]))[1, 2]
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
TURNS = 6
"""Captures that have all snippets."""


@pytest.mark.parametrize("at", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, TURNS))])
def test_code_on_split_logits_gives_the_plain_numbers(at: int) -> None:
    """Several snippets in one capture, from all over the lists; alone where that fails."""
    some = ALL[at::TURNS]
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


@pytest.mark.parametrize(
    "snippet",
    [
        "x[..., 6:] = -3.0",
        *(
            pytest.param(snippet, marks=pytest.mark.slow)
            for snippet in ("y = x.view(-1, VOCAB); y.mul_(2.0)", "x = x[:, 1:] * 2")
        ),
    ],
)
def test_one_column_a_rank(snippet: str) -> None:
    code = snippet + "; loss = of(x, t[:, : x.shape[1]])"
    check(Head().double(), loss_of(code), VOCAB)


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
