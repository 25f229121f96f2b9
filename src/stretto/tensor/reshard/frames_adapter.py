"""Where a thread of this process stands, by its Python frames: in a communication of PyTorch, or not.

The room that knows in which of PyTorch's files a program stands when it waits for other ranks (2.11 to 2.13;
each with a test). A thread communicates if its innermost frame is

    torch/distributed/distributed_c10d.py           `dist.barrier()`, `dist.recv`, `dist.new_group`, ...
    torch/distributed/_functional_collectives*.py, .../tensor/, .../nn/      collectives of DTensor
    `__call__`, `redispatch` of torch/_ops.py       an op, such as the wait of a collective in compiled code
    `_engine_run_backward` of torch/autograd/graph.py       a wait below the backward pass, as of DDP
    anything that calls a built-in `wait()` without arguments: of the work that `async_op=True` returns

Not so `dist.monitored_barrier`, which has a time limit of its own, nor torch/distributed/checkpoint, whose
files may be slow. Ops and backward passes compute most of the time: that is found out elsewhere (`standing`).
Reads nothing but frames and the source of one line.
"""

from __future__ import annotations

import dis
import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_C10D = _DISTRIBUTED + "distributed_c10d.py"

_COMMUNICATION = (
    _C10D,
    _DISTRIBUTED + "_functional_collectives",
    _DISTRIBUTED + "tensor" + os.sep,
    _DISTRIBUTED + "nn" + os.sep,
)
"""Beginnings of the names of files."""

_CALLS = (
    (_TORCH + "_ops.py", "__call__"),
    (_TORCH + "_ops.py", "redispatch"),
    (_TORCH + os.path.join("autograd", "graph.py"), "_engine_run_backward"),
)

_NOT_THE_USERS = (_TORCH, str(Path(__file__).parents[1]) + os.sep)
"""PyTorch and `stretto.tensor`."""

_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = os.sep + "site-packages" + os.sep
"""Python's own library; installed packages may lie within."""

LONGEST_LINE = 90
"""Characters of a line of source that are shown."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread stands.

    communicates: whether that is in a communication of PyTorch.
    mark: of all frames, which one and at which instruction. Equal while the thread does not move; seldom
        also for a thread that has come to the same place again.
    file, line: of the innermost frame that is the user's; "" if there is none, as at the program's end.
    """

    communicates: bool
    mark: tuple[tuple[int, int], ...]
    file: str
    line: int

    def text(self) -> str:
        """As a user reads it: train.py:37, `dist.barrier()`."""
        if not self.file:
            return "the end of its program"
        source = linecache.getline(self.file, self.line).strip()
        shown = source if len(source) <= LONGEST_LINE else source[: LONGEST_LINE - 3] + "..."
        file = self.file.removeprefix(os.getcwd() + os.sep)
        return f"{file}:{self.line}" + (f", `{shown}`" if shown else "")


def place_of(thread: int) -> Place | None:
    """Where a thread stands, by its `threading.get_ident()`; None if it has ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    code, instruction = frame.f_code, frame.f_lasti
    communicates = _is_communication(code.co_filename, code.co_name) or _waits(code, instruction)
    mark: list[tuple[int, int]] = []
    file, line = "", 0
    while frame is not None:
        mark.append((id(frame), frame.f_lasti))
        name = frame.f_code.co_filename
        if name == _C10D and frame.f_code.co_name == "monitored_barrier":
            communicates = False
        if not file and _is_users(name):
            file, line = name, frame.f_lineno
        frame = frame.f_back  # none is kept: a frame holds what its variables hold
    return Place(communicates, tuple(mark), file, line)


def _is_communication(file: str, function: str) -> bool:
    return file.startswith(_COMMUNICATION) or (file, function) in _CALLS


def _is_users(file: str) -> bool:
    if file.startswith(("<", *_NOT_THE_USERS)):
        return False
    return _PACKAGES in file or not file.startswith(_LIBRARY)


@lru_cache(maxsize=256)
def _waits(code: CodeType, instruction: int) -> bool:
    """Whether a frame stands in a call of a built-in `wait()`: Python's own locks wait in Python frames."""
    if "wait" not in code.co_names:
        return False
    before: dis.Instruction | None = None
    for one in dis.get_instructions(code):
        if one.opname in ("CACHE", "PRECALL", "PUSH_NULL") and one.offset != instruction:
            continue
        if one.offset >= instruction:
            is_call = one.opname in ("CALL", "PRECALL", "CALL_METHOD", "CALL_FUNCTION") and not one.arg
            return is_call and before is not None and before.argval == "wait"
        before = one
    return False
