"""Saves beside steps: what is saved is copied into the processor's memory, and a thread writes the copies.

    1. Between two steps every rank copies what it owns. On an accelerator the copies are queued on a stream
       of their own, into pinned memory, and the optimizer's next step comes behind them.
    2. A thread of each rank writes the copies. The threads meet by an end of their own (`Transport.beside`).
    3. A Runner has one save at a time. The next one waits for it, and takes the same memory.

A checkpoint that is written so is as any other: complete, or not there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.errors import StrettoError
from stretto.runtime import Runner
from stretto.runtime.all_or_none import Ranks
from stretto.runtime.rank_tensors import Part
from stretto.saving.tensors import Parts

SWITCH_S = 1e-4
"""How long the thread that writes keeps Python to itself while steps wait for it, in place of Python's 5 ms:
each op of a step gives Python up, and has to get it back. Measured: else steps of 10 ms take twice as
long."""


_before_s: list[float] = []
_switching = threading.Lock()


@contextmanager
def _giving_way() -> Iterator[None]:
    """SWITCH_S while any thread writes: the interval is the process's, in which several ranks may save."""
    with _switching:
        _before_s.append(sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        with _switching:
            sys.setswitchinterval(_before_s.pop())  # the first one's by the last that ends


class Saving:
    """A save that is under way. was_waited_for: whether its end is known."""

    def __init__(self, write: Callable[[], object]) -> None:
        """write: what the thread does."""
        self._error: BaseException | None = None
        self.was_waited_for = False
        self._thread = threading.Thread(target=self._work, args=(write,), name="saving", daemon=True)
        self._thread.start()

    def _work(self, write: Callable[[], object]) -> None:
        with _giving_way():
            try:
                write()
            except BaseException as error:
                self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, which `wait` raises."""
        return self.done and self._error is not None

    def wait(self) -> None:
        """Until it is on the disk. Raises what `stretto.save` does."""
        self._thread.join()
        self.was_waited_for = True
        if self._error is not None:
            raise self._error


class Copies:
    """What a Runner's saves beside steps share: memory, an end of the transport, the one under way."""

    def __init__(self, runner: Runner) -> None:
        self.ranks: Ranks = runner.transport.beside() if runner.transport.size > 1 else runner.transport
        self.under_way: Saving | None = None
        self._memory: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        self._hook: RemovableHandle | None = None

    def of(self, parts: Parts, hooked: Optimizer | None) -> Parts:
        """Step 1. hooked: the optimizer that alone writes over parameters and its state, by its `step`; with
        None all that is queued from now on waits. Raises StrettoError where there is no memory, and
        torch.AcceleratorError as it is where the device fails."""
        device = next(
            (view.device for part in parts.values() for _, view in part.boxes if view.is_cuda), None
        )
        self._copied = None
        try:
            if device is None:
                return self._all(parts)
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                copies = self._all(parts)
                copied = self._copied = stream.record_event()
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error):
                raise
            raise StrettoError(
                "there is no memory for a copy of what is saved beside steps "
                f"({str(error).strip().splitlines()[0][:200]}): save between them "
                "(checkpoint.asynchronous = false, stretto.save)"
            ) from None
        if hooked is None:
            torch.cuda.current_stream(device).wait_event(copied)
            return copies

        if self._hook is not None:
            self._hook.remove()
        self._hook = hooked.register_step_pre_hook(
            lambda *_: torch.cuda.current_stream(device).wait_event(copied)
        )
        return copies

    def _all(self, parts: Parts) -> Parts:
        # First buffers, which a forward may write over: their copies are waited for.
        order = sorted(parts, key=lambda name: not name.startswith("buffer."))
        return {
            name: Part(
                parts[name].full_shape,
                tuple((at, self._copy(name, at, view)) for at, view in parts[name].boxes),
            )
            for name in order
        }

    @torch.no_grad()
    def _copy(self, name: str, at: tuple[int, ...], view: torch.Tensor) -> torch.Tensor:
        kept = self._memory.get((name, at))
        if kept is None or (kept.shape, kept.dtype) != (view.shape, view.dtype):
            kept = torch.empty(view.shape, dtype=view.dtype, pin_memory=view.is_cuda)
            self._memory[name, at] = kept
        return kept.copy_(view, non_blocking=not name.startswith("buffer."))

    def start(self, write: Callable[[], object]) -> Saving:
        """Step 2, of what `of` has copied."""
        copied = self._copied

        def work() -> None:
            if copied is not None:
                copied.synchronize()
            write()

        self.under_way = Saving(work)
        return self.under_way


def only_writer(runner: Runner, optimizer: Optimizer | None) -> Optimizer | None:
    """The optimizer, if its `step` is all that writes over what the Runner trains: it has every parameter,
    and no replayed step updates one (`Runner.optimizer`)."""
    if optimizer is None or runner.optimizer is not None:
        return None
    its = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = (parameter for _, parameter in runner.named_parameters() if parameter.requires_grad)
    return optimizer if all(id(parameter) in its for parameter in trained) else None


_COPIES: WeakKeyDictionary[Runner, Copies] = WeakKeyDictionary()


def copies_of(runner: Runner) -> Copies:
    """Step 3: those of the Runner, once its save that was under way has ended; every rank must call it.
    Raises what that save does."""
    end_save_of(runner)
    known = _COPIES.get(runner)
    if known is None:
        known = _COPIES[runner] = Copies(runner)
    return known


def end_save_of(runner: Runner) -> None:
    """Until the Runner's save that is under way has ended, if there is one; every rank must call it. Raises
    what that save does, once."""
    known = _COPIES.get(runner)
    if known is not None:
        before, known.under_way = known.under_way, None
        if before is not None and not before.was_waited_for:
            before.wait()
