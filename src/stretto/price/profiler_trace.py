"""Op times out of a PyTorch profiler's trace of an ordinary run, as calibration input.

The trace is what `torch.profiler.profile(record_shapes=True)` exports (`export_chrome_trace`, .json or
.json.gz). An event of category `cpu_op` is one call of the dispatcher, with the dims and types of its inputs;
nested events are calls that it made, so each event counts for itself.

    on a processor     an op's time is its event's duration
    on an accelerator  it is the time of the kernels launched within the event, which carry the innermost
                       op's `External id`

Reads the one file; touches no device.
"""

from __future__ import annotations

import gzip
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.files.parse import parse_json
from stretto.ir.program import Op, TensorSpec, refs

DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
}
"""What traces call dtypes: names of C++ types, as `libtorch` prints them."""

MOST_BYTES = 2**29
"""Of a trace as text: a few bytes can be packed that are any number of others."""

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Trace:
    """op_us: by `trace_key`, the median of an op's calls, most time first. kind: of the device that they ran
    on, "cpu" or "cuda"; device: its name, empty for a processor's, which traces do not show."""

    op_us: dict[str, float]
    kind: str
    device: str


def read_trace(path: str | Path) -> Trace:
    """A trace's ops, and what they ran on. Raises UsageError when the file is no trace, or was recorded
    without shapes."""
    events, device = _events(Path(path))
    try:
        return _trace(path, events, device)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: not a profiler's trace: an event has a field that is not of its type ({error}). Export "
            "it again"
        ) from None


def _trace(path: str | Path, events: list[dict[str, Any]], device: str) -> Trace:
    calls = [e for e in events if e.get("cat") == "cpu_op" and e.get("ph") == "X"]
    if not calls:
        raise UsageError(f"{path}: has no ops (events of category cpu_op): record the CPU's activity too")
    with_shapes = [e for e in calls if "Input Dims" in e.get("args", {})]
    if not with_shapes:
        raise UsageError(
            f"{path}: was recorded without shapes: give torch.profiler.profile(record_shapes=True)"
        )
    on_device = _device_us(events, calls)
    times: dict[str, list[float]] = defaultdict(list)
    for event in with_shapes:
        given = event["args"]
        shapes, dtype = _inputs(given.get("Input Dims", []), given.get("Input type", []))
        us = on_device[id(event)] if on_device is not None else float(event.get("dur", 0.0))
        if shapes:
            times[_key(str(event.get("name")), dtype, shapes)].append(us)
    op_us = {key: statistics.median(us) for key, us in times.items()}
    op_us = dict(sorted(op_us.items(), key=lambda one: (-one[1] * len(times[one[0]]), one[0])))
    return Trace(op_us, "cpu", "") if on_device is None else Trace(op_us, "cuda", device or "traced device")


def trace_key(op: Op, specs: Mapping[str, TensorSpec]) -> str:
    """The key of a program's op among traced ones: `aten::mm float32 [64,128] [128,512]`."""
    read = [specs[name] for name in (*refs(op.args), *refs(tuple(v for _, v in op.kwargs))) if name in specs]
    namespace, _, rest = op.target.partition(".")
    name = f"{namespace}::{rest.split('.')[0]}"
    shapes = tuple(spec.shape for spec in read if spec.shape)
    return _key(name, next((spec.dtype for spec in read), ""), shapes)


def _key(name: str, dtype: str, shapes: Iterable[Sequence[int]]) -> str:
    return " ".join((name, dtype, *(f"[{','.join(map(str, shape))}]" for shape in shapes)))


def _inputs(dims: Sequence[Any], types: Sequence[Any]) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Shapes of the tensors among an event's inputs, those in lists too, and the first's dtype. Dims of
    numbers and of tensors of one number are empty, and left out."""
    shapes: list[tuple[int, ...]] = []
    dtype = ""
    for at, shape in enumerate(dims):
        kind = str(types[at]) if at < len(types) else ""
        of_list = bool(shape) and isinstance(shape[0], list)
        for one in shape if of_list else [shape]:
            if one:
                shapes.append(tuple(int(n) for n in one))
        if not dtype and kind in DTYPES:
            dtype = DTYPES[kind]
    return tuple(shapes), dtype


def _device_us(
    events: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
) -> dict[int, float] | None:
    """id of a call's event -> time of the kernels launched within it; None when the trace has no kernels."""
    kernels: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in DEVICE_WORK:
            kernels[event.get("args", {}).get("External id")] += float(event.get("dur", 0.0))
    if not kernels:
        return None
    result: dict[int, float] = {}
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for call in calls:
        by_thread[call.get("tid")].append(call)
    for thread in by_thread.values():
        thread.sort(key=lambda e: (float(e["ts"]), -float(e.get("dur", 0.0))))
        around: list[Mapping[str, Any]] = []
        for call in thread:
            while around and float(around[-1]["ts"]) + float(around[-1].get("dur", 0.0)) <= float(call["ts"]):
                around.pop()
            own = kernels.get(call.get("args", {}).get("External id"), 0.0)
            result[id(call)] = own
            for outer in around:
                result[id(outer)] += own
            around.append(call)
    return result


def _events(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The events, and the name of the first accelerator, empty where there is none."""
    try:
        raw = path.read_bytes()
        text = raw
        if raw[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise UsageError(f"{path}: has more than {MOST_BYTES:,} bytes; record fewer steps")
        data = parse_json(text)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not a profiler's trace: not JSON ({error})") from None
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UsageError(f"{path}: not a profiler's trace: it has no list of traceEvents")
    devices = data.get("deviceProperties") if isinstance(data, dict) else None
    first = devices[0] if isinstance(devices, list) and devices else None
    return events, str(first.get("name", "")) if isinstance(first, dict) else ""
