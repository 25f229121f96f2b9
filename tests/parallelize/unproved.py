"""Capture as it would be without the proof of placements: gradients that differ between ranks are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

import pytest

from stretto.capture.expand import TracedOp
from stretto.capture.proof import Proved
from stretto.ir.program import Shard, TensorSpec
from stretto.ir.varying import varying
from stretto.parallelize.alone import Beside
from stretto.parallelize.tensor import AXIS


def unproved(
    ops: Sequence[TracedOp],
    given: Mapping[str, TensorSpec],
    shards: Mapping[str, Shard],
    gradients: Mapping[str, str | None],
    kept: Mapping[str, str],
    size: int,
) -> Proved:
    differ = varying((item.op for item in ops), {f"param/{name}" for name in shards}, AXIS)
    partial = {name: (AXIS,) for name, value in gradients.items() if value in differ and name not in shards}
    roots = {*kept.values(), *(value for value in gradients.values() if value is not None)}
    return Proved(tuple(ops), {root: root for root in roots}, partial)


def without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off what proves that values along tp are what their uses need, and what looks at shapes."""
    monkeypatch.setattr(import_module("stretto.capture.trace"), "prove", unproved)
    monkeypatch.setattr(Beside, "_note", lambda *_: None)
    monkeypatch.setattr(import_module("stretto.verify.plan"), "placement_faults", lambda _: [])
