"""Whatever network is spread, and however: capture refuses it, or its step has the plain model's numbers.

Random networks with random styles (`random_networks`) are captured, planned and run on ranks that are
threads. Loss and all gradients equal the plain model's in float64, or a StrettoError was raised before
anything ran. A good share is accepted, so that nothing is right by refusing all.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.ir.plan import Plan
from stretto.runtime.rank_tensors import join
from tests.clusters import cores
from tests.parallelize.random_networks import Network, draw_network
from tests.parallelize.random_state import hooked
from tests.parallelize.unproved import without_proof

FEW, LEAN, MANY = range(20), range(60), range(20, 660)
TOLERANCE = 1e-9
ACCEPTED = 0.35
"""The least share of networks that are captured."""

WAY_OUT = re.compile(
    r"(?:^|[.:;,)]\s+|\bor )"
    r"(give|write|leave|name|take|use|call|divide|pad|register|change|keep|put|let|make)\b",
    re.I | re.M,
)
"""What a refusal tells people to do."""


def outcome(seed: int) -> str:
    """`outcome_of` the network of a seed."""
    return outcome_of(draw_network(seed))


def outcome_of(network: Network) -> str:
    """ "right" or "refused"; else what is wrong, with a description of the network."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = planned(network)
    except stretto.StrettoError as error:
        return refused(network, error)
    except Exception as error:
        return told(network, f"crash: {type(error).__name__}: {str(error)[:300]}")
    try:
        faults = differences(plan, network)
    except stretto.UsageError as error:  # before anything ran
        return refused(network, error)
    except Exception as error:
        return told(network, f"step: {type(error).__name__}: {str(error)[:300]}")
    return told(network, "wrong: " + "; ".join(faults)) if faults else "right"


def refused(network: Network, error: Exception) -> str:
    return "refused" if WAY_OUT.search(str(error)) else told(network, f"no way out: {error}")


def told(network: Network, fault: str) -> str:
    return f"{fault}\n{network.text}"


def planned(network: Network) -> Plan:
    job = stretto.capture(
        network.fresh(),
        network.batch,
        loss=network.loss_of,
        parallel=stretto.Parallel(**network.parallel),
        tp_plan=network.plan,
    )
    return stretto.plan(job, cluster=cores(), order="list")


def plain(network: Network) -> tuple[float, nn.Module]:
    """The mean over the step's microbatches, and the model with its gradients, by PyTorch alone. A hook on a
    parameter runs once a step."""
    own = copy.deepcopy(network.model)
    count = network.parallel["microbatches"] * network.parallel["dp"]
    total = 0.0
    for m in range(count):
        value = network.loss_of(own, {k: x.chunk(count)[m] for k, x in network.batch.items()}) / count
        value.backward()
        total += float(value.detach())
    for parameter in hooked(own, network.hooks).parameters():
        grad, parameter.grad = parameter.grad, None
        if grad is not None:
            parameter.expand_as(parameter).backward(grad)
    return total, own


def differences(plan: Plan, network: Network) -> list[str]:
    """What of a step differs from the plain model's, or between ranks."""

    def work(runner: Any) -> tuple[dict[str, int], float, dict[str, Tensor], dict[str, Tensor]]:
        loss = float(runner.step(network.batch))
        grads = {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}
        return runner.coordinates, loss, grads, dict(runner.named_buffers())

    results = stretto.run_threads(plan, lambda _: network.fresh(), work)
    parameters = {p.name: p for p in plan.job.parameters}
    found: dict[str, Tensor] = {}
    parts: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}
    wrong: list[str] = []
    for at, _, grads, _ in results:
        for name, grad in grads.items():
            cut = {shard.axis for shard in parameters[name].shards}
            copy_of = tuple(place for axis, place in at.items() if axis not in cut)
            parts.setdefault((name, copy_of), []).append(grad)
    for (name, _), held in parts.items():
        whole = join(held, parameters[name], plan.job)
        if not torch.equal(found.setdefault(parameters[name].tied_to, whole), whole):
            wrong.append(f"{name} differs between copies")
    loss, own = plain(network)
    expected = {name: p.grad for name, p in own.named_parameters()}
    if any(value != results[0][1] for _, value, *_ in results):
        wrong.append("ranks are told different losses")
    if not abs(results[0][1] - loss) <= TOLERANCE * max(abs(loss), 1e-6):
        wrong.append(f"loss {results[0][1]:.12g}, plain {loss:.12g}")
    for name, buffer in own.named_buffers() if network.parallel["dp"] == 1 else ():
        for *_, buffers in results:
            if name in buffers and not torch.allclose(buffers[name], buffer, rtol=TOLERANCE, atol=1e-12):
                wrong.append(f"buffer {name} is {buffers[name].tolist()}, plain {buffer.tolist()}")
    largest = max(float(grad.norm()) for grad in expected.values() if grad is not None)
    for name, want in expected.items():
        got = found.get(parameters[name].tied_to if name in parameters else name)
        if want is None or got is None:
            left = got if want is None else want
            if left is not None and float(left.norm()) > 0:
                wrong.append(
                    f"{name}: only {'the step' if want is None else 'the plain model'} has a gradient"
                )
        elif got.shape != want.shape:
            wrong.append(f"{name}: shape {list(got.shape)}, plain {list(want.shape)}")
        elif not float((got - want).norm()) <= TOLERANCE * max(float(want.norm()), 1e-5 * largest):
            wrong.append(f"{name}: {float((got - want).norm()) / max(float(want.norm()), 1e-300):.1e} off")
    return wrong


def outcomes(seeds: range) -> tuple[Counter[str], list[str]]:
    """How many are right and refused, and all that are neither."""
    counts: Counter[str] = Counter()
    faults = []
    for seed in seeds:
        found = outcome(seed)
        counts[found if found in ("right", "refused") else "fault"] += 1
        if found not in ("right", "refused"):
            faults.append(found)
    return counts, faults


def check(seeds: range) -> None:
    counts, faults = outcomes(seeds)
    assert not faults, f"{len(faults)} of {len(seeds)} are neither refused nor right:\n\n" + "\n\n".join(
        faults
    )
    assert counts["right"] >= ACCEPTED * len(seeds), counts


def test_random_networks_are_refused_or_right() -> None:
    check(FEW)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_random_networks_are_refused_or_right() -> None:
    check(MANY)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_the_proof_some_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    without_proof(monkeypatch)
    _, faults = outcomes(LEAN)
    assert any(fault.startswith("wrong") for fault in faults)
