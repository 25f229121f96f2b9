"""Buffers live, and are left alone, until their communication is done; in every mode of overlap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.models.gpt import next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.runtime.generate import Started
from stretto.runtime.rank import RankState
from stretto.runtime.runner import Runner
from stretto.runtime.transport import ThreadTransport
from tests.order.test_order_equality import costs_of
from tests.parallelize.equality import batch_of, gpt
from tests.runtime.equality import on_ends
from tests.runtime.poison import PoisonError, PoisonTransport

Numbers = list[tuple[Tensor, dict[str, Tensor]]]

MODES = ("off", "local", "window")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "microbatches": 4},
    "sequence": {"tp": 2, "sequence_parallel": True, "microbatches": 4},
    "pipeline": {"pp": 2, "microbatches": 4, "schedule": "1f1b"},
    "both": {"pp": 2, "tp": 2, "sequence_parallel": True, "microbatches": 4, "schedule": "zb-h1"},
    "data": {"dp": 2, "tp": 2, "microbatches": 2},
}


@functools.cache
def job_of(layout: str) -> Job:
    """Tied embeddings, so that gradients are summed over places, too."""
    model = gpt(tie_embeddings=True).double()
    return capture(model, batch_of(), next_token_loss, Parallel(**LAYOUTS[layout]))


@functools.cache
def plan_of(layout: str, mode: Any) -> Plan:
    job = job_of(layout)
    return make_plan(job, costs_of(job), overlap=mode)


def numbers(plan: Plan, poisoned: bool) -> Numbers:
    """Loss and gradients of every rank. Raises the first error of any."""
    ends: list[Any] = ThreadTransport.group(plan.world)
    if poisoned:
        ends = PoisonTransport.around(ends)

    def work(end: ThreadTransport) -> tuple[Tensor, dict[str, Tensor]]:
        runner = Runner(plan, gpt(tie_embeddings=True).double(), transport=end)
        loss = runner.step(batch_of())
        assert not isinstance(end, PoisonTransport) or end.checked > 8, "the step communicates"
        return loss, {n: p.grad.clone() for n, p in runner.named_parameters() if p.grad is not None}

    results = on_ends(ends, work)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise next((e for e in errors if isinstance(e, PoisonError)), errors[0])
    return results


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        # What `local` has, `window` has too; `off` waits for all at once. "data" has what "tp" has,
        # and "both" what "sequence" has.
        pytest.param(
            layout,
            mode,
            marks=() if mode == "window" and layout in ("pipeline", "both", "data") else pytest.mark.slow,
        )
        for layout in LAYOUTS
        for mode in MODES
    ],
)
def test_every_buffer_outlives_its_communication(layout: str, mode: str) -> None:
    expected = numbers(plan_of(layout, "off"), poisoned=False)
    for (loss, grads), (same_loss, same_grads) in zip(
        numbers(plan_of(layout, mode), poisoned=True), expected, strict=True
    ):
        assert torch.equal(loss, same_loss)
        assert grads.keys() == same_grads.keys()
        for name, grad in grads.items():
            assert torch.equal(grad, same_grads[name]), name


# A runtime with each of the mistakes is found out.


def drops_what_it_sends(plain: Callable[..., Any]) -> Callable[..., Any]:
    def send(self: RankState, edge: int, microbatch: int, value: Tensor) -> None:
        plain(self, edge, microbatch, value.clone())
        key = (edge, microbatch)
        if key in self._leaving:
            self._leaving[key] = (self._leaving[key][0], torch.empty(0))

    return send


def writes_the_result(plain: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: RankState, *given: Any, **owned: Any) -> Started:
        found: Started = plain(self, *given, **owned)
        found.result.zero_()
        return found

    return start


MISTAKES = (
    ("pipeline", "send", drops_what_it_sends, "what is sent on pp .* was freed"),
    ("tp", "start", writes_the_result, "the result of lane tp was written"),
)


@pytest.mark.parametrize(
    ("layout", "method", "wrong", "said"), MISTAKES, ids=[m[2].__name__ for m in MISTAKES]
)
def test_a_runtime_that_errs_is_found_out(
    layout: str,
    method: str,
    wrong: Callable[[Callable[..., Any]], Callable[..., Any]],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RankState, method, wrong(getattr(RankState, method)))
    with pytest.raises(PoisonError, match=said):
        numbers(plan_of(layout, "local"), poisoned=True)
