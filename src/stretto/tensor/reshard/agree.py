"""All ranks make the same reshards in the same order: where they do not, all of them end with an error.

Every rank, those off both meshes too, comes to every reshard. Each call has a number, counted from 1 on each
rank, and a text: dtype, shape, both layouts. Through the store of the default process group:

1. The first rank to come to a number writes its text; every later one compares (`compare_set`: one answer
   from the store, no waiting for other ranks). A difference is an error at once, and sets the alarm.
2. A rank that waits for a message looks every `LOOK_S` whether there is an alarm, or whether a rank that it
   needs has ended its program before it came to this number; either is an error.
3. A rank that waits longer than the patience (`STRETTO_RESHARD_PATIENCE_S`) sets the alarm. A rank that waits
   in a collective of PyTorch meanwhile fails when the others have ended.
4. At the end of the program ranks compare how many reshards they have made; to differ is an error too.

It costs two answers from the store a call, 0.1 ms on one machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from stretto.errors import RunError
from stretto.tensor.dtensor_adapter import shared_store

ALARM = "alarm"
"""Key of the store: why all ranks must end."""

LOOK_S = 1.0
"""How often a waiting rank looks for an alarm: rare enough to cost nothing, and an error is quick enough."""

PATIENCE_S = 300.0
"""How long a rank waits for another by default. Assumed: longer than a pause for a checkpoint."""

LEAVE_S, FAIL_S = 20.0, 3.0
"""How long the rank that keeps the store waits at its end for the others; and when it fails with an alarm,
which they must still hear. Assumed."""

MEET_S, LATE_MEET_S = 0.002, 0.05
"""How often a rank asks whether others have come: at first, and after `LOOK_S`."""

KEPT = 1024
"""Texts that stay in the store. A rank further behind than this is not compared."""


def patience_s() -> float:
    """How long a rank waits for another: `STRETTO_RESHARD_PATIENCE_S`, else `PATIENCE_S`."""
    return float(os.environ.get("STRETTO_RESHARD_PATIENCE_S", PATIENCE_S))


class Agreement:
    """This rank's side of the comparison, for one life of the default process group.

    drain: what this rank does at its end before it takes a last look: it waits until all that it sent has
    left, and raises RunError if it will not.
    """

    def __init__(self, generation: int) -> None:
        self.rank = dist.get_rank()
        self.number = 0
        """Of the last reshard that this rank came to."""
        self.drain: Callable[[], None] = lambda: None
        self._ranks = dist.get_world_size()
        self._reported = False
        """Whether the program has been given an error that all ranks get."""
        self._store: Any = None
        # A fake group has no other ranks, and a store that remembers nothing.
        if dist.get_backend() != "fake":
            self._store = shared_store(f"stretto/reshard/{generation}")

    def _ask(self, what: str, *given: Any) -> Any:
        """What the store answers; None where there is none, or the rank that keeps it has ended."""
        try:
            return None if self._store is None else getattr(self._store, what)(*given)
        except dist.DistError:
            self._store = None  # each further question would print that it has ended
            return None

    def _first(self, key: str, text: str) -> tuple[str, str]:
        """What the first rank to come to a key has written there: that rank, and its text."""
        result = self._ask("compare_set", key, "", f"{self.rank}|{text}")
        whose, _, first = (f"{self.rank}|{text}" if result is None else result.decode()).partition("|")
        return whose, first

    def enter(self, text: str) -> int:
        """Come to the next reshard. Returns its number.

        Raises RunError if another rank came to this number with another text, or an alarm is set.
        """
        self.number += 1
        whose, theirs = self._first(f"call/{self.number}", text)
        if theirs != text:
            raise self.alarm(
                f"rank {self.rank}: reshard number {self.number} of this run is {text}; but on rank {whose} "
                f"it is {theirs}. All ranks, those off the meshes too, must call stretto.reshard in the same "
                "order, with the same shape, meshes and placements; look for a call, or a backward pass, "
                "that only some ranks make"
            )
        if whose == str(self.rank) and self.number > KEPT:
            self._ask("delete_key", f"call/{self.number - KEPT}")
        self._raise_if_alarmed()
        return self.number

    def alarm(self, text: str) -> RunError:
        """Say on all ranks that this one cannot go on; the first alarm stays. Returns the error to raise."""
        self._reported = True
        self._first(ALARM, text)
        return RunError(text)

    def _raise_if_alarmed(self) -> None:
        result = self._ask("get", ALARM) if self._ask("check", [ALARM]) else None
        if result is not None:
            self._reported = True
            whose, _, text = result.decode().partition("|")
            raise RunError(
                f"rank {self.rank} stops at reshard number {self.number}, for rank {whose} failed: {text}"
            )

    def look_out(self, number: int, peers: Sequence[int], since_s: float, waits_for: str) -> None:
        """What a waiting rank does every `LOOK_S`.

        number: of the reshard. peers: ranks it needs. since_s: `time.monotonic()` when it began to wait.
        Raises RunError if they will not come.
        """
        self._raise_if_alarmed()
        for peer in peers:
            ended = self._ask("get", f"ended/{peer}") if self._ask("check", [f"ended/{peer}"]) else None
            if ended is not None and int(ended) < number:
                raise self.alarm(
                    f"rank {self.rank} waits in reshard number {number} ({waits_for}), but rank {peer} "
                    f"has ended after reshard number {int(ended)}. All ranks, those off the meshes too, "
                    "must make every reshard; look for a call, or a backward pass, that only some ranks "
                    "make"
                )
        if time.monotonic() - since_s > patience_s():
            raise self.alarm(
                f"rank {self.rank} has waited {patience_s():.0f} s in reshard number {number} "
                f"({waits_for}); one of ranks {sorted(peers)} is late, or does not make this call. All "
                "ranks, those off the meshes too, must make every reshard and every collective of theirs "
                "in one order; PyTorch's flight recorder (TORCH_FR_BUFFER_SIZE=2000, then torchfrtrace) "
                "says where each rank waits. If one may be so late, set STRETTO_RESHARD_PATIENCE_S higher"
            )

    def meet(self, name: str, ranks: Sequence[int]) -> None:
        """Wait until all of `ranks` have come here, before they make a process group, which must not wait
        for one that never comes. Raises RunError as `look_out` does."""
        if self._store is None:
            return
        wanted = [f"meet/{name}/{rank}" for rank in ranks]
        began = looked = time.monotonic()
        self._ask("set", f"meet/{name}/{self.rank}", "")
        while not self._ask("check", wanted):
            if self._store is None:
                raise RunError(
                    f"rank {self.rank}: the rank that keeps the store has ended, in reshard number "
                    f"{self.number}; its own output says why"
                )
            time.sleep(MEET_S if looked == began else LATE_MEET_S)
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                self.look_out(self.number, ranks, began, f"to connect ranks {list(ranks)}")

    def end(self) -> None:
        """This rank's program ends: it says so, for who waits for a later reshard need not wait until all
        that it sent has left; then, did all ranks make as many reshards, and did none fail? The first to end
        is asked. The process ends here with an error that no one is left to catch.
        """
        failed = sys.exc_info()[0] is not None or getattr(sys, "last_type", None) is not None
        self._ask("set", f"ended/{self.rank}", str(self.number))
        error: RunError | None = None
        try:
            self.drain()
            if not failed:
                self._raise_if_alarmed()
                whose, count = self._first("last", str(self.number))
                if int(count) != self.number:
                    raise self.alarm(
                        f"rank {self.rank} has made {self.number} reshards in this run, and rank {whose} "
                        f"{count}: one of them has skipped some, or a backward pass; gradients or values "
                        "may be missing"
                    )
        except RunError as found:
            error = found
        self._keep_store(failed or error is not None)
        if error is not None and not failed:
            sys.stdout.flush()
            print(error, file=sys.stderr, flush=True)
            os._exit(1)

    def _keep_store(self, failed: bool) -> None:
        """Rank 0 keeps the store where no launcher does, and leaves last, for the others look there; where it
        fails itself, as soon as they know that."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        left = self._ask("add", "left", 1)
        end = time.monotonic() + (FAIL_S if failed else LEAVE_S)
        if self.rank == 0 and (self._reported or not failed):
            while left is not None and left < self._ranks and time.monotonic() < end:
                time.sleep(0.01)
                left = self._ask("add", "left", 0)


_current: tuple[dist.ProcessGroup, Agreement] | None = None
_generations = 0
_ends_in = 0
"""The process at whose end `_end` is called: a child of `multiprocessing` forgets what its parent asked."""


def agreement() -> Agreement:
    """The agreement of the default process group as it is now."""
    global _current, _generations, _ends_in
    group = dist.group.WORLD
    assert group is not None, "there is a mesh, so there is a process group"
    if _current is None or _current[0] is not group:
        if _ends_in != os.getpid():
            _ends_in = os.getpid()
            Finalize(None, _end, exitpriority=0)  # children of `multiprocessing` do not run `atexit`
        _generations += 1
        _current = (group, Agreement(_generations))
    return _current[1]


def _end() -> None:
    if _current is not None:
        _current[1].end()
