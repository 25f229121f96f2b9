"""Parts that several ranks hold: plans with them, their sums, their norms, and what ranks start with."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.ir.program import Job
from stretto.ir.transfers import summed_bytes
from stretto.runtime.rank_tensors import Part, part_of
from stretto.runtime.runner import Runner
from stretto.train.clip import GradientClip
from tests.clusters import cores
from tests.parallelize.equality import assert_plan_is_plain, batch_of
from tests.parallelize.test_key_heads import hf
from tests.runtime.equality import huggingface_loss, lowered, plain

pytestmark = pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")


def small_job(**layout: Any) -> tuple[nn.Module, Job]:
    model = hf("Qwen2ForCausalLM", 2)
    return model, capture(model, batch_of(), huggingface_loss, Parallel(microbatches=2, **layout))


def test_plans_are_proved_kept_simulated_and_rehearsed(tmp_path: Path) -> None:
    model, job = small_job(tp=4, pp=2)
    plan = stretto.plan(job, cores(), order="list")
    stretto.verify(plan)
    plan.save(tmp_path / "plan.json")
    again = stretto.load_plan(tmp_path / "plan.json")
    assert again.job.parameters == plan.job.parameters
    assert re.search(
        r'"shards": \[\["tp", 0, 1, \{"copies": 2\}\]\], "partial": \["tp"\]',
        (tmp_path / "plan.json").read_text(),
    )
    assert_plan_is_plain(again, model, huggingface_loss, batch_of())
    timeline = stretto.simulate(plan)
    told = stretto.rehearse(plan, 1, model=model, batch=batch_of(), steps=1)
    assert told.peak_bytes == pytest.approx(timeline.peak_bytes[0], rel=0.1)


def test_a_sum_moves_what_is_counted() -> None:
    """Sums hold shared parts side by side, so that one sum over the axis adds up the copies of each."""
    model, job = small_job(tp=4)
    plan = lowered(job, "1f1b")
    keys = next(p for p in job.parameters if p.name.endswith("layers.0.self_attn.k_proj.weight"))
    assert summed_bytes(job, keys, "tp") == 2 * keys.grad_nbytes == 2 * 8 * 32 * 8
    assert summed_bytes(job, keys, "dp") == keys.grad_nbytes

    def work(runner: Runner) -> dict[str, int]:
        runner.step(batch_of())
        return {name: nbytes for name, nbytes, _ in runner.state.marks.starts}

    counted = {op.label: op.collective.nbytes for op in plan.sums(0) if op.sums and op.collective}
    assert counted
    for moved in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work):
        assert {name: moved[name] for name in counted} == counted


def test_clipping_counts_a_shared_head_once() -> None:
    model, job = small_job(tp=4)
    plan = lowered(job, "1f1b")
    expected = plain(model, batch_of(), lambda m, b: huggingface_loss(m, b))
    grads = {name: grad for name, grad in expected.grads.items() if grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads.values()]))
    known = {p.name: p for p in job.parameters}

    def work(runner: Runner) -> Tensor:
        for name, parameter in runner.named_parameters():
            parameter.grad = part_of(grads[name], known[name], job, runner.coordinates).clone()
        found = GradientClip(runner, 0.5)()
        for name, parameter in runner.named_parameters():
            clipped = part_of(grads[name] * 0.5 / (norm + 1e-6), known[name], job, runner.coordinates)
            torch.testing.assert_close(parameter.grad, clipped, rtol=1e-13, atol=0)
        return found

    for found in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work):
        torch.testing.assert_close(found, norm, rtol=1e-14, atol=0)


def test_ranks_that_share_a_head_must_start_alike() -> None:
    model, job = small_job(tp=4)
    models = [copy.deepcopy(model) for _ in range(4)]
    with torch.no_grad():
        models[1].get_parameter("model.layers.0.self_attn.k_proj.weight").add_(1.0)
    with pytest.raises(
        UsageError, match=r"self_attn.k_proj.weight' has other values on rank 1 than on rank 0"
    ):
        stretto.run_threads(lowered(job, "1f1b"), lambda rank: models[rank], lambda runner: None)


def test_each_head_is_written_once() -> None:
    model, job = small_job(tp=4, pp=2)

    def work(runner: Runner) -> dict[str, Part]:
        return runner.tensors.owned_parts()

    written: dict[str, Tensor] = {}
    for owned in stretto.run_threads(lowered(job, "1f1b"), lambda _: copy.deepcopy(model), work):
        for name, part in owned.items():
            count = written.setdefault(name, torch.zeros(part.full_shape))
            for offsets, view in part.boxes:
                count[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))] += 1
    keys = "model.layers.1.self_attn.k_proj.weight"
    assert written[f"model.{keys}"].shape == (16, 32)
    assert {f"model.{name}" for name, _ in model.named_parameters()} <= written.keys()
    for name, count in written.items():
        # Numbers that are everywhere equal are named by all.
        assert (count == 1).all() or not count.shape, name


def test_check_takes_every_copy() -> None:
    model = hf("LlamaForCausalLM", 2)
    parallel = Parallel(tp=4, microbatches=2)
    found = stretto.check(model, batch_of(), huggingface_loss, parallel)
    assert found.wrong == (), str(found)
