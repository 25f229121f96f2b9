"""Compiled stretches: equal ones are compiled once, and numbers stay the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import StrettoError, UsageError
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.runtime import Runner, run_threads
from stretto.runtime.compile import make_compiler
from tests.order.test_order_equality import costs_of
from tests.runtime.equality import TOLERANCE


def has_compiler() -> bool:
    try:
        make_compiler("inductor", torch.device("cpu"), False)
    except StrettoError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")


def gpt(**changes: Any) -> GPT:
    config = {"vocab_size": 64, "layers": 3, "hidden": 16, "heads": 2, "context": 8, **changes}
    return GPT(GPTConfig(**config), seed=3)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, 64, (4, 8), generator=generator) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


def job_of(model: GPT, **parallel: Any) -> Job:
    return capture(model, batch(), next_token_loss, Parallel(microbatches=4, **parallel))


# Numbers.


def run(plan: Plan, model: GPT, how: Any) -> list[tuple[Tensor, dict[str, Tensor], int, int]]:
    """By rank: loss, gradients of two steps, stretches, graphs."""

    def work(runner: Runner) -> tuple[Tensor, dict[str, Tensor], int, int]:
        runner.step(batch())
        loss = runner.step(batch())
        grads = {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}
        made = runner.compiler
        return loss, grads, 0 if made is None else made.calls, 0 if made is None else len(made.known)

    return run_threads(plan, lambda _: copy.deepcopy(model), work, seed=7, compile=how)


CASES: dict[str, tuple[Callable[[], GPT], dict[str, Any], torch.dtype]] = {
    "one rank, float64": (lambda: gpt().double(), {}, torch.float64),
    "one rank, float32, dropout": (lambda: gpt(dropout=0.1), {}, torch.float32),
    "pp=2, tied": (lambda: gpt(tie_embeddings=True).double(), {"pp": 2}, torch.float64),
    "tp=2, sequence, window": (lambda: gpt().double(), {"tp": 2, "sequence_parallel": True}, torch.float64),
}

MARKS = dict.fromkeys(set(CASES) - {"one rank, float32, dropout"}, pytest.mark.slow)
"""Compilers take their time: one case here, the others in the longer run."""


@needs_compiler
@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, ())) for case in CASES])
def test_compiled_stretches_keep_the_numbers(case: str) -> None:
    make, parallel, dtype = CASES[case]
    model = make()
    job = job_of(model, **parallel)
    plan = make_plan(job, costs_of(job))
    plain, compiled = run(plan, model, None), run(plan, model, "inductor")
    for (want_loss, want, _, _), (loss, grads, calls, graphs) in zip(plain, compiled, strict=True):
        assert graphs >= 1
        assert calls > graphs or len(plain) > 1, "equal blocks are compiled once"
        assert float((loss - want_loss).abs() / want_loss.abs()) <= TOLERANCE[dtype]
        assert grads.keys() == want.keys()
        for name, grad in grads.items():
            off = float((grad - want[name]).norm() / want[name].norm())
            assert off <= TOLERANCE[dtype], f"{name} differs by {off:.1e}"


# Refusals.


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"needs a C\+\+ compiler .* install g\+\+"
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(UsageError, match=told):
        make_compiler("inductor", torch.device("cpu"), False)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=told):
        make_compiler("inductor", torch.device("cpu"), False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs Triton for cuda"):
        make_compiler("inductor", torch.device("cuda"), False)


def test_another_compiler_is_refused() -> None:
    with pytest.raises(UsageError, match="compile='tvm'"):
        make_compiler("tvm", torch.device("cpu"), False)
