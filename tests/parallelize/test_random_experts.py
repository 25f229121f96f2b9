"""Random modules of experts that ranks share: capture refuses each, or its step is the plain model's.

They are what the random networks draw now and then (`test_soundness`), by themselves, which is fast.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch

from stretto.parallelize.expert_trial import ExpertTrial
from tests.parallelize.random_code import HIDDEN, LENGTH, ROWS, VOCAB
from tests.parallelize.random_experts import HOW, draw_mixture
from tests.parallelize.random_lines import Coded
from tests.parallelize.random_networks import Network
from tests.parallelize.test_soundness import outcome_of

FEW, MANY = range(62, 68), range(68, 168)
ACCEPTED = 0.35
"""The least share of networks that are captured."""


def network_of(seed: int) -> Network:
    """Tokens, a mixture, and a head."""
    draw = Random(f"mixture {seed}")
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        model = Coded("x")
        model.table = torch.nn.Embedding(VOCAB, HIDDEN)
        model.mixture = draw_mixture(draw)
        model.head = torch.nn.Linear(HIDDEN, VOCAB)
        model.made |= {"table": f"nn.Embedding({VOCAB}, {HIDDEN})", "head": f"nn.Linear({HIDDEN}, {VOCAB})"}
        model.lines = ("x = self.table(x)", "return self.head(x + self.mixture(x))")
    finally:
        torch.set_default_dtype(torch.float32)
    parallel: dict[str, Any] = {"dp": 2, "ep": 2, "microbatches": draw.choice((1, 1, 2)), **HOW}
    rows = ROWS * parallel["dp"] * parallel["microbatches"]
    tokens = torch.randint(0, VOCAB, (2, rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    loss = ("y = self(batch['x'])", f"return F.cross_entropy(y.view(-1, {VOCAB}), batch['targets'].view(-1))")
    return Network(seed, model.train(), {"x": tokens[0], "targets": tokens[1]}, parallel, {}, loss, 0.0)


def check(seeds: range) -> None:
    found = [outcome_of(network_of(seed)) for seed in seeds]
    faults = [one for one in found if one not in ("right", "refused")]
    assert not faults, f"{len(faults)} of {len(seeds)} are neither refused nor right:\n\n" + "\n\n".join(
        faults
    )
    counts = Counter(found)
    assert counts["right"] >= ACCEPTED * len(seeds), counts
    assert counts["refused"] > 0


def test_random_experts_are_refused_or_right() -> None:
    check(FEW)


@pytest.mark.slow
def test_many_random_experts_are_refused_or_right() -> None:
    check(MANY)


@pytest.mark.parametrize("seeds", [FEW])
def test_without_the_trial_some_are_wrong(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpertTrial, "weighed", lambda *_: "after")
    assert any(outcome_of(network_of(seed)).startswith("wrong") for seed in seeds)
