"""Outputs of nccl-tests (and rccl-tests), text or JSON, as calibration of collectives.

A text has one run or several, among whatever else was printed. A run begins with `# nThread ...` or
`# Using devices`, lists its ranks (`#  Rank  0 ... Pid ... on host device  0 ...`), and has a table whose
header (`#  size  count  type ...  time  algbw  busbw ...`) says which column is what: the columns up to the
first `time` belong to a row, those from there on are repeated, out of place and then in place. Tools that
gather output put `[1,0]<stdout>:` before lines. In JSON (option -J), `config.devices` lists ranks and
`results` has rows with `size`, `out_of_place` and `in_place`.

Reads the one file that it is given.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.files.parse import parse_json
from stretto.ir.collectives import ALL_REDUCE, KINDS
from stretto.ir.curve import Curve

PROGRAMS = {kind.benchmark: name for name, kind in KINDS.items() if kind.benchmark}
"""Names of the test programs, `<name>_perf`; `size` is the full tensor in all of them, as in
`price.collectives`."""

_PREFIX = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:\s?")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*\bPid\b.*\bdevice\b")
_PROGRAM = re.compile(r"\b(" + "|".join(PROGRAMS) + r")_perf")
_NEW_RUN = re.compile(r"^#\s*(nThread\s|Using devices|Collective test starting)")


@dataclass
class _Run:
    line: int
    kind: str | None = None
    ranks: int = 0
    columns: list[str] = field(default_factory=list)
    rows: list[tuple[float, float, float, float]] = field(default_factory=list)
    """(bytes, us, algorithm rate, bus rate)"""


def read_nccl_tests(path: str | Path) -> dict[tuple[str, int], Curve]:
    """Curves by (kind, group size): microseconds over the bytes of the full tensor. Out-of-place times count,
    in-place ones where a row has no other, of repeated sizes the fastest. Where a text names no program, the
    rates decide where they can. Raises UsageError that names the file, the line, and what was expected."""
    path = Path(path)
    try:
        return _curves(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: is no output of nccl-tests: {error}. Give it as the program printed it"
        ) from None


def _curves(path: Path) -> dict[tuple[str, int], Curve]:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no file; give an output of nccl-tests")
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    runs = _json_runs(path, text) if text.lstrip().startswith("{") else _text_runs(path, text)
    samples: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        if not run.rows:
            continue
        if run.ranks < 2:
            raise UsageError(
                f"{path}:{run.line}: this run lists {run.ranks or 'no'} ranks; expected lines such as "
                "'#  Rank  0 Group  0 Pid 1234 on host device  0 ...' for 2 or more"
            )
        key = (run.kind or _guess(path, run), run.ranks)
        samples[key] += [(nbytes, us) for nbytes, us, _, _ in run.rows]
    if not samples:
        raise UsageError(
            f"{path}: has no nccl-tests result: expected a table under a header "
            "'#  size  count  type  redop  root  time  algbw  busbw', or the JSON of option -J"
        )
    return {key: Curve.fitted(points) for key, points in samples.items()}


def _text_runs(path: Path, text: str) -> Iterator[_Run]:
    run = _Run(1)
    program: str | None = None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _PREFIX.sub("", raw).strip()
        if _NEW_RUN.match(line) and run.rows:
            yield run
            run = _Run(number)
        named = _PROGRAM.search(line)
        if named:
            program = PROGRAMS[named[1]]
        # A command after a table is the next run's; only the closing line still speaks of this one.
        if not run.rows or (run.kind is None and "concluded" in line):
            run.kind = program
        rank = _RANK.match(line)
        if rank:
            run.ranks = max(run.ranks, int(rank[1]) + 1)
        elif line.startswith("#"):
            words = line.lstrip("# ").split()
            if words[:1] == ["size"] and ("time" in words or "cputime" in words):
                run.columns = words
        elif run.columns and re.match(r"^\d+\s", line):
            run.rows.append(_row(path, number, line, run.columns))
    yield run


def _row(path: Path, number: int, line: str, columns: list[str]) -> tuple[float, float, float, float]:
    words = line.split()
    first = next(i for i, name in enumerate(columns) if name in ("time", "cputime"))
    # Programs without a reduction or a root may leave these columns blank.
    first -= max(0, len(columns) - len(words))
    try:
        size = float(words[0])
        us, algorithm, bus = (float(word) for word in words[first : first + 3])
    except ValueError:
        raise UsageError(
            f"{path}:{number}: cannot read {line.strip()!r}: expected numbers in the columns "
            f"{', '.join(columns[: first + 3])}"
        ) from None
    if not (math.isfinite(us) and us > 0):
        raise UsageError(f"{path}:{number}: a time of {us} us; expected more than 0")
    return size, us, algorithm, bus


def _guess(path: Path, run: _Run) -> str:
    """The kind of a run that no line names: by the ratio of its rates, which only all_reduce has alone."""
    ratios = [bus / algorithm for _, _, algorithm, bus in run.rows if algorithm >= 1.0]
    if ratios and run.ranks > 2 and abs(ratios[-1] - 2 * (run.ranks - 1) / run.ranks) < 0.05:
        return ALL_REDUCE.name
    raise UsageError(
        f"{path}:{run.line}: no line of this run names its program; expected one of "
        f"{', '.join(f'{name}_perf' for name in PROGRAMS)} before the table"
    )


def _json_runs(path: Path, text: str) -> Iterator[_Run]:
    try:
        full = parse_json(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: is not JSON: {error.msg}") from None
    except ValueError as error:
        raise UsageError(f"{path}: is not readable as JSON: {error}") from None
    if not isinstance(full, dict):
        raise UsageError(f"{path}: expected an object with config and results, as nccl-tests -J writes it")
    config, results = full.get("config"), full.get("results")
    if not isinstance(config, dict) or not isinstance(results, list):
        raise UsageError(f"{path}: expected the keys config and results, as nccl-tests -J writes them")
    devices = config.get("devices", [])
    run = _Run(1, ranks=max((int(d["rank"]) + 1 for d in devices if "rank" in d), default=0))
    if run.ranks < 2:
        # Without MPI one entry covers all devices of the process.
        run.ranks = int(config.get("nthreads", 1)) * int(config.get("ngpus", 1))
    for argument in full.get("args", []):
        named = _PROGRAM.search(str(argument))
        if named:
            run.kind = PROGRAMS[named[1]]
    for index, result in enumerate(results):
        run.rows.append(_json_row(f"{path}: results[{index}]", result))
    yield run


def _json_row(where: str, result: Mapping[str, Any]) -> tuple[float, float, float, float]:
    body = result.get("out_of_place") or result.get("in_place")
    try:
        assert body is not None
        us = body["time"] if "time" in body else body["cpu_time"]
        row = float(result["size"]), float(us), float(body["alg_bw"]), float(body["bus_bw"])
    except (AssertionError, KeyError, TypeError, ValueError):
        raise UsageError(
            f"{where}: expected size, and out_of_place or in_place with time, alg_bw and bus_bw"
        ) from None
    if not (math.isfinite(row[1]) and row[1] > 0):
        raise UsageError(f"{where}: a time of {row[1]} us; expected more than 0")
    return row
