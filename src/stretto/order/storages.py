"""The memory that the items of a window make and read, so that an order of them can keep a limit.

1. A value is in the memory of what it is a view of (`ir.storage`). A wait's result is in its start's,
   and what is gathered or scattered is read until the wait.
2. What one part makes and another of its stage and microbatch reads is one memory.
3. Memory that a later window reads, or that leaves, is kept when the window ends.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES, is_external
from stretto.ir.plan import ItemKind, Window
from stretto.ir.program import WAIT, Job, Op
from stretto.ir.storage import in_flight, maker_of, makes, owner, reads


@dataclass(frozen=True, slots=True)
class WindowStorage:
    """Memory that a node allocates (`maker`; -1: it was there before). users: nodes that read it; when the
    last of them is done it is free, unless it is `kept` for later windows."""

    nbytes: int
    maker: int
    users: tuple[int, ...]
    kept: bool


def find_storages(
    job: Job,
    window: Window,
    ops: Sequence[Mapping[str, Op]],
    bytes_in: Mapping[tuple[int, str], int],
    made: Mapping[tuple[int, str], int],
) -> tuple[WindowStorage, ...]:
    """All memory that the window's items touch.

    ops: by part, the ops of its stage by name. bytes_in: (stage, value) -> bytes of what edges bring. made:
    (part, value) -> the item that makes it.
    """
    roots = _Roots(job, window, ops, made)
    users: dict[tuple[int, str], list[int]] = {}
    for at, item in enumerate(window.items):
        if window.parts[item.part][1] is Phase.REDUCE_GRAD:
            continue  # gradients are the rank's, and not the window's
        if item.kind is not ItemKind.OP:
            names: tuple[str, ...] = (job.edges[int(item.ref)].value,)
        else:
            op = ops[item.part][str(item.ref)]
            names = (*(name for name, _ in makes(op)), *reads(op))
            if op.target == WAIT:
                start = ops[item.part].get(op.uses[0])
                names = (*names, *(in_flight(start) if start is not None else ()))
        for name in names:
            key = roots.root(item.part, name)
            if not is_external(key[1]):
                users.setdefault(key, []).append(at)
    kept = roots.kept()
    storages: list[WindowStorage] = []
    for (part, root), readers in users.items():
        stage, _ = window.parts[part]
        made_by = maker_of(root)
        op_of = ops[part].get(made_by)
        nbytes = dict(makes(op_of)).get(root, 0) if op_of is not None else bytes_in.get((stage, root), 0)
        if nbytes:
            # What arrives was allocated when its receive was posted.
            maker = made.get((part, made_by), -1) if op_of is not None else -1
            storages.append(WindowStorage(nbytes, maker, tuple(dict.fromkeys(readers)), (part, root) in kept))
    return tuple(storages)


@dataclass(frozen=True, slots=True)
class _Roots:
    job: Job
    window: Window
    ops: Sequence[Mapping[str, Op]]
    made: Mapping[tuple[int, str], int]

    def root(self, part: int, name: str) -> tuple[int, str]:
        """Steps 1 and 2: (part, value) in whose memory a part's value lies; the first part that has it."""
        if is_external(name):
            return part, name
        op = self.ops[part].get(name)
        while op is not None and owner(op) != op.name:
            name = owner(op)
            op = self.ops[part].get(name)
        made_by = maker_of(name)
        if (part, made_by) in self.made:
            return part, name
        mates = self.window.mates(part)
        makers = [k for k in mates if k < part and (k, made_by) in self.made]
        # What an earlier window has left is one memory for all that read it.
        return (makers[-1] if makers else min((part, *mates))), name

    def kept(self) -> set[tuple[int, str]]:
        """Step 3."""
        kept: set[tuple[int, str]] = set()
        for part in self.window.actions:
            stage, phase = self.window.parts[part]
            here = {sub for k in (part, *self.window.mates(part)) for sub in self.window.parts[k][1].parts}
            for sub in PHASES[PHASES.index(phase.parts[-1]) + 1 :]:
                if sub not in here:
                    kept.update(
                        self.root(part, name) for op in self.job.stages[stage].ops[sub] for name in reads(op)
                    )
            leaves = (e.value for e in self.job.edges if e.source == stage and e.phase in phase.parts)
            kept.update(self.root(part, value) for value in leaves)
        return kept


class WindowMemory:
    """Bytes of a window above those at its begin, item by item. now, peak: bytes; allocates: by node."""

    __slots__ = ("_freed", "_left", "_touches", "allocates", "now", "peak")

    def __init__(self, count: int, storages: Sequence[WindowStorage]) -> None:
        self.now = 0
        self.peak = 0
        self.allocates = [0] * count
        self._touches: list[list[int]] = [[] for _ in range(count)]
        self._freed = [storage for storage in storages if not storage.kept]
        self._left = [(len(storage.users), storage.nbytes) for storage in self._freed]
        """(users that are left, bytes) of what is freed in this window."""
        for at, storage in enumerate(self._freed):
            for user in storage.users:
                self._touches[user].append(at)
        for storage in storages:
            if storage.maker >= 0:
                self.allocates[storage.maker] += storage.nbytes

    def frees(self, index: int) -> int:
        """Bytes that no one reads after the node."""
        return sum(self._left[at][1] for at in self._touches[index] if self._left[at][0] == 1)

    def empty(self) -> WindowMemory:
        """The same window's at its begin."""
        made = copy.copy(self)
        made.now = made.peak = 0
        made._left = [(len(storage.users), storage.nbytes) for storage in self._freed]
        return made

    def take(self, index: int) -> None:
        """The node has run."""
        self.now += self.allocates[index]
        self.peak = max(self.peak, self.now)
        for at in self._touches[index]:
            left, nbytes = self._left[at]
            self._left[at] = (left - 1, nbytes)
            if left == 1:
                self.now -= nbytes
