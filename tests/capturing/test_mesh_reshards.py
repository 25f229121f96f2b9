"""Reshards between stages of several ranks, and ops on them: a captured step computes the plain model.

One process captures as one rank of a world of four; the plan's ranks then run as threads, each with a plain
copy of the model of which it takes its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import stretto
from stretto.ir.program import Job
from stretto.runtime.local import run_threads
from stretto.runtime.rank_tensors import part_of
from tests.clusters import cores
from tests.tensor.lone import lone_rank

F64 = torch.float64
ROWS, SIZE, MICROBATCHES = 16, 8, 4
COLUMNS, ROWWISE, WHOLE = [Shard(0)], [Shard(1)], [Replicate()]


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
                down.bias = stretto.shard(down.bias, mesh, WHOLE)
            stretto.shard(self.norm, second, WHOLE)

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
    with lone_rank(rank, 4):
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
    plan = stretto.plan(job, cluster=cores())
    stretto.verify(plan)
    plain = make()
    expected = loss(plain, given)
    expected.backward()
    whole = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    about = {parameter.name: parameter for parameter in job.parameters}

    def work(runner: stretto.Runner) -> int:
        torch.testing.assert_close(runner.step(given), expected.detach(), rtol=1e-10, atol=1e-10)
        found = list(runner.named_parameters())
        for name, parameter in found:
            if not parameter.requires_grad:
                assert parameter.grad is None
                continue
            part = part_of(whole[name], about[name], job, runner.coordinates)
            assert parameter.grad is not None
            torch.testing.assert_close({name: parameter.grad}, {name: part}, rtol=1e-10, atol=1e-10)
        return len(found)

    models = [make() for _ in range(plan.world)]  # not in the threads, which share one generator
    counts = run_threads(plan, lambda rank: models[rank], work)
    frozen = sum(not parameter.requires_grad for parameter in plain.parameters())
    assert sum(counts[::2]) == sum(counts[1::2]) == len(whole) + frozen


def collectives(job: Job, stage: int) -> list[str]:
    """The kinds of collectives in a stage's forward."""
    return [op.collective.kind for op in job.stages[stage].ops["F"] if op.collective is not None]


S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


@pytest.mark.parametrize(
    ("source", "target", "schedule", "overlap"),
    [
        (S1, R, "1f1b", "window"),
        (R, R, "zb-h1", "off"),
        (R, S1, "1f1b", "off"),
        (P, R, "zb-h1", "window"),
        (P, S1, "1f1b", "window"),
        (S1, S0, "zb-h1", "window"),
        (S0, S1, "1f1b", "off"),
        (S0, S0, "1f1b", "window"),
        (S1, P, "1f1b", "off"),
    ],
)
def test_reshards(source: Placement, target: Placement, schedule: str, overlap: str) -> None:
    job = captured(lambda meshes: Pair(meshes, source, target), schedule=schedule, overlap=overlap)
    assert_as_plain(job, lambda: Pair(None, source, target))


@pytest.mark.parametrize("last", [F.mse_loss, F.cross_entropy])
def test_a_loss_over_parts(last: Callable[..., torch.Tensor]) -> None:
    """The batch is cut in the loss, so that each rank has the mean over its part."""
    given = batch()
    if last is F.cross_entropy:
        given["y"] = torch.arange(ROWS) * 5 % SIZE

    def loss(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        out, y = model(given["x"]), given["y"]
        assert isinstance(model, Pair)
        if model.meshes is not None:
            out = stretto.reshard(out, model.meshes[1], [Shard(0)])
            y = stretto.shard(y, model.meshes[1], [Shard(0)])
        return last(out, y)

    job = captured(lambda meshes: Pair(meshes, S1, R), given=given, loss=loss)
    assert_as_plain(job, lambda: Pair(None, S1, R), given, loss)


def test_every_rank_captures_one_job() -> None:
    jobs = [captured(lambda meshes: Pair(meshes, P, R), rank) for rank in (0, 3)]
    assert jobs[0] == jobs[1]


def test_what_crosses_is_small() -> None:
    """A whole tensor that is a sum crosses as shards; a shard is gathered where it arrives."""
    for source, before in ((P, ["reduce_scatter"]), (S1, [])):
        job = captured(lambda meshes, source=source: Pair(meshes, source, R))
        assert [edge.spec.shape for edge in job.edges] == [(ROWS // MICROBATCHES, SIZE // 2)] * 2
        assert collectives(job, 0) == before
        assert collectives(job, 1)[0] == "all_gather"


def test_what_is_summed_for_the_forward_is_not_summed_again() -> None:
    """DTensor's norm keeps the addends, and reduces them a second time for its gradient."""
    counts = []
    for skip in ([], ["equal_collectives"]):
        job = captured(lambda meshes: Pair(meshes, S1, R), skip_passes=skip)
        ops = [op for stage in job.stages for phase in stage.ops.values() for op in phase]
        counts.append(sum(op.collective is not None and op.collective.kind == "all_reduce" for op in ops))
        assert_as_plain(job, lambda: Pair(None, S1, R))
    assert counts[0] == counts[1] - 1


def test_the_ops_that_no_pass_takes_out() -> None:
    job = captured(lambda meshes: Pair(meshes, S1, R), skip_passes=["no_ops"])
    assert_as_plain(job, lambda: Pair(None, S1, R))


class Tokens(nn.Module):
    """An embedding by rows and a sequence that is spread, then a layer by PyTorch's module styles."""

    def __init__(self, meshes: list[DeviceMesh] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(2 * SIZE, SIZE, dtype=F64)
        self.norm = nn.LayerNorm(SIZE, dtype=F64)
        self.mix = nn.Linear(SIZE, SIZE, dtype=F64)
        self.mlp = nn.Sequential(
            nn.Linear(SIZE, SIZE, dtype=F64), nn.GELU(), nn.Linear(SIZE, SIZE, dtype=F64)
        )
        self.meshes = meshes
        if meshes is not None:
            stretto.shard(self.table, meshes[0], [Shard(0)])
            stretto.shard(self.norm, meshes[0], WHOLE)
            stretto.shard(self.mix, meshes[0], WHOLE)
            plan = {
                "0": ColwiseParallel(use_local_output=False),
                "2": RowwiseParallel(use_local_output=False),
            }
            parallelize_module(self.mlp, meshes[1], plan)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.table(tokens)
        if self.meshes is not None:
            h = stretto.reshard(h, self.meshes[0], [Shard(1)])
        h = h + self.mix(self.norm(h))
        if self.meshes is not None:
            h = stretto.reshard(h, self.meshes[1], [Replicate()])
        return self.mlp(h)  # type: ignore[no-any-return]


def test_embedding_sequence_and_module_styles() -> None:
    given = {"x": torch.arange(ROWS * 6).reshape(ROWS, 6) * 5 % (2 * SIZE), "y": torch.zeros(ROWS, 6, SIZE)}
    given["y"] += torch.linspace(-1.0, 1.0, SIZE)
    given["y"] = given["y"].double()
    assert_as_plain(captured(Tokens, given=given), lambda: Tokens(None), given)


class Attention(nn.Module):
    """Heads spread over the first mesh, an MLP over the second; a buffer, and a parameter that is frozen."""

    scale: torch.Tensor

    def __init__(self, meshes: list[DeviceMesh] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(SIZE, SIZE, dtype=F64) for _ in range(3))
        self.out = nn.Linear(SIZE, SIZE, bias=False, dtype=F64)
        self.norm = nn.LayerNorm(SIZE, dtype=F64)
        self.norm.bias.requires_grad_(False)
        self.up, self.down = (nn.Linear(SIZE, SIZE, bias=False, dtype=F64) for _ in range(2))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, SIZE, dtype=F64))
        self.meshes = meshes
        if meshes is not None:
            stretto.shard(self.heads, meshes[0], COLUMNS)
            stretto.shard(self.out, meshes[0], ROWWISE)
            stretto.shard(self.norm, meshes[1], WHOLE)
            stretto.shard(self.up, meshes[1], COLUMNS)
            stretto.shard(self.down, meshes[1], ROWWISE)
            self.scale = stretto.shard(self.scale, meshes[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (head(x).view(rows, length, 4, 2).transpose(1, 2) for head in self.heads)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        seen = (q @ k.transpose(-1, -2)).masked_fill(later, float("-inf")).softmax(dim=-1) @ v
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, SIZE))
        if self.meshes is not None:
            x = stretto.reshard(x, self.meshes[1], [Replicate()])  # type: ignore[arg-type]
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x) * self.scale)))
        return out


def test_heads_are_spread() -> None:
    made = torch.sin(torch.arange(2 * ROWS * 6 * SIZE, dtype=F64)).reshape(2, ROWS, 6, SIZE)
    given = {"x": made[0], "y": made[1]}
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
        out: torch.Tensor = self.b(h)
        return out


def places(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    found: torch.Tensor = h.cumsum(1) + h.flip(1) * h.roll(1, 1) + h.sort(1)[0]
    return found


def rows_of_tables(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    """Two lookups, of which the first is used after the second."""
    rows = torch.arange(len(h)) % (ROWS // MICROBATCHES)
    first, second = table(rows), table(5 - rows)
    found: torch.Tensor = h * first + second * first
    return found


def attention(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    q = h.view(len(h), 2, SIZE // 4, 2)
    return F.scaled_dot_product_attention(q, q * 2, q.flip(3)).reshape(len(h), SIZE)


def written(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    made = h * 1
    made.index_add_(1, torch.tensor([0, 5, 5]), h[:, 2:5])
    return made.cumprod(1)


@pytest.mark.parametrize("act", [places, rows_of_tables, attention, written])
def test_ops(act: Callable[..., torch.Tensor]) -> None:
    job = captured(lambda meshes: Between(meshes, act))
    assert_as_plain(job, lambda: Between(None, act))


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
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
