"""Ops of a plan file that give something else than the plan says, found before any of them is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.verifying.shapes import shape_faults
from tests.capturing.zoo import BatchNorm, Chain, mean_square, rows

Ops = list[list[Any]]


def plan_of(model: nn.Module) -> stretto.Plan:
    job = stretto.capture(model, rows(), mean_square, stretto.Parallel(pp=2, microbatches=2))
    return stretto.plan(job, stretto.Cluster(), order="list")


def edited(edit: Callable[[dict[str, Any]], None], model: nn.Module | None = None) -> str:
    """What is said of a plan whose file was edited."""
    data = json.loads(plan_to_text(plan_of(Chain() if model is None else model)))
    edit(data)
    with pytest.raises(stretto.PlanError) as caught:
        stretto.verify(plan_from_text(json.dumps(data), edited=True))
    return str(caught.value)


def ops(data: dict[str, Any], stage: int = 0, phase: str = "F") -> Ops:
    found: Ops = data["job"]["stages"][stage]["ops"][phase]
    return found


def product(data: dict[str, Any]) -> list[Any]:
    """The last layer's, whose matrix is not square: of its bias, its input and its weight."""
    return next(op for op in reversed(ops(data)) if op[1] in ("aten.addmm.default", "aten.mm.default"))


def swap(data: dict[str, Any]) -> None:
    args = product(data)[2]
    args[-1], args[-2] = args[-2], args[-1]


def other_result(data: dict[str, Any]) -> None:
    next(op for op in ops(data, phase="W") if op[0] == "mm_3")[4] = ["float64[2,8]"]


def other_dtype(data: dict[str, Any]) -> None:
    next(op for op in ops(data) if op[1] == "aten.tanh.default")[4] = ["float32[4,8]"]


def missing_argument(data: dict[str, Any]) -> None:
    product(data)[2].pop()


def other_dim(data: dict[str, Any]) -> None:
    view = next(op for op in ops(data, phase="W") if op[1] == "aten.sum.dim_IntList")
    view[2][1] = [7]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (swap, "cannot take"),
        (other_result, "gives float64[8,8], but the plan says float64[2,8]"),
        (other_dtype, "aten.tanh.default of float64[4,8] gives float64[4,8], but the plan says float32[4,8]"),
        (missing_argument, "cannot take"),
        (other_dim, "aten.sum.dim_IntList cannot take"),
    ],
)
def test_ops_that_cannot_be(edit: Callable[[dict[str, Any]], None], message: str) -> None:
    told = edited(edit)
    assert message in told
    assert "stage 0, " in told


def test_a_gradient_of_another_parameter() -> None:
    def edit(data: dict[str, Any]) -> None:
        bias, weight = (
            next(p for p in data["job"]["parameters"] if p["name"] == f"out.{k}") for k in ("bias", "weight")
        )
        bias["grads"], weight["grads"] = weight["grads"], bias["grads"]

    assert "is float64[2], but the gradient of 'out.weight', which is float64[2,8]" in edited(edit)


def test_nothing_is_executed() -> None:
    """Ops of other namespaces, and those that are given text, are left alone."""

    def edit(data: dict[str, Any]) -> None:
        product(data)[1] = "aten.from_file.default"
        product(data)[2] = ["'/etc/hostname"]

    data = json.loads(plan_to_text(plan_of(Chain())))
    edit(data)
    shape_faults(plan_from_text(json.dumps(data), edited=True))


def test_sound_plans_have_no_fault_and_no_generator_is_drawn_from() -> None:
    class Drops(Chain):
        def act(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, 0.5)

    state = torch.get_rng_state()
    for model in (Chain(), BatchNorm(), Drops()):
        before = torch.get_rng_state()
        assert shape_faults(plan_of(model)) == []
        assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(state)
