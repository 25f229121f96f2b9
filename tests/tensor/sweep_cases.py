"""The ops that the sweep over placements tries: what users write in models and losses, and what depends on
where along a dim an element is. Each is a function of the tensors beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def ranged(*shape: int, phase: float = 0.0) -> torch.Tensor:
    """Values that differ, within (-1, 1)."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * 1.3 + phase).reshape(shape)


def into(write: Callable[..., Any]) -> Callable[..., Any]:
    """A write into a new tensor, and that tensor."""

    def written(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        made = x * 1
        write(made, *others)
        return made

    return written


def cases(n: int, m: int) -> dict[str, Case]:
    """Ops by name. n, m: sizes of the two dims that most tensors have, at least 4."""
    x, y = ranged(n, m), ranged(n, m, phase=0.4)
    positive = x.abs() + 0.1
    w, v, cube = ranged(m, 3, phase=1.0), ranged(m, phase=2.0), ranged(4, n, m)
    ids = torch.arange(n) * 3 % m  # labels: one a row
    ignoring = torch.where(torch.arange(n) % 3 == 1, -100, ids)
    weights = torch.linspace(0.2, 1.4, m, dtype=torch.float64)
    rows = torch.tensor([0, 2, 2])
    columns = torch.arange(n * m).reshape(n, m) * 5 % m
    up = torch.arange(n * m).reshape(n, m) * 3 % n
    mask = x > 0.2
    share = torch.softmax(y, 1)
    signs = torch.where(x > 0, 1.0, -1.0).double()
    sides = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).double()
    q, k, u = (ranged(4, 2, n, 4, phase=p) for p in (0.0, 1.0, 2.0))
    image, kernel, bias = ranged(4, 4, n + 1), ranged(3, 4, 3, phase=1.0), ranged(3)
    picture = ranged(4, 2, 5, 6)
    square = ranged(4, n, n) + 3 * torch.eye(n, dtype=torch.float64)
    return {
        # Losses.
        "cross_entropy": (F.cross_entropy, (x, ids)),
        "cross_entropy ignored": (F.cross_entropy, (x, ignoring)),
        "cross_entropy weights": (
            lambda x, t, w: F.cross_entropy(x, t, weight=w.detach()),
            (x, ignoring, weights)),
        "cross_entropy sum": (lambda x, t: F.cross_entropy(x, t, reduction="sum"), (x, ignoring)),
        "cross_entropy none": (lambda x, t: F.cross_entropy(x, t, reduction="none"), (x, ignoring)),
        "cross_entropy smoothed": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (x, ignoring)),
        "cross_entropy 2-d": (F.cross_entropy, (cube.transpose(1, 2).contiguous(), up[:4, :n] % m)
            if n <= m else (cube[:, :, :4].transpose(1, 2).contiguous(), torch.ones(4, n).long())),
        "cross_entropy shares": (F.cross_entropy, (x, share)),
        "nll_loss": (lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), (x, ignoring)),
        "mse_loss": (F.mse_loss, (x, y)),
        "mse_loss sum": (lambda x, y: F.mse_loss(x, y, reduction="sum"), (x, y)),
        "mse_loss none": (lambda x, y: F.mse_loss(x, y, reduction="none"), (x, y)),
        "l1_loss": (F.l1_loss, (x, y)),
        "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.3), (x, y)),
        "huber_loss": (lambda x, y: F.huber_loss(x, y, delta=0.3), (x, y)),
        "soft_margin_loss": (lambda x, y: F.soft_margin_loss(x, y.detach()), (x, signs)),
        "binary_cross_entropy": (lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), y), (x, share)),
        "with_logits": (F.binary_cross_entropy_with_logits, (x, share)),
        "with_logits weights": (
            lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w.detach()),
            (x, share, weights)),
        "kl_div": (lambda x, y: F.kl_div(F.log_softmax(x, 1), y, reduction="batchmean"), (x, share)),
        "kl_div mean": (lambda x, y: F.kl_div(F.log_softmax(x, 1), y, reduction="mean"), (x, share)),
        "cosine_embedding_loss": (F.cosine_embedding_loss, (x, y, sides.long())),
        "triplet_margin_loss": (F.triplet_margin_loss, (x, y, x.flip(0))),
        "multi_margin_loss": (F.multi_margin_loss, (x, ids)),
        # What depends on the place along a dim.
        **{f"{op.__name__} {dim}": (lambda x, op=op, dim=dim: op(x, dim), (x,))
            for op in (torch.cumsum, torch.cumprod, torch.logcumsumexp) for dim in (0, 1)},
        "cummax": (lambda x: torch.cummax(x, 0)[0], (x,)),
        "cummin": (lambda x: torch.cummin(x, 0)[0], (x,)),
        "flip": (lambda x: x.flip(0), (x,)),
        "roll": (lambda x: x.roll(2, 0), (x,)),
        "sort": (lambda x: x.sort(0), (x,)),
        "argsort": (lambda x: x.argsort(0), (x,)),
        "topk": (lambda x: x.topk(2, 0), (x,)),
        "kthvalue": (lambda x: x.kthvalue(2, 0), (x,)),
        "median": (lambda x: x.median(0), (x,)),
        "mode": (lambda x: x.mode(0)[0], (x,)),
        "quantile": (lambda x: x.quantile(0.3, 0), (x,)),
        "tril": (torch.tril, (x,)),
        "triu": (lambda x: torch.triu(x, 1), (x,)),
        "diagonal": (lambda x: x.diagonal(), (x,)),
        "argmax": (lambda x: x.argmax(0), (x,)),
        "argmin all": (lambda x: x.argmin(), (x,)),
        "max": (lambda x: x.max(0), (x,)),
        "min all": (lambda x: x.min(), (x,)),
        "searchsorted": (torch.searchsorted, (x.sort(1)[0], y)),
        "unfold": (lambda x: x.unfold(0, 3, 1), (x,)),
        "renorm": (lambda x: x.renorm(2, 0, 0.5), (x,)),
        # Indices.
        "index_select": (lambda x, i: x.index_select(0, i), (x, rows)),
        "index": (lambda x, i: x[i], (x, rows)),
        "index rows and columns": (lambda x, i: x[i, i + 1], (x, rows)),
        "index columns": (lambda x, i: x[:, i], (x, rows)),
        "index between": (lambda c, i: c[:, i, i], (cube, rows)),
        "index apart": (lambda c, i: c[i, :, i], (cube, rows)),
        "index by a matrix": (lambda c, i: c[:, i.unsqueeze(0) + i.unsqueeze(1)], (cube, rows)),
        "index of columns assigned": (into(lambda x, y: x.__setitem__((slice(None), rows[:2]), y)),
            (x, y[:, :2].clone())),
        "index_put broadcast": (into(lambda c, v: c.index_put_((rows[:2],), v)), (cube, v)),
        "max_pool2d": (lambda x: F.max_pool2d(x, 2), (picture,)),
        "gather": (lambda x, i: x.gather(1, i), (x, columns)),
        "gather 0": (lambda x, i: x.gather(0, i), (x, up)),
        "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), (x, columns)),
        "scatter": (lambda x, i, y: x.scatter(0, i, y), (x, up[:3].contiguous(), y[:3].clone())),
        "scatter_add": (lambda x, i, y: x.scatter_add(0, i, y), (x, up, y)),
        "scatter_reduce": (lambda x, i, y: x.scatter_reduce(0, i, y, "amax"), (x, up, y)),
        "index_add": (lambda x, y: x.index_add(0, rows, y), (x, y[:3].clone())),
        "index_copy": (lambda x, y: x.index_copy(0, rows[:2], y), (x, y[:2].clone())),
        "index_fill": (lambda x: x.index_fill(0, rows, 3.0), (x,)),
        "index_put": (lambda x, y: x.index_put((rows,), y, accumulate=True), (x, y[:3].clone())),
        "masked_scatter": (lambda x, b, y: x.masked_scatter(b, y), (x, mask, y)),
        "embedding": (F.embedding, (ids, w)),
        "embedding padding": (lambda i, w: F.embedding(i, w, padding_idx=0), (ids, w)),
        "embedding by frequency": (lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), (ids, w)),
        "embedding twice": (lambda i, j, w: F.embedding(i, w) * F.embedding(j, w), (ids, ids.flip(0), w)),
        "one_hot": (lambda i: F.one_hot(i, 9), (ids,)),
        "slice": (lambda x: x[1:-1], (x,)),
        "slice steps": (lambda x: x[::2, 1:], (x,)),
        "select": (lambda x: x[2], (x,)),
        "split": (lambda x: x.split(2), (x,)),
        "unbind": (lambda x: x.unbind(0), (x,)),
        # Writes.
        "index_add_": (into(lambda x, y: x.index_add_(0, rows, y)), (x, y[:3].clone())),
        "index_copy_": (into(lambda x, y: x.index_copy_(0, rows[:2], y)), (x, y[:2].clone())),
        "index_fill_": (into(lambda x: x.index_fill_(0, rows, 3.0)), (x,)),
        "index_put_": (into(lambda x, y: x.index_put_((rows,), y, True)), (x, y[:3].clone())),
        "index assigned": (into(lambda x, y: x.__setitem__(rows[:2], y)), (x, y[:2].clone())),
        "scatter_": (into(lambda x, i: x.scatter_(1, i[:, :1], 2.0)), (x, columns)),
        "scatter_add_": (into(lambda x, i, y: x.scatter_add_(0, i, y)), (x, up, y)),
        "masked_fill_": (into(lambda x, b: x.masked_fill_(b, 2.0)), (x, mask)),
        "masked_scatter_": (into(lambda x, b, y: x.masked_scatter_(b, y)), (x, mask, y)),
        "mask assigned": (into(lambda x, b: x.__setitem__(b, 2.0)), (x, mask)),
        "slice assigned": (into(lambda x: x.__setitem__(slice(1, 3), 2.0)), (x,)),
        "slice of columns assigned": (
            into(lambda x, v: x.__setitem__((..., slice(2, 4)), v)), (x, v[:2].clone())),
        "select assigned": (into(lambda x, v: x.__setitem__(1, v)), (x, v)),
        "slice added": (into(lambda x, y: x[1:3].add_(y)), (x, y[1:3].clone())),
        "copy_": (into(lambda x, y: x.copy_(y)), (x, y)),
        "add_": (into(lambda x, y: x.add_(y).mul_(2)), (x, y)),
        "fill_diagonal_": (into(lambda x: x.fill_diagonal_(1.0)), (x,)),
        "cumsum_": (into(lambda x: x.cumsum_(0)), (x,)),
        # Networks.
        "matmul": (torch.matmul, (x, w)),
        "matmul vector": (torch.matmul, (v, w)),
        "matmul batched": (torch.matmul, (cube, w)),
        "linear": (lambda x, w, b: F.linear(x, w.t(), b), (x, w, ranged(3))),
        "einsum": (lambda c, w: torch.einsum("bnm,mk->bkn", c, w), (cube, w)),
        "layer_norm": (lambda x, v: F.layer_norm(x, (m,), v, v), (x, v)),
        "rms_norm": (lambda x, v: F.rms_norm(x, (m,), v), (x, v)),
        "group_norm": (lambda x: F.group_norm(x, 2), (image,)),
        "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (x,)),
        "normalize": (lambda x: F.normalize(x, dim=0), (x,)),
        "softmax": (lambda x: x.softmax(0), (x,)),
        "log_softmax": (lambda x: x.log_softmax(1), (x,)),
        "gelu": (F.gelu, (x,)),
        "glu": (F.glu, (ranged(n, 4),)),
        "prelu": (F.prelu, (x, ranged(m))),
        "attention": (F.scaled_dot_product_attention, (q, k, u)),
        "attention causal": (
            lambda q, k, u: F.scaled_dot_product_attention(q, k, u, is_causal=True),
            (q, k, u)),
        "attention masked": (
            lambda q, k, u, b: F.scaled_dot_product_attention(q, k, u, attn_mask=b),
            (q, k, u, ranged(1, 1, n, n))),
        "attention fewer heads": (
            lambda q, k, u: F.scaled_dot_product_attention(q, k, u, enable_gqa=True),
            (ranged(4, 4, n, 4), k, u)),
        "conv1d": (F.conv1d, (image, kernel, bias)),
        "conv1d padded": (lambda x, w: F.conv1d(x, w, padding=1, stride=2), (image, kernel)),
        "conv1d groups": (lambda x, w: F.conv1d(x, w, groups=2), (image, ranged(4, 2, 3))),
        "conv2d": (F.conv2d, (picture, ranged(3, 2, 3, 3))),
        "conv_transpose1d": (F.conv_transpose1d, (image, ranged(4, 3, 3))),
        "max_pool1d": (lambda x: F.max_pool1d(x, 2), (image,)),
        "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (picture,)),
        "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), (picture,)),
        "interpolate": (lambda x: F.interpolate(x, scale_factor=2), (image,)),
        "pad": (lambda x: F.pad(x, (1, 1, 0, 2)), (x,)),
        "pad circular": (lambda x: F.pad(x, (1, 1), mode="circular"), (image,)),
        "dropout off": (lambda x: F.dropout(x, 0.5, training=False), (x,)),
        "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y, dim=0), (x, y)),
        "cdist": (torch.cdist, (x, y)),
        # Sums and shapes.
        **{f"{name} {dim}": (lambda x, name=name, dim=dim: getattr(x, name)(*dim), (positive,))
            for name in ("sum", "mean", "amax", "prod", "var", "std", "logsumexp", "norm")
            for dim in ((), (0,), (1,)) if not (name in ("logsumexp", "amax") and not dim)
            if not (name == "norm" and dim)},
        "vector norm": (lambda x: torch.linalg.vector_norm(x, dim=0), (x,)),
        "var of all, biased": (lambda x: x.var(unbiased=False), (x,)),
        "any, all": (lambda b: (b.any(0), b.all(), b.count_nonzero(0)), (mask,)),
        "cat": (lambda x, y: torch.cat([x, y]), (x, y)),
        "stack": (lambda x, y: torch.stack([x, y], 1), (x, y)),
        "reshape": (lambda x: x.reshape(-1), (x,)),
        "reshape to three": (lambda c: c.reshape(2, 2, -1), (cube,)),
        "view": (lambda c: c.view(4 * n, m), (cube,)),
        "permute": (lambda c: c.permute(2, 0, 1), (cube,)),
        "expand": (lambda v: v.expand(3, m), (v,)),
        "repeat": (lambda x: x.repeat(2, 1), (x,)),
        "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), (x,)),
        "narrow": (lambda x: x.narrow(0, 1, 2), (x,)),
        "as_strided": (lambda x: x.as_strided((2, 3), (1, 2)), (x,)),
        "where": (torch.where, (mask, x, y)),
        "lerp, clamp": (lambda x, y: x.lerp(y, 0.3).clamp(-0.5, 0.5), (x, y)),
        "addcmul, addcdiv": (
            lambda x, y, z: torch.addcdiv(x, y, z) + torch.addcmul(x, y, z), (x, y, positive)),
        "broadcast": (lambda x, v: x * v + v / (x.abs() + 1), (x, v)),
        "powers": (lambda x: x**3 + 2**x + x.exp().log1p().sqrt(), (x,)),
        "casts": (lambda x: x.float().double() + x.int(), (x,)),
        "likes": (lambda x: torch.ones_like(x) + x.new_full((n, m), 2.0) + torch.zeros_like(x) + x, (x,)),
        "maximum": (torch.maximum, (x, y)),
        # Matrices.
        "inverse": (torch.linalg.inv, (square,)),
        "solve": (lambda a, b: torch.linalg.solve(a, b), (square, ranged(4, n, 2))),
        "cholesky": (lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(n).double()), (square,)),
        "det": (torch.linalg.det, (square,)),
        "trace": (torch.trace, (x,)),
        "fft": (lambda x: torch.fft.rfft(x, dim=0).abs(), (x,)),
        "baddbmm": (torch.baddbmm, (square, cube, cube.mT.contiguous())),
        "cov": (torch.cov, (x,)),
    }  # fmt: skip


LOSE_A_WRITE = (
    "slice assigned",
    "slice of columns assigned",
    "select assigned",
    "slice added",
    "fill_diagonal_",
)
"""What is refused along a sharded dim."""
