"""All ranks make the same reshards in the same order: where they do not, all of them end with an error.

A tensor on many meshes is one tensor for all ranks, so every rank, those off both meshes too, comes to every
reshard. Each call has a number, counted from 1 on each rank, and a text: dtype, shape, both layouts. Through
the store of the default process group:

1. The first rank to come to a number writes its text; every later one compares (`compare_set`: one answer
   from the store, no waiting for other ranks). A difference is an error at once, and sets the alarm.
2. A rank that waits for a message looks every `LOOK_S` whether there is an alarm, or whether a rank that it
   needs has ended its program before it came to this number; either is an error.
3. A rank that waits longer than the patience gives up, and sets the alarm: one that it needs is late, or
   skips the reshard and waits for something else. The patience is long, for a rank may well be busy:
   `STRETTO_RESHARD_PATIENCE_S`. A rank that waits in a collective of PyTorch meanwhile fails when the others
   have ended, or at the time limit of its process group.
4. At the end of the program ranks compare how many reshards they have made; to differ is an error too.

It costs two answers from the store a call, 0.1 ms on one machine. The check is always on: what it finds would
else be a hang, or wrong numbers. Old texts are deleted, so that the store does not grow.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from stretto.errors import RunError
from stretto.tensor.dtensor_adapter import shared_store
from stretto.tensor.errors import disagreement
from stretto.tensor.reshard.at_end import LAST_LOOK, LEAVE, at_end, fails_already

ALARM = "alarm"
"""Key of the store: why all ranks must end."""

LOOK_S = 1.0
"""How often a waiting rank looks for an alarm: rare enough to cost nothing, and an error is quick enough."""

PATIENCE_S = 300.0
"""How long a rank waits for another unless told otherwise. Assumed: longer than a pause for a checkpoint."""

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
    """This rank's side of the comparison, for one life of the default process group."""

    def __init__(self, generation: int) -> None:
        self.rank = dist.get_rank()
        self.number = 0
        """Of the last reshard that this rank came to."""
        self._ranks = dist.get_world_size()
        self._told = False
        """Whether the program has been given an error that all ranks are told of."""
        self._store: Any = None
        # A fake group has no other ranks, and a store that remembers nothing.
        if dist.get_backend() != "fake":
            self._store = shared_store(f"stretto/reshard/{generation}")

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with: the process group is a fake one."""
        return self._store is None

    def enter(self, text: str) -> int:
        """Come to the next reshard. Returns its number.

        Raises RunError if another rank came to this number with another text, or an alarm is set.
        """
        self.number += 1
        if self._store is None:
            return self.number
        mine = f"{self.rank}|{text}"
        try:
            found = self._store.compare_set(f"call/{self.number}", "", mine).decode()
            if found == mine and self.number > KEPT:
                self._store.delete_key(f"call/{self.number - KEPT}")
        except dist.DistError:
            return self.number  # the rank that keeps the store has ended: nothing to compare with
        whose, _, theirs = found.partition("|")
        if theirs != text:
            error = disagreement(self.rank, self.number, text, f"on rank {whose} it is {theirs}")
            self.raise_alarm(str(error))
            raise error
        self._raise_if_alarmed()
        return self.number

    def raise_alarm(self, text: str) -> None:
        """Tell all ranks that this one cannot go on. The first alarm stays."""
        if self._store is not None:
            try:
                self._told = True
                self._store.compare_set(ALARM, "", f"{self.rank}|{text}")
            except dist.DistError:
                return  # nobody is left to hear it

    def _raise_if_alarmed(self) -> None:
        if self._store is None:
            return
        try:
            if not self._store.check([ALARM]):
                return
            whose, _, text = self._store.get(ALARM).decode().partition("|")
        except dist.DistError:
            return
        self._told = True
        raise RunError(
            f"rank {self.rank} stops at reshard number {self.number}, for rank {whose} failed: {text}"
        )

    def look_out(self, number: int, peers: Sequence[int], since_s: float, waits_for: str) -> None:
        """What a waiting rank does every `LOOK_S`.

        number: of the reshard. peers: ranks it needs. since_s: `time.monotonic()` when it began to wait.
        Raises RunError if they will not come.
        """
        if self._store is None:
            return
        self._raise_if_alarmed()
        for peer in peers:
            ended = self._ended(peer)
            if ended is not None and ended < number:
                error = RunError(
                    f"rank {self.rank} waits in reshard number {number} ({waits_for}), but rank {peer} has "
                    f"ended after reshard number {ended}. All ranks, those off the meshes too, must make "
                    "every reshard; look for a call, or a backward pass, that only some ranks make"
                )
                self.raise_alarm(str(error))
                raise error
        if time.monotonic() - since_s > patience_s():
            error = RunError(
                f"rank {self.rank} has waited {patience_s():.0f} s in reshard number {number} ({waits_for}); "
                f"one of ranks {sorted(peers)} is late, or does not make this call. All ranks, those off the "
                "meshes too, must make every reshard and every collective of theirs in one order; PyTorch's "
                "flight recorder (TORCH_FR_BUFFER_SIZE=2000, then torchfrtrace) says where each rank waits. "
                "If one may be so late, set STRETTO_RESHARD_PATIENCE_S higher"
            )
            self.raise_alarm(str(error))
            raise error

    def _ended(self, peer: int) -> int | None:
        assert self._store is not None
        try:
            if self._store.check([f"ended/{peer}"]):
                return int(self._store.get(f"ended/{peer}"))
        except dist.DistError:
            pass
        return None

    def meet(self, name: str, ranks: Sequence[int]) -> None:
        """Wait until all of `ranks` have come here, before they make a process group, which must not wait
        for one that never comes. Raises RunError as `look_out` does."""
        if self._store is None:
            return
        wanted = [f"meet/{name}/{rank}" for rank in ranks]
        began = looked = time.monotonic()
        try:
            self._store.set(f"meet/{name}/{self.rank}", "")
            while not self._store.check(wanted):
                time.sleep(MEET_S if looked == began else LATE_MEET_S)
                if time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    self.look_out(self.number, ranks, began, f"to connect ranks {list(ranks)}")
        except dist.DistError as error:
            raise RunError(
                f"rank {self.rank}: the rank that keeps the store has ended, in reshard number "
                f"{self.number}; its own output says why"
            ) from error

    def leave(self) -> None:
        """This rank's program ends: tell those who may wait for it."""
        if self._store is not None:
            try:
                self._store.set(f"ended/{self.rank}", str(self.number))
            except dist.DistError:
                self._store = None  # it has ended, and each further question would print that it has

    def keep_store(self, failed: bool) -> None:
        """Rank 0 keeps the store where no launcher does, and leaves last, for the others look there; where it
        fails itself, as soon as they know that."""
        if self._store is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        try:
            self._store.add("left", 1)
            if self.rank != 0 or (failed and not self._told):
                return
            end = time.monotonic() + (FAIL_S if failed else LEAVE_S)
            while time.monotonic() < end and self._store.add("left", 0) < self._ranks:
                time.sleep(0.01)
        except dist.DistError:
            return

    def last_look(self) -> RunError | None:
        """At the very end: did all ranks make as many reshards, and did none fail? The first to end is
        asked."""
        if self._store is None:
            return None
        try:
            self._raise_if_alarmed()
            found = self._store.compare_set("last", "", f"{self.rank}|{self.number}").decode()
        except RunError as error:
            return error
        except dist.DistError:
            return None
        whose, _, count = found.partition("|")
        if int(count) == self.number:
            return None
        differs = RunError(
            f"rank {self.rank} has made {self.number} reshards in this run, and rank {whose} {count}: one of "
            "them has skipped some, or a backward pass; gradients or values may be missing"
        )
        self.raise_alarm(str(differs))
        return differs


_current: tuple[dist.ProcessGroup, Agreement] | None = None
_generations = 0


def agreement() -> Agreement:
    """The agreement of the default process group as it is now."""
    global _current, _generations
    group = dist.group.WORLD
    assert group is not None, "there is a mesh, so there is a process group"
    if _current is None or _current[0] is not group:
        at_end(_leave, LEAVE)
        at_end(_last_look, LAST_LOOK)
        _generations += 1
        _current = (group, Agreement(_generations))
    return _current[1]


def _leave() -> None:
    if _current is not None:
        _current[1].leave()


def _last_look() -> None:
    if _current is None:
        return
    agreed, failed = _current[1], fails_already()
    error = None if failed else agreed.last_look()
    agreed.keep_store(failed or error is not None)
    if error is not None:
        # Nobody is left to catch it, and the program must not end as if all were well.
        sys.stdout.flush()
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
