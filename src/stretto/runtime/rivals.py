"""Runners of one model: where two hold a parameter on other ranks, or each a part of its own, they do not
train the same tensors. Once one has trained such a parameter, the other has old values, and is refused.

    1. When a Runner is made, it is held against each that there is: which parameters would its training leave
       old in the other, and the other's in it (`Where.follows`).
    2. Before a step, if such a Runner has taken one since, all ranks compare: the model's own tensors with
       those of the ranks that train them, and its parts with what they were.

Runners that train other parameters, as those of a GAN's two losses, so go on side by side.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.errors import UsageError
from stretto.runtime.all_or_none import Ranks
from stretto.runtime.copies import digest
from stretto.runtime.held import Held
from stretto.runtime.old_adapter import unmarked
from stretto.runtime.own import Own

_LIVE: weakref.WeakSet[Rivals] = weakref.WeakSet()
_ADDING = threading.Lock()
"""Ranks that are threads make their Runners at the same time."""


@dataclass(slots=True)
class _Rival:
    """Another Runner, whose training can leave this one's values old: those of `names`. kept: digests of its
    parts when both had the same. together: whether all ranks of this one walk its steps too. stepped: whether
    it has taken a step since a look."""

    trainer: weakref.ref[Rivals]
    names: tuple[str, ...]
    kept: dict[str, str]
    together: bool
    stepped: bool = False


class Rivals:
    """One Runner among those of its model."""

    def __init__(self, held: Held, owns: Sequence[Own], memory: object, shares: bool) -> None:
        """owns: what of the model its plan uses. memory: whose its parts are; shares: another Runner's.

        Raises UsageError where that one holds a parameter on other ranks."""
        self._plan, self._owns, self._memory = held.plan, owns, memory
        self._rivals: list[_Rival] = []
        self._readers: list[weakref.ref[Rivals]] = []
        self._overtaken = ""
        world, self._rank = self._plan.world, held.rank
        with _ADDING:
            before = [one for one in _LIVE if one._plan.world != world or one._rank == self._rank]
            _LIVE.add(self)
        for other in before:
            behind = self._behind(other)
            if behind and shares and self._memory is other._memory:
                raise UsageError(
                    f"shares: the plan has {behind[0]!r} on other ranks than the Runner that it shares with, "
                    "or spreads it otherwise: capture both with the same layout and the same split"
                )
            for reader, trainer in ((self, other), (other, self)):
                if names := reader._behind(trainer):
                    together, kept = trainer._plan.world == reader._plan.world, reader._parts(trainer, names)
                    reader._rivals.append(_Rival(weakref.ref(trainer), names, kept, together))
                    trainer._readers.append(weakref.ref(reader))

    def _behind(self, trainer: Rivals) -> tuple[str, ...]:
        """The parameters of both that the other's steps change, where this one's ranks then have old ones."""
        theirs = {id(own.tensor()): own for own in trainer._owns if own.trains}
        mine = [(own, theirs.get(id(own.tensor()))) for own in self._owns if own.tensor() is not None]
        return tuple(other.name for own, other in mine if other and not own.where.follows(other.where))

    def stepped(self) -> None:
        """This one's values are others than before."""
        for other in self._readers:
            reader = other()
            for rival in reader._rivals if reader is not None else ():
                rival.stepped |= rival.trainer() is self

    def loaded(self) -> None:
        """All of this one's values are new."""
        self._overtaken = ""
        for rival in self._rivals:
            trainer = rival.trainer()
            rival.stepped = False
            rival.kept = {} if trainer is None else self._parts(trainer, rival.names)

    def check(self, ranks: Ranks) -> None:
        """Step 2; every rank must call it. Raises UsageError on all where some values are old."""
        for rival in self._rivals:
            if rival.stepped and not self._overtaken:
                rival.stepped = False
                self._overtaken = (
                    _difference(ranks.all_gather(self._told(rival)))
                    if rival.together
                    else (
                        rival.names[0]  # the other ranks know nothing of it, and would not answer
                    )
                )
        if self._overtaken:
            raise UsageError(
                "another Runner of this model has trained since, and this one has old values: it holds "
                f"{self._overtaken!r} on other ranks, or a part of its own. Cut both plans alike (split=, "
                "the same layout), with shares= where parameters are spread; or load the trained values "
                "first, runner.load_state_dict(other.state_dict()); or make this Runner of a model of its "
                "own (copy.deepcopy)"
            )

    def _told(self, rival: _Rival) -> tuple[str, dict[str, str]]:
        """A parameter of which this rank knows that it has changed, or ""; and digests of the model's own
        tensors that either Runner trains here."""
        trainer = rival.trainer()
        if trainer is None:
            return rival.names[0], {}
        now = self._parts(trainer, rival.names)
        changed = next((name for name in now if now[name] != rival.kept.get(name)), "")
        parts = self._cut()
        direct = {id(own.tensor()) for one in (self, trainer) for own in one._owns if not own.is_apart}
        found = {}
        for own in trainer._owns:
            tensor = own.tensor()
            if own.name in rival.names and tensor is not None and id(tensor) in direct - parts:
                found[own.name] = digest(unmarked(tensor))
        return changed, found

    def _parts(self, trainer: Rivals, names: tuple[str, ...]) -> dict[str, str]:
        """Digests of what the other trains here of these parameters, where either has parts of its own."""
        cut, found = self._cut(), {}
        for own in trainer._owns:
            tensor = own.tensor() if own.part is None else own.part[0]
            if own.name in names and own.here and (own.part is not None or id(own.tensor()) in cut):
                found[own.name] = "" if tensor is None else digest(unmarked(tensor))
        return found

    def _cut(self) -> set[int]:
        """The model's tensors of which this one has parts."""
        return {id(own.tensor()) for own in self._owns if own.where.memory is not None}

    def trained_in_this_process(self) -> set[int]:
        """Tensors that Runners of this plan train themselves: ranks that are threads may share a model, which
        then is trained as a whole. And those of other Runners of the model, which look for themselves."""
        readers = [reader() for reader in self._readers]
        with _ADDING:
            alike = [one for one in _LIVE if one._plan is self._plan or one in readers]
        mine = [own for one in alike for own in one._owns if not own.is_apart]
        return {id(own.tensor()) for own in mine if own.trains}


def _difference(told: Sequence[tuple[str, dict[str, str]]]) -> str:
    """A parameter that a rank has changed, or that two ranks have with other values; "" if there is none.
    told: by rank."""
    first: dict[str, str] = {}
    apart = (name for _, found in told for name, one in found.items() if first.setdefault(name, one) != one)
    return next((name for name, _ in told if name), next(apart, ""))
