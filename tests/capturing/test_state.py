"""Capture leaves the model, the process and its memory as they were."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import stretto
from stretto.capturing.torch_state_adapter import tracing_state
from stretto.capturing.trace import trace
from stretto.models.gpt import next_token_loss
from tests.capturing.zoo import BatchNorm, Chain, Hooked, mean_square, rows
from tests.runtime.equality import gpt, tokens


def hooks_of(module: nn.Module) -> list[list[int]]:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [list(getattr(sub, table)) for sub in module.modules() for table in tables]


@pytest.mark.parametrize("kind", [BatchNorm, Hooked])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(kind: type[nn.Module], training: bool) -> None:
    model = kind().train(training)
    model.get_parameter("out.bias").grad = torch.ones(2, dtype=torch.float64)
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]
    values = copy.deepcopy(model.state_dict())
    hooks = hooks_of(model)
    trace(model, rows(), mean_square, microbatches=2)
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == identities
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert hooks_of(model) == hooks
    assert model.training is training
    assert torch.equal(model.get_parameter("out.bias").grad, torch.ones(2, dtype=torch.float64))
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["out.bias"]


def test_a_failed_capture_leaves_it_too() -> None:
    class Fails(Chain):
        def act(self, x):
            raise RuntimeError("no")

    model = Fails()
    identities = [id(p) for p in model.parameters()]
    hooks = hooks_of(model)
    with pytest.raises(stretto.CaptureError):
        trace(model, rows(), mean_square)
    assert [id(p) for p in model.parameters()] == identities
    assert hooks_of(model) == hooks
    assert not torch.compiler.is_compiling()
    assert torch.is_grad_enabled()
    model.act = torch.tanh
    mean_square(model, rows()).backward()


def test_the_process_is_left_as_it_was() -> None:
    log = logging.getLogger("torch._functorch")

    def state() -> tuple[int, bool, bool, int]:
        compiling = torch.compiler.is_compiling()
        return log.level, torch.backends.mkldnn.enabled, compiling, torch.get_num_threads()

    before = state()
    with tracing_state():
        assert torch.compiler.is_compiling()
        assert torch.compiler.is_exporting()
        assert not torch.backends.mkldnn.enabled
    assert before == state()


def test_equal_models_give_equal_jobs() -> None:
    """So that ranks that capture for themselves hold one plan, whatever was captured before."""
    parallel = stretto.Parallel(pp=2, microbatches=2)
    jobs = [
        stretto.capture(gpt(True), tokens(4, columns=8, seed=seed), next_token_loss, parallel)
        for seed in (1, 2)
    ]
    assert jobs[0] == jobs[1]


def test_meta_and_real_models_give_equal_jobs() -> None:
    parallel = stretto.Parallel(pp=2, microbatches=2)
    real = gpt(True)
    with torch.device("meta"):
        meta = gpt(True)
    batch = tokens(4, columns=8)
    assert stretto.capture(real, batch, next_token_loss, parallel) == stretto.capture(
        meta, batch.to("meta"), next_token_loss, parallel
    )


def test_a_model_on_two_devices_is_refused() -> None:
    model = Chain()
    model.layers[1].to("meta")
    with pytest.raises(stretto.UsageError, match=r"on several devices \(cpu, meta\)"):
        trace(model, rows(), mean_square)


LARGE = """
import torch, stretto
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
with torch.device("meta"):
    model = GPT(GPTConfig(vocab_size=32_000, layers=16, hidden=8192, heads=64, context=2048), seed=0)
weight = sum(p.nbytes for p in model.parameters())
parallel = stretto.Parallel(pp=8, microbatches=32)
batch = torch.zeros(32, 2049, dtype=torch.int64, device="meta")
job = stretto.capture(model, batch, next_token_loss, parallel)
plan = stretto.plan(job, cluster=stretto.Cluster())
# Not getrusage: its peak is inherited from the process that started this one.
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(weight, int(peak) * 1024, max(plan.prediction.peak_bytes))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
def test_planning_a_model_of_fifty_gigabytes_takes_little_memory(tmp_path: Path) -> None:
    program = tmp_path / "large.py"
    program.write_text(LARGE)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    weight, resident, peak = map(int, done.stdout.split())
    assert weight > 50e9
    assert resident < 1e9
    assert peak > 10e9, "the plan knows what the ranks will need"
