"""Whatever network is sharded, and however: capture refuses it, or its step has the plain model's numbers.

Random networks with random styles (`random_networks`) are captured, planned and run on ranks that are
threads. Loss and all gradients equal the plain model's in float64, or a StrettoError was raised before
anything ran. A good share is accepted, so that nothing is right by refusing all.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections import Counter

import pytest
import torch

import stretto
from stretto.ir.plan import Plan
from tests.clusters import cores
from tests.parallelize.equality import plain_step, step_of
from tests.parallelize.random_drawing import Network
from tests.parallelize.random_networks import draw_network
from tests.parallelize.unproved import without_proof

FEW, LEAN, MANY = range(20), range(60), range(20, 660)
TOLERANCE = 1e-9
ACCEPTED = {"patched": 0.35, "passes": 0.75}
"""The least share of networks that are captured. By passes only plans are refused."""

WAY_OUT = re.compile(
    r"(?:^|[.:;,)]\s+|\bor )"
    r"(give|write|leave|name|take|use|call|divide|pad|register|change|keep|put|let|make)\b",
    re.I | re.M,
)
"""What a refusal shows users to do."""


def outcome(seed: int, layouts: str = "patched") -> str:
    """ "right" or "refused"; else what is wrong, with a description of the network of a seed."""
    network = draw_network(seed)
    network.parallel["layouts"] = layouts
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = planned(network)
    except stretto.StrettoError as error:
        return refused(network, error)
    except Exception as error:
        return f"crash: {type(error).__name__}: {str(error)[:300]}\n{network.text}"
    try:
        wrong = differences(plan, network)
    except stretto.UsageError as error:  # before anything ran
        return refused(network, error)
    except Exception as error:
        return f"step: {type(error).__name__}: {str(error)[:300]}\n{network.text}"
    return f"wrong: {'; '.join(wrong)}\n{network.text}" if wrong else "right"


def refused(network: Network, error: Exception) -> str:
    return "refused" if WAY_OUT.search(str(error)) else f"no way out: {error}\n{network.text}"


def planned(network: Network) -> Plan:
    job = stretto.capture(
        copy.deepcopy(network.model),
        network.batch,
        loss=network.loss_of,
        parallel=stretto.Parallel(**network.parallel),
        tp_plan=network.plan,
    )
    return stretto.plan(job, cluster=cores(), order="list")


def differences(plan: Plan, network: Network) -> list[str]:
    """What of a step differs from the plain model's, or between ranks."""
    count = network.parallel["microbatches"] * network.parallel["dp"]
    loss, expected = plain_step(network.model, network.loss_of, network.batch, count)
    try:
        value, grads = step_of(plan, network.model, network.batch)
    except AssertionError as error:
        return [str(error)]
    first = {p.name: p.tied_to for p in plan.job.parameters}
    result = {first[name]: grad for name, grad in grads.items()}
    wrong = []
    if not abs(value - loss) <= TOLERANCE * max(abs(float(loss)), 1e-6):
        wrong.append(f"loss {float(value):.12g}, plain {float(loss):.12g}")
    least = 1e-5 * max(float(grad.norm()) for grad in expected.values())
    for name in {*result, *(first.get(name, name) for name in expected)}:
        zeros = torch.zeros_like(network.model.get_parameter(name))
        got, want = (of.get(name, zeros) for of in (result, expected))
        off = float((got - want).norm()) if got.shape == want.shape else math.inf
        if not off <= TOLERANCE * max(float(want.norm()), least):
            wrong.append(f"{name}: {off:.1e} off, of {float(want.norm()):.1e}")
    return wrong


def faults(seeds: range, layouts: str = "patched") -> list[str]:
    """All that is neither right nor refused."""
    counts = Counter(outcome(seed, layouts) for seed in seeds)
    assert counts["right"] >= ACCEPTED[layouts] * len(seeds), counts
    return [one for one in counts if one not in ("right", "refused")]


@pytest.mark.parametrize("layouts", ["patched", "passes"])
def test_random_networks_are_refused_or_right(layouts: str) -> None:
    assert faults(FEW, layouts) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layouts", ["patched", "passes"])
def test_many_random_networks_are_refused_or_right(layouts: str) -> None:
    assert faults(MANY, layouts) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_the_proof_some_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    without_proof(monkeypatch)
    assert any(fault.startswith("wrong") for fault in faults(LEAN))
