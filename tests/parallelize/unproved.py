"""Capture as it would be without the proof of placements: gradients that differ between ranks are summed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import pytest

from stretto.capturing.expand import TracedOp
from stretto.capturing.proof import Proof, Proved
from stretto.ir.program import CHUNK, INDEX
from stretto.parallelize.alone import Beside
from stretto.parallelize.expert_trial import ExpertTrial
from stretto.parallelize.tensor import AXIS


def _varying(ops: Sequence[TracedOp], given: set[str]) -> set[str]:
    """Values that differ between ranks, read off the ops alone: whatever is made of what differs."""
    found = set(given)
    for op in (item.op for item in ops):
        if op.kind is not None and op.kind.differs != "as given":
            differs = op.kind.differs == "always"
        else:
            differs = op.target in (INDEX, CHUNK) or not found.isdisjoint(op.uses)
        if differs:
            found.add(op.name)
    return found


def _unproved(proof: Proof) -> Proved:
    differ = _varying(proof.ops, {f"param/{name}" for name in proof.shards})
    gradients = {name: value for name, value in proof.gradients.items() if value is not None}
    partial = {n: (AXIS,) for n, value in gradients.items() if value in differ and n not in proof.shards}
    roots = {*proof.kept.values(), *gradients.values()}
    return Proved(tuple(proof.ops), {root: root for root in roots}, partial, {})


def without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off what proves that values along tp are what their uses need, and what looks at shapes and
    at experts."""
    monkeypatch.setattr(Proof, "proved", _unproved)
    monkeypatch.setattr(Beside, "_note", lambda *_: None)
    monkeypatch.setattr(ExpertTrial, "weighed", lambda *_: "after")
    monkeypatch.setattr(import_module("stretto.verifying.plan"), "placement_faults", lambda _: [])
