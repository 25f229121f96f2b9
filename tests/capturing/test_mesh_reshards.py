"""Reshards between stages of several ranks, and ops on them: a captured step computes the plain model.

One process captures as one rank of a world of four; the plan's ranks then run as threads, each with a plain
copy of the model of which it takes its parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import stretto
from stretto.capturing import torch_adapter
from stretto.capturing.convert import convert
from stretto.errors import CaptureError
from stretto.ir.program import Job, Op, Ref
from stretto.runtime.local import run_threads
from stretto.runtime.rank_tensors import part_of
from tests.cells import slow
from tests.clusters import cores
from tests.tensor.lone import single_rank

F64 = torch.float64
ROWS, SIZE, MICROBATCHES = 16, 8, 4
COLUMNS, ROWWISE, FULL = [Shard(0)], [Shard(1)], [Replicate()]


class Pair(nn.Module):
    """Two matrices on each of two meshes, the first cut by columns and the second by rows.

    source: how the first mesh's result lies when it is resharded; target: how it arrives.
    """

    def __init__(self, meshes: list[DeviceMesh] | None, source: Placement, target: Placement) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(SIZE, SIZE, dtype=F64) for _ in range(4))
        self.norm = nn.LayerNorm(SIZE, dtype=F64)
        self.meshes, self.source, self.target = meshes, source, target
        if meshes is not None:
            first, second = meshes
            for up, down, mesh in ((self.a, self.b, first), (self.c, self.d, second)):
                stretto.shard(up, mesh, COLUMNS)
                down.weight = stretto.shard(down.weight, mesh, ROWWISE)
                down.bias = stretto.shard(down.bias, mesh, FULL)
            stretto.shard(self.norm, second, FULL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        if self.source != Shard(1):
            h = self.b(h) if not self.source.is_partial() else F.linear(h, self.b.weight)
        if self.source in (Replicate(), Shard(0)):
            h = self.reshard(h, 0, self.source)
        h = self.reshard(h, 1, self.target)
        h = self.d(torch.tanh(self.c(h)))
        return self.norm(h)  # type: ignore[no-any-return]

    def reshard(self, x: torch.Tensor, place: int, placement: Placement) -> torch.Tensor:
        return x if self.meshes is None else stretto.reshard(x, self.meshes[place], [placement])  # type: ignore[arg-type]


def batch() -> dict[str, torch.Tensor]:
    made = torch.sin(torch.arange(2 * ROWS * SIZE, dtype=F64)).reshape(2, ROWS, SIZE)
    return {"x": made[0], "y": made[1]}


def loss_of(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(given["x"]), given["y"])


def captured(
    make: Callable[[list[DeviceMesh]], nn.Module],
    rank: int = 0,
    given: dict[str, torch.Tensor] | None = None,
    loss: Callable[..., torch.Tensor] = loss_of,
    **changed: Any,
) -> Job:
    """The job of a model on the meshes of ranks 0, 1 and 2, 3, captured by one of them."""
    settings: dict[str, Any] = {"pp": 2, "tp": 2, "microbatches": MICROBATCHES, "schedule": "1f1b"}
    with single_rank(rank, 4):
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        parallel = stretto.Parallel(**(settings | changed))
        return stretto.capture(make(meshes), given or batch(), loss, parallel)


def assert_as_plain(
    job: Job,
    make: Callable[[], nn.Module],
    given: dict[str, torch.Tensor] | None = None,
    loss: Callable[..., torch.Tensor] = loss_of,
) -> None:
    """The plan's ranks, as threads, have the plain model's loss and their parts of its gradients."""
    given = given or batch()
    plan = stretto.plan(job, cluster=cores(), order="list")
    stretto.verify(plan)
    plain = make()
    expected = loss(plain, given)
    expected.backward()
    full = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    about = {parameter.name: parameter for parameter in job.parameters}

    def work(runner: stretto.Runner) -> int:
        torch.testing.assert_close(runner.step(given), expected.detach(), rtol=1e-10, atol=1e-10)
        found = list(runner.named_parameters())
        for name, parameter in found:
            if not parameter.requires_grad:
                assert parameter.grad is None
                continue
            part = part_of(full[name], about[name], job, runner.coordinates)
            assert parameter.grad is not None
            torch.testing.assert_close({name: parameter.grad}, {name: part}, rtol=1e-10, atol=1e-10)
        return len(found)

    models = [make() for _ in range(plan.world)]  # not in the threads, which share one generator
    counts = run_threads(plan, lambda rank: models[rank], work)
    frozen = sum(not parameter.requires_grad for parameter in plain.parameters())
    assert sum(counts[::2]) == sum(counts[1::2]) == len(full) + frozen


def collectives(job: Job, stage: int) -> list[str]:
    """The kinds of collectives in a stage's forward."""
    return [op.collective.kind for op in job.stages[stage].ops["F"] if op.collective is not None]


S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


@functools.cache
def pair(source: Placement, target: Placement, rank: int = 0) -> Job:
    return captured(lambda meshes: Pair(meshes, source, target), rank)


@pytest.mark.parametrize(
    ("source", "target", "schedule", "overlap"),
    [
        (R, R, "zb-h1", "off"),
        (P, S1, "1f1b", "window"),
        (S1, S0, "zb-h1", "window"),
        (S0, S0, "1f1b", "window"),
        (S1, P, "1f1b", "off"),
        slow(S1, R, "1f1b", "window"),
        slow(R, S1, "1f1b", "off"),
        slow(P, R, "zb-h1", "window"),
        slow(S0, S1, "1f1b", "off"),
    ],
)
def test_reshards(source: Placement, target: Placement, schedule: str, overlap: str) -> None:
    job = captured(lambda meshes: Pair(meshes, source, target), schedule=schedule, overlap=overlap)
    assert_as_plain(job, lambda: Pair(None, source, target))


def test_a_mean_square_over_parts() -> None:
    """The batch is cut in the loss, so that each rank has the mean over its part."""

    def loss(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        out, y = model(given["x"]), given["y"]
        assert isinstance(model, Pair)
        if model.meshes is not None:
            out = stretto.reshard(out, model.meshes[1], [Shard(0)])
            y = stretto.shard(y, model.meshes[1], [Shard(0)])
        return F.mse_loss(out, y)

    job = captured(lambda meshes: Pair(meshes, S1, R), loss=loss)
    assert_as_plain(job, lambda: Pair(None, S1, R), loss=loss)


def test_every_rank_captures_one_job() -> None:
    assert pair(P, R) == pair(P, R, rank=3)


def test_what_crosses_is_small() -> None:
    """A full tensor that is a sum crosses as shards; a shard is gathered where it arrives."""
    for source, before in ((P, ["reduce_scatter"]), (S1, [])):
        job = pair(source, R)
        assert [edge.spec.shape for edge in job.edges] == [(ROWS // MICROBATCHES, SIZE // 2)] * 2
        assert collectives(job, 0) == before
        assert collectives(job, 1)[0] == "all_gather"


def test_what_is_summed_for_the_forward_is_not_summed_again() -> None:
    """DTensor's norm keeps the partial sums, and reduces them a second time for its gradient."""
    counts = []
    for skip in ([], ["equal_collectives"]):
        job = captured(lambda meshes: Pair(meshes, S1, R), skip_passes=skip) if skip else pair(S1, R)
        ops = [op for stage in job.stages for phase in stage.ops.values() for op in phase]
        counts.append(sum(op.collective is not None and op.collective.kind == "all_reduce" for op in ops))
        assert_as_plain(job, lambda: Pair(None, S1, R))
    assert counts[0] == counts[1] - 1


@pytest.mark.slow
def test_the_ops_that_no_pass_takes_out() -> None:
    job = captured(lambda meshes: Pair(meshes, S1, R), skip_passes=["no_ops"])
    assert_as_plain(job, lambda: Pair(None, S1, R))


class Attention(nn.Module):
    """A table by rows, a sharded sequence and heads on the first mesh; an MLP by PyTorch's module styles on
    the second, with a buffer, and a parameter that is frozen."""

    scale: torch.Tensor

    def __init__(self, meshes: list[DeviceMesh] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(2 * SIZE, SIZE, dtype=F64), nn.LayerNorm(SIZE, dtype=F64)
        self.heads = nn.ModuleList(nn.Linear(SIZE, SIZE, dtype=F64) for _ in range(3))
        self.out = nn.Linear(SIZE, SIZE, bias=False, dtype=F64)
        up, down = (nn.Linear(SIZE, SIZE, dtype=F64) for _ in range(2))
        self.mlp = nn.Sequential(up, nn.GELU(), down)
        self.norm.bias.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, SIZE, dtype=F64))
        self.meshes = meshes
        if meshes is not None:
            for module, how in (
                (self.table, COLUMNS),
                (self.norm, FULL),
                (self.heads, COLUMNS),
                (self.out, ROWWISE),
            ):
                stretto.shard(module, meshes[0], how)
            self.scale = stretto.shard(self.scale, meshes[1])
            styles = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
            parallelize_module(self.mlp, meshes[1], dict(zip("02", styles, strict=True)))

    def reshard(self, x: torch.Tensor, place: int, placement: Placement) -> torch.Tensor:
        return x if self.meshes is None else stretto.reshard(x, self.meshes[place], [placement])  # type: ignore[arg-type]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.reshard(self.table(tokens), 0, S1))
        x = self.reshard(x, 0, R)
        rows, length, _ = x.shape
        q, k, v = (head(x).view(rows, length, 4, 2).transpose(1, 2) for head in self.heads)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        seen = (q @ k.transpose(-1, -2)).masked_fill(later, float("-inf")).softmax(dim=-1) @ v
        x = self.reshard(x + self.out(seen.transpose(1, 2).reshape(rows, length, SIZE)), 1, R)
        return x + self.mlp(x * self.scale)


def test_a_transformer() -> None:
    given = {"x": torch.arange(ROWS * 6).reshape(ROWS, 6) * 5 % (2 * SIZE)}
    given["y"] = torch.linspace(-1.0, 1.0, SIZE, dtype=F64).repeat(ROWS, 6, 1)
    assert_as_plain(captured(Attention, given=given), lambda: Attention(None), given)


# --- ops on meshes that DTensor is not trusted with --------------------------------------------------------


class Between(nn.Module):
    """A matrix cut by columns on the first mesh, ops on what it gives, and one on the second."""

    def __init__(self, meshes: list[DeviceMesh] | None, act: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(SIZE, SIZE, dtype=F64) for _ in range(2))
        self.table = nn.Embedding(6, SIZE, dtype=F64)
        self.meshes, self.act = meshes, act
        if meshes is not None:
            stretto.shard(self.a, meshes[0], [Shard(0)])
            stretto.shard(self.table, meshes[0], [Shard(0)])
            stretto.shard(self.b, meshes[1], [Replicate()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(torch.tanh(self.a(x)), self.table)
        if self.meshes is not None:
            h = stretto.reshard(h, self.meshes[1], [Replicate()])  # type: ignore[arg-type]
        return self.b(h)


def places(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    return h.cumsum(1) + h.flip(1) * h.roll(1, 1) + h.sort(1)[0]


def rows_of_tables(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    """Two lookups, of which the first is used after the second."""
    rows = torch.arange(len(h)) % (ROWS // MICROBATCHES)
    first, second = table(rows), table(5 - rows)
    return h * first + second * first


def attention(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    q = h.view(len(h), 2, SIZE // 4, 2)
    return F.scaled_dot_product_attention(q, q * 2, q.flip(3)).reshape(len(h), SIZE)


def written(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    made = h * 1
    made.index_add_(1, torch.tensor([0, 5, 5]), h[:, 2:5])
    return made.cumprod(1)


@pytest.mark.parametrize("act", [rows_of_tables, written, slow(places), slow(attention)])
def test_ops(act: Callable[..., torch.Tensor]) -> None:
    job = captured(lambda meshes: Between(meshes, act))
    assert_as_plain(job, lambda: Between(None, act))


@pytest.mark.parametrize("placement", [Shard(0), slow(Replicate())], ids=str)
def test_rows_that_do_not_count(placement: Placement) -> None:
    """One row of each microbatch is ignored, and so one of two of the first rank's."""
    given = batch()
    given["y"] = torch.arange(ROWS) * 5 % SIZE
    given["y"][:: ROWS // MICROBATCHES] = -100

    def loss(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        out, y = model(given["x"]), given["y"]
        assert isinstance(model, Between)
        if model.meshes is not None:
            out = stretto.reshard(out, model.meshes[1], [placement])
            y = stretto.shard(y, model.meshes[1], [placement])
        return F.cross_entropy(out, y)

    job = captured(lambda meshes: Between(meshes, places), given=given, loss=loss)
    assert_as_plain(job, lambda: Between(None, places), given, loss)


def test_a_write_that_would_be_lost_is_refused() -> None:
    def lost(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
        made = h * 1
        made[:, 1:3] = 0.0
        return made

    with pytest.raises(stretto.CaptureError, match=r"made\[:, 1:3\] = 0.0(.|\n)*gathered copy"):
        captured(lambda meshes: Between(meshes, lost))


SENT, COLS = 6, 4


class Exchanging(nn.Module):
    """A layer whose result is exchanged. sizes: what an end sends to each, and gets from each."""

    def __init__(self, sizes: Sequence[list[int] | None]) -> None:
        super().__init__()
        self.layer = nn.Linear(COLS, COLS)
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = all_to_all_single_autograd(self.layer(x), *self.sizes, dist.group.WORLD)  # type: ignore[arg-type]
        return made * 2


def converted(sizes: Sequence[list[int] | None] = (None, None), world: int = 2, ranks: int = 2) -> list[Op]:
    model = Exchanging(sizes)
    mode = torch_adapter.fake_mode()
    with single_rank(0, world):
        with mode:
            x = torch.empty(SENT, COLS)
        with torch_adapter.fake_state(model, mode, torch.device("cpu"), None):
            joint, _ = torch_adapter.export_joint(
                model, lambda model, x: model(x).sum(), lambda leaves: leaves[0], [x], mode, None, None, None
            )
        names = {node: f"{kind}/{key}" for node, (kind, key) in joint.inputs.items()}
        ops, _ = convert(joint, names, ranks)
    return [op for op, _ in ops]


def test_it_is_a_start_and_a_wait_and_its_gradient_goes_back_so() -> None:
    ops = converted()
    starts = [op for op in ops if op.kind is not None]
    assert [op.target for op in starts] == ["comm.all_to_all"] * 2
    for start in starts:
        assert isinstance(start.args[0], Ref)
        assert start.args[1:] == ("tp", 2)
        assert [str(spec) for spec in start.outputs] == [f"float32[{SENT},{COLS}]"]
        (wait,) = (op for op in ops if op.target == "comm.wait" and op.uses == (start.name,))
        assert wait.alias == start.name


def test_what_a_program_cannot_have_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"different sizes, \[4, 2\] rows to send and \[3, 3\] to receive"):
        converted(([3, 3], [4, 2]))
    with pytest.raises(CaptureError, match="all-to-all is of 3 ranks, and the model is sharded over tp = 2"):
        converted(world=3)
    with pytest.raises(CaptureError, match="all-to-all is of 2 ranks, and the model is sharded over tp = 1"):
        converted(ranks=1)
