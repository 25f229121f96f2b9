"""One row a kind of communication. What is done with it, wherever that is, is read off its row.

Each of a group's `size` members gives a tensor of the same shape, and receives rows (dim 0) of all of them:
`sent` says which of a sender's rows a receiver gets, and `sums` whether these are added up or put one behind
another, in the order of the group. Shapes, bytes, messages between processors, what ranks that are threads
give each other and what a single rank makes up follow from the two.

A program starts a kind by `comm.<name>(value, [how,] axis, size)`. `cost` is the key to its curve in `Costs`.
To add a kind: a row here. One that gathers or sums also needs its call on `torch.distributed`
(`stretto.backend.collectives.CALLS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, TypeAlias

Rows: TypeAlias = tuple[int, int]
"""Where some rows of a tensor begin and end."""

Sent: TypeAlias = Callable[[int, int, int, int], Rows]
"""(rows of each member, sender, receiver, members) -> which of the sender's rows the receiver gets."""

Route: TypeAlias = Literal["ring", "direct", "chain", "pair"]
"""How it goes over links: around a ring; from each to each; from the first through all; from one to one."""


def _full(rows: int, sender: int, receiver: int, size: int) -> Rows:
    return 0, rows


def _part(rows: int, sender: int, receiver: int, size: int) -> Rows:
    return rows // size * receiver, rows // size * (receiver + 1)


def _next(rows: int, sender: int, receiver: int, size: int) -> Rows:
    return (0, rows) if receiver == (sender + 1) % size else (0, 0)


def _previous(rows: int, sender: int, receiver: int, size: int) -> Rows:
    return _next(rows, receiver, sender, size)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of communication.

    name: in targets, costs, timelines. sent, sums: what it does (see the module).
    splits: whether each of a sender's rows goes to exactly one receiver.
    reductions: those that a start may name; none where nothing is reduced.
    in_place: it works on a copy of what is given. Otherwise the given tensor is in flight: it must stay as it
        is until the wait.
    differs: whether what members get differs: never, always, or where what they gave does.
    gradient: the kind that the gradient goes back by. A sum's is itself: where the result is used in parts,
        the parts' gradients are summed.
    turns: how many times the full tensor goes around the group; route: how.
    priced_as: the kind by whose curve it is priced (`cost`), itself by default.
    in_programs: whether ops start it; others are the runtime's own.
    benchmark: what nccl-tests call it.
    """

    name: str
    sent: Sent
    benchmark: str
    gradient: str
    route: Route = "ring"
    turns: int = 1
    sums: bool = False
    splits: bool = False
    reductions: tuple[str, ...] = ()
    in_place: bool = False
    differs: Literal["never", "always", "as given"] = "always"
    priced_as: str = ""
    in_programs: bool = True

    @property
    def target(self) -> str:
        """The op that starts it."""
        return f"comm.{self.name}"

    @property
    def cost(self) -> str:
        return self.priced_as or self.name

    def knows(self, how: str) -> bool:
        """Whether a start may name this reduction, or where nothing is reduced, names none ("")."""
        return how in (self.reductions or ("",))

    def shape(self, shape: Sequence[int], size: int, how: str = "") -> tuple[int, ...] | None:
        """The shape of what each member gets; None where a tensor of `shape` cannot be communicated so."""
        if self.in_place:
            return tuple(shape)
        rows = _result_rows(self, shape[0], size) if shape and self.knows(how) else None
        return None if rows is None else (rows, *shape[1:])

    def gives(self, rows: int, me: int, size: int) -> list[Rows]:
        """Which of its own rows a member gives to each."""
        return [self.sent(rows, me, other, size) for other in range(size)]

    def gets(self, rows: int, me: int, size: int) -> list[Rows]:
        """Which rows of its result a member gets from each; all the same ones where they are added up."""
        counts = [stop - start for start, stop in (self.sent(rows, m, me, size) for m in range(size))]
        if self.sums:
            return [(0, count) for count in counts]
        return [(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]

    def full_nbytes(self, nbytes: int, size: int) -> int:
        """Bytes of the full tensor, by which it is priced: what is reduced, gathered or scattered, or what a
        member gives. nbytes: of the result."""
        return nbytes * size if self.sums and self.splits else nbytes

    def moved(self, size: int) -> float:
        """What each member sends over its link, in parts of the full tensor."""
        return self.turns * (size - 1) / size if self.route in ("ring", "direct") else 1.0

    def steps(self, size: int) -> int:
        """Latencies, one after another."""
        return 1 if self.route == "pair" else self.turns * (size - 1)


@dataclass(frozen=True, slots=True)
class Collective:
    """What a starting op asks for. kind: by which costs know it; nbytes: of the full tensor
    (`Kind.full_nbytes`)."""

    kind: str
    axis: str
    nbytes: int


@lru_cache(maxsize=4096)
def _result_rows(kind: Kind, rows: int, size: int) -> int | None:
    """Rows of the result, of any member as of the first; None where parts do not cover the rows."""
    if size < 1 or (kind.splits and sum(b - a for a, b in kind.gives(rows, 0, size)) != rows):
        return None
    return max(stop for _, stop in kind.gets(rows, 0, size))


ALL_REDUCE = Kind(
    *("all_reduce", _full, "all_reduce", "all_reduce"),
    turns=2,  # to reduce, and to gather what was reduced
    sums=True,
    reductions=("sum", "max"),
    in_place=True,
    differs="never",
)
ALL_GATHER = Kind("all_gather", _full, "all_gather", "reduce_scatter", differs="never")
REDUCE_SCATTER = Kind(
    *("reduce_scatter", _part, "reduce_scatter", "all_gather"), sums=True, splits=True, reductions=("sum",)
)
ALL_TO_ALL = Kind("all_to_all", _part, "alltoall", "all_to_all", "direct", splits=True)
PERMUTE_NEXT = Kind("permute_next", _next, "", "permute_previous", "pair", splits=True, differs="as given")
"""One step around the ring: to the next member, the last one's to the first."""
PERMUTE_PREVIOUS = Kind(
    *("permute_previous", _previous, "", "permute_next", "pair"),
    splits=True,
    differs="as given",
    priced_as="permute_next",
)
BROADCAST = Kind("broadcast", _full, "broadcast", "", "chain", differs="never", in_programs=False)
SEND = Kind("send", _full, "sendrecv", "send", "pair", differs="as given", in_programs=False)
"""Messages of the pipeline."""

KINDS = {
    kind.name: kind
    for kind in (
        *(ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL),
        *(PERMUTE_NEXT, PERMUTE_PREVIOUS, BROADCAST, SEND),
    )
}
"""All of them, by name."""

IN_PROGRAMS = tuple(kind for kind in KINDS.values() if kind.in_programs)

BY_TARGET = {kind.target: kind for kind in IN_PROGRAMS}
"""The op that starts it -> the kind."""

PRICED = tuple(dict.fromkeys(kind.cost for kind in IN_PROGRAMS))
"""The kinds that costs have curves of."""
