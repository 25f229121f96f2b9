"""How many bytes of tensors a rank has at most: counted exactly, op by op, during one step.

On accelerators the allocator keeps this figure. On processors nothing does, so the first step of a
`Runner` is walked under a dispatch mode that sees every new storage and when it goes; later steps pay
nothing. Compiled functions run outside of the mode: of these it sees what they return, and not what they
allocate between. Uses a private name, `TorchDispatchMode` of `torch.utils._python_dispatch`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.tensor.dtensor_adapter import outside_modes as uncounted


class MemoryMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that ops make while the mode is on. `peak_bytes` includes `kept`.

    kept: tensors that exist before and throughout; each storage counts once. What is made `uncounted` is no
    memory of the rank: a carrier's own buffers, which a network has elsewhere.
    """

    def __init__(self, kept: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: set[int] = set()
        self._bytes = 0
        for tensor in kept:
            self._see(tensor)
        self.peak_bytes = self._bytes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile` compile while the mode is on, here or on another thread; it would not else, as
        it asks a flag of the process."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._seen(func(*args, **(kwargs or {})))

    def outside(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a compiled function returns, called outside of the mode; its results count."""
        with uncounted():
            result = function(*args)
        return self._seen(result)

    def _seen(self, result: Any) -> Any:
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self._see(item)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage.data_ptr(), storage.nbytes()
        if key == 0 or key in self._alive:
            return
        self._alive.add(key)
        self._bytes += nbytes
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._alive.discard(key)
        self._bytes -= nbytes
