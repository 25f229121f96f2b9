"""Op times out of a profiler's trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import stretto
from stretto.capturing.trace import trace as capture
from stretto.errors import UsageError
from stretto.ir.flow import PHASES
from stretto.ir.prices import price_list
from stretto.price import profiler_trace
from stretto.price.calibration import Calibration, Machine
from stretto.price.priced import CalibratedPricer
from stretto.price.profiler_trace import read_trace
from tests.capturing.zoo import mean_square
from tests.runtime.equality import evenly


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(32, 64)
        self.b = torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.nn.functional.gelu(self.a(x)))


def test_a_captured_plan_is_priced_from_an_ordinary_run(tmp_path: Path) -> None:
    """A plain training step is recorded; the ops of the captured job are found in it."""
    model, rows = Small(), torch.randn(16, 32)
    for _ in range(2):
        model(rows).square().mean().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(3):
            model(rows).square().mean().backward()
    path = tmp_path / "trace.json.gz"
    recorded.export_chrome_trace(str(path))
    traced = read_trace(path).op_us
    assert "aten::addmm float32 [64] [16,32] [32,64]" in traced
    assert all(us > 0 for key, us in traced.items() if key.startswith(("aten::addmm ", "aten::mm ")))

    job = evenly(capture(model, rows, mean_square, microbatches=1), 1, 1)
    machine = Machine("here", torch.__version__, 1)
    found = Calibration(machine, traced=traced)
    priced = price_list(job, CalibratedPricer(found, job))
    seen = {
        op.target: (priced[0, op.name], op)
        for phase in PHASES
        for op in job.stages[0].ops[phase]
        if op.target
        in ("aten.addmm.default", "aten.mm.default", "aten.gelu.default", "aten.gelu_backward.default")
    }
    assert len(seen) >= 3
    for target, (one, _) in seen.items():
        assert one.how == "traced", target
        called = f"aten::{target.split('.')[1]} "
        assert one.us in {us for key, us in traced.items() if key.startswith(called)}
    # What the run did not have is priced by what it had.
    rest = {one.how for (_, name), one in priced.items() if one.how not in ("traced", "free")}
    assert rest <= {"roofline"}


def event(
    name: str, ts: float, dur: float, number: int, dims: list[object], cat: str = "cpu_op"
) -> dict[str, object]:
    given = {"External id": number, "Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims)}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": given}


def test_on_an_accelerator_an_ops_kernels_count(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    dims: list[object] = [[4, 8], [8, 2]]
    events = [
        event("aten::linear", 0, 100, 1, dims),
        event("aten::mm", 10, 30, 2, dims),  # within linear
        event("aten::cat", 200, 10, 3, [[[4, 8], [4, 8]], []]),
        event("gemm", 300, 70, 2, [], "kernel"),
        event("fill", 390, 5, 1, [], "kernel"),
    ]
    path.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": "H1"}], "traceEvents": events}))
    trace = read_trace(path)
    assert (trace.kind, trace.device) == ("cuda", "H1")
    assert trace.op_us == {
        "aten::linear bfloat16 [4,8] [8,2]": 75.0,
        "aten::mm bfloat16 [4,8] [8,2]": 70.0,
        "aten::cat bfloat16 [4,8] [4,8]": 0.0,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"{}", "traceEvents"),
        (b'{"traceEvents": [1]}', "traceEvents"),
        (b'{"traceEvents": []}', "has no ops"),
        (b'{"traceEvents": [{"cat": "cpu_op", "ph": "X", "name": "aten::mm"}]}', "record_shapes=True"),
        (b'[{"cat": "cpu_op", "ph": "X", "args": {"Input Dims": [["x", 2]]}}]', "a profiler's trace"),
        (b'[{"cat": "cpu_op", "ph": "X", "args": {"Input Dims": 3}}]', "a profiler's trace"),
        # Without a time of writing: every worker that collects the tests must find the same bytes.
        (gzip.compress(b"{}", mtime=0)[:-4], "cannot read"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(stretto.UsageError, match=rf"trace.json.*{message}|{message}.*trace.json"):
        read_trace(path)
    with pytest.raises(stretto.UsageError, match=r"cannot read .*: No such file"):
        read_trace(tmp_path / "none.json")


def test_a_packed_trace_that_is_damaged_or_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json.gz"
    packed = bytearray(gzip.compress(b"[" + b" " * 10_000 + b"]"))
    packed[12] ^= 0xFF
    path.write_bytes(packed)
    with pytest.raises(UsageError, match=r"cannot read .*t\.json\.gz"):
        read_trace(path)
    monkeypatch.setattr(profiler_trace, "MOST_BYTES", 5_000)
    path.write_bytes(gzip.compress(b" " * 10_000))
    with pytest.raises(UsageError, match="has more than 5,000 bytes; record fewer steps"):
        read_trace(path)
