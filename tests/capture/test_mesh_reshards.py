"""Reshards between stages of several ranks: the captured step computes what the plain model does.

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
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import stretto
from stretto.ir.program import Job
from stretto.runtime.local import run_threads
from stretto.runtime.shards import part_of
from stretto.runtime.transport import ThreadTransport
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
    plan = stretto.plan(job, cluster=stretto.Cluster())
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
            part = part_of(whole[name], about[name], job, runner.coordinates)
            assert parameter.grad is not None
            torch.testing.assert_close({name: parameter.grad}, {name: part}, rtol=1e-10, atol=1e-10)
        return len(found)

    models = [make() for _ in range(plan.world)]  # not in the threads, which share one generator
    counts = run_threads(plan, lambda rank: models[rank], work)
    assert sum(counts[::2]) == sum(counts[1::2]) == len(whole)


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


class Strange(nn.Module):
    """One layer on each of the first two meshes; `act` is done to the first one's result."""

    def __init__(
        self, meshes: list[DeviceMesh], act: Callable[[torch.Tensor, list[DeviceMesh]], torch.Tensor]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, dtype=F64) for _ in range(2))
        for layer, mesh in zip(self.layers, meshes, strict=False):
            stretto.shard(layer, mesh, WHOLE * mesh.ndim)
        self.meshes, self.act = meshes, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.layers[0](x), self.meshes)
        return self.layers[1](stretto.reshard(h, self.meshes[1], [Replicate()]))  # type: ignore[arg-type,no-any-return]


def refused(
    message: str,
    ranks: list[Any],
    act: Any = lambda h, _: h,
    kind: type[Exception] = stretto.UsageError,
    **changed: Any,
) -> None:
    parallel = stretto.Parallel(**({"pp": 2, "tp": 2, "microbatches": MICROBATCHES} | changed))
    with lone_rank(0, 8):
        model = Strange([DeviceMesh("cpu", one) for one in ranks], act)
        with pytest.raises(kind, match=message):
            stretto.capture(model, batch(), loss_of, parallel)


def test_meshes_that_are_no_stages_are_refused() -> None:
    two = [[0, 1], [2, 3]]
    refused(
        r"on a mesh of 1 ranks, \[0\], and 'layers.1.weight' on one of 2, \[1, 2\].*one size", [[0], [1, 2]]
    )
    refused(r"ranks \[0, 2\], \[1, 3\]; its 2 stages are at ranks \[0, 1\], \[2, 3\]", [[0, 2], [1, 3]])
    refused(r"ranks \[1, 0\], \[2, 3\]; its 2 stages are at ranks \[0, 1\], \[2, 3\]", [[1, 0], [2, 3]])
    refused(
        r"'layers.0.weight' is on a mesh of 2 axes, \[\[0, 1\], \[2, 3\]\]",
        [[two[0], two[1]], [[4, 5], [6, 7]]],
    )
    refused(r"on 2 meshes of 2 ranks.*give Parallel\(pp=2, tp=2\).*not pp=2, tp=1", two, tp=1)
    refused(r"give Parallel\(pp=2, tp=2\) with dp=1 and no split, not pp=2, tp=2, dp=2", two, dp=2)
    refused("sequence_parallel spreads a plain model, and this one is on meshes", two, sequence_parallel=True)
    refused("tp_plan spreads a plain model", two, tp_plan={"layers.0": "colwise"})


def test_what_no_plan_has_is_refused() -> None:
    two = [[0, 1], [2, 3]]

    def uneven(h: torch.Tensor, meshes: list[DeviceMesh]) -> torch.Tensor:
        return stretto.reshard(h[:, :5], meshes[1], [Shard(1)])  # type: ignore[arg-type]

    whole = r"tensor float64 \(4, 5\) \[Replicate\(\)\] on mesh \[0, 1\]"
    message = whole + " cannot be spread equally over tp = 2 along dim 1: 5 is not a multiple of 2.*pad"
    refused(message, two, uneven, stretto.CaptureError)

    def elsewhere(h: torch.Tensor, meshes: list[DeviceMesh]) -> torch.Tensor:
        return stretto.reshard(h, meshes[2], [Replicate()])  # type: ignore[arg-type]

    message = r"a mesh of ranks \[4, 5\], on which no parameter lies"
    refused(message, [*two, [4, 5]], elsewhere, stretto.CaptureError)

    def own_way(h: torch.Tensor, meshes: list[DeviceMesh]) -> torch.Tensor:
        whole = all_reduce(stretto.local(h.detach()), "sum", (meshes[0], 0))  # type: ignore[no-untyped-call]
        return h + stretto.shard(whole, meshes[0])

    refused(
        "communicates in a way of its own.*_c10d_functional.all_reduce", two, own_way, stretto.CaptureError
    )

    class Odd(nn.Module):
        def __init__(self, meshes: list[DeviceMesh], placement: Placement, buffer: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in meshes)
            for layer, mesh in zip(self.layers, meshes, strict=True):
                layer.register_buffer("seen", torch.zeros(6))
                layer.weight = stretto.shard(layer.weight, mesh, [placement])
                layer.bias = stretto.shard(layer.bias, mesh, WHOLE)
                layer.seen = stretto.shard(layer.seen, mesh, [Shard(0)] if buffer else WHOLE)  # type: ignore[arg-type]

    lies = r"parameter 'layers.0.weight' lies as \[Partial\(\)\].*as Shard\(dim\) or Replicate\(\)"
    for placement, buffer, message in (
        (Shard(0), False, r"'layers.0.weight' of shape \[5, 5\] cannot be spread equally over tp = 2 along"),
        (Partial(), False, lies),
        (Replicate(), True, r"buffer 'layers.0.seen' lies as \[Shard\(0\)\].*it lies as Replicate\(\)"),
    ):
        with pytest.raises(stretto.UsageError, match=message):
            captured(lambda meshes, p=placement, b=buffer: Odd(meshes, p, b))


def test_a_model_that_lies_otherwise_than_at_the_capture_is_refused() -> None:
    job = captured(lambda meshes: Pair(meshes, S1, R))
    plan = stretto.plan(job, cluster=stretto.Cluster())
    with lone_rank(1, 4):
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        model = Pair(meshes, S1, R)
        model.a.bias = stretto.shard(nn.Parameter(torch.zeros(SIZE, dtype=F64)), meshes[0], WHOLE)  # type: ignore[assignment]
        message = r"'a.bias' as parts of shape \[4\], and part 1 on rank 1, but it is tensor float64 \(8,\)"
        with pytest.raises(stretto.UsageError, match=message):
            stretto.Runner(plan, model, transport=ThreadTransport.group(4)[1])
