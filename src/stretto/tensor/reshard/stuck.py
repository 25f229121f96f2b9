"""Finds out that no rank can go on, and ends all of them: a thread of each rank that looks now and then.

A rank that waits for another cannot know whether that one is busy and will come, or stands elsewhere and
never will. All of them together can. Every `Pace.look_s`, each rank's thread does this:

1. It looks whether its rank stands (`standing`). If not, that is all: no rank is asked, and the store is not
   touched. Only a rank that has stood for `stands_s` goes on.
2. If there is an alarm, and its rank stands elsewhere, where it is not told, and it still stands `end_s`
   later, the thread prints the alarm and ends the process. Nobody will come to where it stands. (A rank that
   waits in a reshard hears the alarm itself, and gets an exception.)
3. It takes part in a round, once: it writes where its rank stands, and whether it has stood since it took
   part in the round before. A round ends when all ranks have taken part, or have ended their programs, and
   `round_s` after; then the next one begins.
4. In a round in which every rank has stood since the one before, all of them stood at the moment between the
   two, and no byte was under way. So none of them will ever go on. If one waits in a reshard, or they have
   made different numbers of them, that is an alarm, which says where each rank stands. (Else the program
   stands in collectives of its own, whose time limits are PyTorch's.)

A busy rank takes part in no round, so the others wait for it. With the default pace an alarm comes 9 to 11 s
after the last rank has begun to stand, and the last rank ends some 6 s later.

The thread has its own connection to the store, for questions on one connection wait for one another, and it
makes it when its rank first stands. It ends with the store, and before the interpreter does (`stop`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from stretto.tensor.reshard.standing import Standing, Whereabouts

ALARM, HEARD, GONE = "alarm", "heard", "gone"
"""Keys of the store: why all ranks must end; how many know (`hears`); how many have ended their programs."""

STOP_S = 2.0
"""How long the end of a program waits for the thread, which may ask the store. Assumed."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often the thread looks, and how long what it sees must last, in seconds.

    Assumed: long enough that a rank between two collectives does not seem to stand, and short enough that all
    ranks have ended within 30 s.
    """

    look_s: float = 1.0
    stands_s: float = 4.0
    round_s: float = 4.0
    end_s: float = 5.0


PACE = Pace()


def word_key(rank: int) -> str:
    """Where a rank writes where it stands."""
    return f"stands/{rank}"


def hears(store: Any, here: Whereabouts) -> None:
    """This rank knows of the alarm, or needs not know any more; counted once."""
    if not here.hears:
        here.hears = True
        store.add(HEARD, 1)


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank writes in a round: see step 3. text: where it stands."""

    rank: int
    round: int
    same: bool
    number: int
    waits: bool
    text: str

    def written(self) -> str:
        """As it is in the store."""
        return f"{self.round}|{self.same:d}|{self.number}|{self.waits:d}|{self.text}"

    @staticmethod
    def read(rank: int, written: str) -> Word:
        """The inverse of `written`."""
        at_round, same, number, waits, text = written.split("|", 4)
        return Word(rank, int(at_round), same == "1", int(number), waits == "1", text)


ENDED_ROUND = -1
"""The round of the last word of a rank that has ended its program."""


def verdict(words: list[Word], at_round: int) -> str | None:
    """The alarm, if these are words of all ranks, and say that no rank can go on: step 4."""
    if not all(word.round == ENDED_ROUND or (word.round == at_round and word.same) for word in words):
        return None
    if not any(word.waits for word in words) and len({word.number for word in words}) == 1:
        return None
    alike: dict[tuple[int, str], list[int]] = {}
    for word in words:
        alike.setdefault((word.number, word.text), []).append(word.rank)
    lines = [f"  {_ranks(ranks)} {text}" for (_, text), ranks in alike.items()]
    return "\n".join(
        [
            "no rank can go on, for each of them waits for another:",
            *lines,
            "All ranks, those off the meshes too, must make every reshard and every collective of theirs in "
            "one order; look for a call, or a backward pass, that only some ranks make",
        ]
    )


def _ranks(ranks: list[int], most: int = 8) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:most]))
    return f"ranks {shown}" + (f" and {len(ranks) - most} more" if len(ranks) > most else "")


def port_of(store: Any) -> int:
    """The TCP port of a store; 0 if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store  # that of which this one is a part
    return int(getattr(store, "port", 0))


class LookOut:
    """The thread of one rank, in one life of the default process group.

    store: that all ranks share, with `clone` for another connection. here: what the rank says of itself.
    """

    def __init__(self, rank: int, ranks: int, store: Any, here: Whereabouts) -> None:
        self._rank, self._ranks, self._connect, self._here = rank, ranks, store.clone, here
        self._standing = Standing(here, port_of(store))
        self._store: Any = None
        self._joined = (-1, 0, 0.0)  # round, episode, when
        self._heard: tuple[int, float] | None = None  # episode, when
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stretto look-out", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Before the interpreter ends: a thread that is then in the store's code would take all with it."""
        self._stopped.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(PACE.look_s):
                if self._standing.look() >= PACE.stands_s:  # 1
                    self._store = self._store or self._connect()
                    self._hear() if self._store.check([ALARM]) else self._take_part()
        except dist.DistError:
            return  # the store has ended: nobody can be asked

    def _hear(self) -> None:
        """2: an alarm, and this rank stands where its program does not hear it."""
        now = time.monotonic()
        hears(self._store, self._here)
        if self._here.waits is not None or self._here.told:
            return
        if self._heard is None or self._heard[0] != self._standing.episode:
            self._heard = (self._standing.episode, now)
        elif now - self._heard[1] >= PACE.end_s:
            whose, _, text = self._store.get(ALARM).decode().partition("|")
            why = f"for rank {whose} failed: {text}" if whose else text
            sys.stdout.flush()
            print(f"rank {self._rank} ends: it {self._standing.text()}; {why}", file=sys.stderr, flush=True)
            os._exit(1)  # its program stands in PyTorch's code, which no exception reaches

    def _take_part(self) -> None:
        """3: in the round that is now, once; and end it when all have."""
        now = time.monotonic()
        at_round = self._store.add("round", 0)
        if self._joined[0] != at_round:
            self._write(at_round, self._joined[:2] == (at_round - 1, self._standing.episode))
            self._joined = (at_round, self._standing.episode, now)
        gone = self._store.add(GONE, 0)
        if self._store.add(f"same/{at_round}", 0) + gone >= self._ranks and self._first("judge", at_round):
            self._judge(at_round)
        all_here = self._store.add(f"here/{at_round}", 0) + gone >= self._ranks
        if all_here and now - self._joined[2] >= PACE.round_s and self._first("next", at_round):
            self._store.add("round", 1)
            for old in ("here", "same", "judge", "next"):
                self._store.delete_key(f"{old}/{at_round - 1}")

    def _write(self, at_round: int, same: bool) -> None:
        here = self._here
        word = Word(self._rank, at_round, same, here.number, here.waits is not None, self._standing.text())
        self._store.set(word_key(self._rank), word.written())
        if same:
            self._store.add(f"same/{at_round}", 1)
        self._store.add(f"here/{at_round}", 1)

    def _first(self, what: str, at_round: int) -> bool:
        """Whether this rank is the first to do it: one does it for all."""
        mine = str(self._rank)
        return bool(self._store.compare_set(f"{what}/{at_round}", "", mine).decode() == mine)

    def _judge(self, at_round: int) -> None:
        """4. Counts may be a rank too high, for one may have taken part and then ended: words are exact."""
        keys = [word_key(rank) for rank in range(self._ranks)]
        if not self._store.check(keys):
            return
        words = [
            Word.read(rank, written.decode()) for rank, written in enumerate(self._store.multi_get(keys))
        ]
        alarm = verdict(words, at_round)
        if alarm is not None:
            self._store.compare_set(ALARM, "", f"|{alarm}")
