"""Batch norms that read the value of a buffer, or communicate, in PyTorch's own forward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from tests.capturing.steps import assert_plain, plan_of
from tests.capturing.zoo import WIDTH, BatchNorm, mean_square, rows

PIPELINE = stretto.Parallel(pp=2, microbatches=2, schedule="zb-h1")


def with_norms(make: object, layers: int = 4) -> BatchNorm:
    model = BatchNorm()
    assert callable(make)
    model.norms = nn.ModuleList(make(WIDTH) for _ in range(layers)).double()
    return model


@pytest.mark.parametrize("track", [True, False])
def test_a_mean_over_all_batches(track: bool) -> None:
    model = with_norms(lambda n: nn.BatchNorm1d(n, momentum=None, track_running_stats=track))
    assert_plain(model, rows(), mean_square, PIPELINE)
    assert_plain(model.eval(), rows(), mean_square, PIPELINE)


def test_buffers_after_several_steps_and_what_capture_leaves() -> None:
    model, batch = with_norms(lambda n: nn.BatchNorm1d(n, momentum=None)), rows()
    plan, own = plan_of(model, batch, mean_square, stretto.Parallel(microbatches=2)), copy.deepcopy(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
    runner = stretto.Runner(plan, model)
    for _ in range(3):
        runner.step(batch)
        for piece in batch.chunk(2):
            mean_square(own, piece)
    expected = dict(own.named_buffers())
    assert int(expected["norms.0.num_batches_tracked"]) == 6
    for name, buffer in runner.named_buffers():
        assert torch.allclose(buffer, expected[name], rtol=1e-12, atol=0), name


def synchronised() -> BatchNorm:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(BatchNorm())
    assert isinstance(model, BatchNorm)
    assert isinstance(model.norms[0], nn.SyncBatchNorm)
    return model


def test_a_synchronised_norm_of_one_copy(tmp_path: object) -> None:
    """PyTorch refuses it on processors where there are several processes, of which these are one copy."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        job = stretto.capture(synchronised(), rows(), mean_square, PIPELINE)
    finally:
        dist.destroy_process_group()
    assert len(job.stages) == 2
    model = synchronised()
    for norm in model.norms:
        norm.momentum = None
    assert_plain(synchronised(), rows(), mean_square, PIPELINE)
    assert_plain(model, rows(), mean_square, PIPELINE)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_synchronised_norm_of_several_copies_is_refused(layout: dict[str, int]) -> None:
    parallel = stretto.Parallel(microbatches=2, **layout)
    with pytest.raises(stretto.CaptureError) as caught:
        stretto.capture(synchronised(), rows(), mean_square, parallel)
    assert "norms.0 is a SyncBatchNorm, whose statistics are those of all dp = 2 copies" in str(caught.value)
    assert "give nn.BatchNorm1d (or 2d, 3d)" in str(caught.value)
    assert "module.eval()" in str(caught.value)


def test_a_frozen_synchronised_norm_has_no_statistics_to_sum() -> None:
    model, batch = synchronised(), rows()
    for norm in model.norms:
        norm.eval()
    own = copy.deepcopy(model)
    for piece in batch.chunk(4):
        (mean_square(own, piece) / 4).backward()
    plan = plan_of(model, batch, mean_square, stretto.Parallel(dp=2, microbatches=2))
    expected = {name: p.grad for name, p in own.named_parameters()}

    def work(runner: stretto.Runner) -> None:
        runner.step(batch)
        for name, parameter in runner.named_parameters():
            assert parameter.grad is not None
            assert expected[name] is not None
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)

    stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)
