"""A transport that shows what a real one may do with buffers until a wait has returned.

1. It keeps none: a buffer that the runtime drops before its communication is done is found missing, where a
   real transport would read or write memory that others may have by then.
2. It reads what is sent at the last moment, and finds it changed if it was written meanwhile.
3. What is received is poison until it is waited for: NaN, or the largest number. Who reads it early computes
   with that; who writes it is found out.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from stretto.runtime.transport import Handle, ThreadTransport


class PoisonError(Exception):
    """A buffer was not what it must be until its communication is done."""


def poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


class Watched:
    """A buffer that the runtime must keep. It is not kept here: its memory is known, but not kept."""

    def __init__(self, tensor: torch.Tensor, what: str) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype
        self._what = what

    def tensor(self) -> torch.Tensor:
        """The buffer, if it is still there."""
        storage = self._storage()
        if storage is None:
            raise PoisonError(f"{self._what} was freed before its communication was done")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._place)

    def must_equal(self, expected: torch.Tensor) -> None:
        found = self.tensor()
        same = (found == expected) | ((found != found) & (expected != expected))
        if not bool(same.all()):
            raise PoisonError(f"{self._what} was written before its communication was done")


class PoisonTransport(ThreadTransport):
    """The threads' transport with the manners of a real one. `checked` counts buffers that were looked at."""

    checked = 0

    @staticmethod
    def around(ends: list[ThreadTransport]) -> list[PoisonTransport]:
        return [PoisonTransport(end._board, end.rank, end._timeout_s) for end in ends]

    def send(self, lane: str, value: torch.Tensor, to: int) -> Handle:
        handle = super().send(lane, value.clone(), to)
        return _Checked(self, handle, source=(Watched(value, f"what is sent on {lane}"), value.clone()))

    def recv(self, lane: str, buffer: torch.Tensor, source: int) -> Handle:
        staged = torch.empty_like(buffer)
        return _Checked(self, super().recv(lane, staged, source), result=self._lent(lane, buffer, staged))

    def broadcast(self, lane: str, value: torch.Tensor, source: int) -> Handle:
        staged = value.clone()
        return _Checked(self, super().broadcast(lane, staged, source), result=self._lent(lane, value, staged))

    def collective(
        self, lane: str, kind: str, result: torch.Tensor, value: torch.Tensor, how: str = ""
    ) -> Handle:
        if result is value:
            staged = value.clone()
            handle = super().collective(lane, kind, staged, staged, how)
            return _Checked(self, handle, result=self._lent(lane, value, staged))
        staged, source = torch.empty_like(result), value.clone()
        handle = super().collective(lane, kind, staged, source, how)
        watched = (Watched(value, f"what {kind} gives on {lane}"), source)
        return _Checked(self, handle, source=watched, result=self._lent(lane, result, staged))

    def _lent(self, lane: str, buffer: torch.Tensor, staged: torch.Tensor) -> tuple[Watched, torch.Tensor]:
        buffer.fill_(poison_of(buffer.dtype))
        return Watched(buffer, f"the result of lane {lane}"), staged


class _Checked:
    def __init__(
        self,
        end: PoisonTransport,
        handle: Any,
        source: tuple[Watched, torch.Tensor] | None = None,
        result: tuple[Watched, torch.Tensor] | None = None,
    ) -> None:
        self._end, self._handle, self._source, self._result = end, handle, source, result

    def wait(self) -> None:
        self._handle.wait()
        self._end.checked += 1
        if self._source is not None:
            self._source[0].must_equal(self._source[1])
        if self._result is not None:
            watched, staged = self._result
            watched.must_equal(torch.full_like(staged, poison_of(staged.dtype)))
            watched.tensor().copy_(staged)
