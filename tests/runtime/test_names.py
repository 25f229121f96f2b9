"""Names of parameters are those of the plain model on every rank: what is chosen by name is chosen alike."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.models.gpt import next_token_loss
from tests.clusters import cores
from tests.runtime.equality import gpt, tokens

CLUSTER = cores()


def groups(named: Iterable[tuple[str, nn.Parameter]], exempt: tuple[str, ...]) -> list[dict[str, Any]]:
    """As trainers make them: no weight decay where the name has a word in it."""
    pairs = list(named)
    kept = [p for name, p in pairs if any(word in name for word in exempt)]
    decayed = [p for name, p in pairs if not any(word in name for word in exempt)]
    found = [{"params": decayed, "weight_decay": 0.5}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in found if group["params"]]


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("exempt", [("norm", "embedding"), ("norm", "head")], ids=str)
def test_groups_by_name_keep_tied_copies_equal(layout: dict[str, int], exempt: tuple[str, ...]) -> None:
    model, batch = gpt(True).double(), tokens(4, columns=8)
    plan = stretto.plan(
        stretto.capture(model, batch, next_token_loss, stretto.Parallel(microbatches=2, **layout)),
        CLUSTER,
        order="list",
    )
    parameters = {p.name: p for p in plan.job.parameters}
    first = {p.tied_to for p in plan.job.parameters if p.name != p.tied_to}
    assert first == {"embedding.weight"}

    def work(runner: stretto.Runner) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(groups(runner.named_parameters(), exempt), lr=0.05, momentum=0.9)
        for _ in range(2):
            runner.step(batch)
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach() for name, p in runner.named_parameters() if not parameters[name].shards}

    found = stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)
    assert all("head.weight" not in held for held in found)
    optimizer = torch.optim.SGD(groups(model.named_parameters(), exempt), lr=0.05, momentum=0.9)
    for _ in range(2):
        for rows in batch.chunk(2):
            (next_token_loss(model, rows) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = dict(model.named_parameters())
    for held in found:
        for name, value in held.items():
            torch.testing.assert_close(value, whole[name].detach(), rtol=1e-9, atol=1e-9)


def test_a_rank_that_holds_the_later_name_alone_uses_the_first() -> None:
    model, batch = gpt(True).double(), tokens(4, columns=8)
    job = stretto.capture(model, batch, next_token_loss, stretto.Parallel(pp=2, microbatches=2))
    plan = stretto.plan(job, CLUSTER, order="list")
    work = lambda runner: {n: runner.owns(n) for n, _ in runner.named_parameters()}  # noqa: E731
    owned = stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)
    assert [names.get("embedding.weight") for names in owned] == [True, False]
    assert {*owned[0], *owned[1]} == {name for name, _ in model.named_parameters()}
