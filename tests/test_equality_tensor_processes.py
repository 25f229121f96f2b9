"""Tensor-parallel plans on Gloo processes: the plain model's numbers, and those of threads, to the bit where
two members add up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.program import Job
from stretto.ir.serialize import load_plan
from stretto.models.build import huggingface_loss
from stretto.models.gpt import next_token_loss
from stretto.runtime.runner import Runner
from stretto.runtime.shards import part_of
from tests.parallelize.equality import assert_plain, batch_of, gpt, step
from tests.parallelize.test_key_heads import hf
from tests.runtime.equality import Loss, lowered
from tests.runtime.launch import launch

KINDS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "gpt": (lambda: gpt().double(), next_token_loss),
    "llama, one head of keys": (lambda: hf("LlamaForCausalLM", 1), huggingface_loss),
    "qwen2, two heads of keys": (lambda: hf("Qwen2ForCausalLM", 2), huggingface_loss),
}

LAYOUTS: dict[int, tuple[tuple[str, dict[str, int]], ...]] = {
    2: (
        ("gpt", {"tp": 2, "microbatches": 2}),
        ("gpt", {"tp": 2, "sequence_parallel": True, "microbatches": 2}),
        ("gpt", {"dp": 2, "microbatches": 2}),
        ("llama, one head of keys", {"tp": 2, "microbatches": 2}),
    ),
    4: (
        ("gpt", {"tp": 2, "pp": 2, "sequence_parallel": True, "microbatches": 2}),
        ("gpt", {"tp": 4, "sequence_parallel": True, "microbatches": 1}),
        ("gpt", {"dp": 2, "tp": 2, "microbatches": 2}),
        ("qwen2, two heads of keys", {"tp": 4, "sequence_parallel": True, "microbatches": 2}),
    ),
}


def jobs(ranks: int) -> list[Job]:
    return [
        capture(KINDS[kind][0](), batch_of(), KINDS[kind][1], Parallel(**layout))
        for kind, layout in LAYOUTS[ranks]
    ]


def launched(folder: Path) -> None:
    """What each process does: a step of every layout, one after the other, with the plan from its file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for at, (kind, _) in enumerate(LAYOUTS[dist.get_world_size()]):
        runner = Runner(load_plan(folder / f"plan{at}.json"), KINDS[kind][0]())
        loss = runner.step(batch_of())
        found.append((runner.coordinates, loss, {n: p.grad for n, p in runner.named_parameters()}))
        runner.close()
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


def close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= 1e-12 * other.norm())


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.slow if n > 2 else ()) for n in sorted(LAYOUTS)]
)
def test_processes_equal_the_plain_model_and_threads(ranks: int, tmp_path: Path) -> None:
    made = jobs(ranks)
    for at, job in enumerate(made):
        lowered(job, "1f1b").save(tmp_path / f"plan{at}.json")
    launch(ranks, "tests.test_equality_tensor_processes", str(tmp_path))
    told = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for number, (job, (kind, _)) in enumerate(zip(made, LAYOUTS[ranks], strict=True)):
        model, of_kind = KINDS[kind][0](), KINDS[kind][1]
        assert_plain(job, model, of_kind, batch_of())
        loss, whole = step(job, model, batch_of())
        parameters = {p.name: p for p in job.parameters}
        for rank in range(ranks):
            at, found_loss, grads = told[rank][number]
            # Gloo adds up in an order of its own where a group has more than two members.
            same = torch.equal if max(size for _, size in job.axes) == 2 else close
            assert same(found_loss, loss)
            for name, grad in grads.items():
                mine = part_of(whole[name], parameters[name], job, at)
                assert same(grad, mine), f"{name} on rank {rank} at {at}"


if __name__ == "__main__":
    launched(Path(sys.argv[1]))
