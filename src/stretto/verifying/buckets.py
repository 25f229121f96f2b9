"""Proves that parameters that one rank keeps in full (`Parameter.slot`) lie apart in their buckets, and that
programs take them out of buckets, and put their gradients in, where they lie.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from stretto.ir.kept import bucket_pieces, part_count
from stretto.ir.parameters import BucketSlot
from stretto.ir.placements import SIDE_BY_SIDE, SPLITS
from stretto.ir.program import GRAD, SHARD, Job, Op, Parameter, TensorSpec, refs
from stretto.verifying.fault import Fault
from stretto.verifying.pieces import Pieces


def slot_faults(job: Job) -> Iterator[Fault]:
    """Every fault of where parameters lie. Axes and ties must be sound."""
    buckets: dict[str, dict[str, Parameter]] = defaultdict(dict)
    for parameter in job.parameters:
        for what, fix in _misplaced(job, parameter, parameter.slot) if parameter.slot is not None else ():
            yield Fault(None, f"parameter {parameter.name}", what, fix)
        if parameter.slot is not None:
            buckets[parameter.kept_as].setdefault(parameter.tied_to, parameter)
    for name, ties in buckets.items():
        yield from (Fault(None, f"bucket {name}", what, fix) for what, fix in _together(job, name, ties))


def _misplaced(job: Job, parameter: Parameter, slot: BucketSlot) -> Iterator[tuple[str, str]]:
    where, parts = f"lies in part {slot.part} from element {slot.first}", part_count(job, parameter)
    if not parameter.kept or job.zero != 1:
        yield f"{where}, and is kept over no axis, or `zero` is {job.zero}", "Leave `slot` out"
    elif slot.part >= parts:
        yield f"{where}, and there are {parts} parts", "Name one of them"
    elif slot.first + parameter.spec.numel > slot.length:
        yield f"{where} of {slot.length}, and has {parameter.spec.numel}", "Make the parts longer"


def _together(job: Job, name: str, ties: Mapping[str, Parameter]) -> Iterator[tuple[str, str]]:
    if name not in ties:
        yield "has no parameter of its name", "Name it by one that lies in it"
    stages: dict[str, set[int]] = defaultdict(set)
    for parameter in job.parameters:
        stages[parameter.tied_to].update(parameter.stages)
    trained = {parameter.tied_to for parameter in job.parameters if parameter.grads}
    alike = {
        (
            *(p.kept, p.spec.dtype, p.own_dtype, slot.length, tie in trained, tuple(sorted(stages[tie]))),
            *(tuple((shard.axis, shard.copies) for shard in p.shards), tuple(sorted(p.partial))),
        )
        for tie, p in ties.items()
        if (slot := p.slot) is not None
    }
    if len(alike) > 1:
        yield f"has parameters that are placed otherwise than others: {alike}", "Put others elsewhere"
    lie = sorted((p.slot.part, p.slot.first, p.spec.numel) for p in ties.values() if p.slot is not None)
    for (part, first, numel), (other, begin, _) in pairwise(lie):
        if part == other and begin < first + max(1, numel):
            yield f"has parameters one over another, in part {part} from element {begin}", "Lay them apart"


class BucketWalk:
    """Of one rank. known: op that takes values out of a bucket -> the pieces of what it makes."""

    def __init__(self, job: Job, read: Iterable[Parameter], trained: Sequence[Parameter]) -> None:
        """read, trained: parameters that the rank makes, and those whose gradients it has."""
        names = dict.fromkeys(p.kept_as for p in (*read, *trained) if p.slot is not None)
        self._lie = {name: bucket_pieces(job, name) for name in names}
        self._of = {GRAD + p.name: p.kept_as for p in trained if p.slot is not None}
        self._tie_of = {GRAD + p.name: p.tied_to for p in trained}
        self._put: set[str] = set()
        self.known: dict[str, Pieces] = {}

    def begin(self) -> Iterator[tuple[str, Pieces]]:
        """What the rank keeps, before all ops."""
        for name, lie in self._lie.items():
            yield SHARD + name, (tuple(SHARD + p.tied_to for p, _ in lie if p is not None),)

    def faults(
        self, rank: int, op: Op, made: Mapping[str, Pieces], specs: Mapping[str, TensorSpec | None]
    ) -> Iterator[Fault]:
        """Of an op that puts values side by side, or takes them apart. specs: of all values."""
        if op.target == SIDE_BY_SIDE:
            sources = [*refs(op.args)]
            found = [(self._ties(made.get(name, ())), _numel(specs.get(name))) for name in sources]
            here = {
                self._of[one]
                for name in sources
                for piece in made.get(name, ())
                for one in piece
                if one in self._of
            }
            for bucket in here - self._put:  # afterwards it is one row
                self._put.add(bucket)
                wanted = [({p.tied_to} if p is not None else set(), numel) for p, numel in self._lie[bucket]]
                if found != wanted:
                    what = f"puts gradients elsewhere than the parameters of bucket {bucket} lie"
                    yield Fault(rank, op.name, what, "Put each where its parameter is")
        elif op.target in SPLITS:
            [pieces] = made.get(op.uses[0], ()) if len(made.get(op.uses[0], ())) == 1 else ((),)
            given = {pieces: self._lie[name.removeprefix(SHARD)] for name, (pieces,) in self.begin()}
            if (lie := given.get(pieces)) is not None:
                self.known[op.name] = tuple((SHARD + p.tied_to,) if p is not None else () for p, _ in lie)
                if [_numel(spec) for spec in op.outputs] != [numel for _, numel in lie]:
                    what = "cuts a bucket elsewhere than its parameters lie"
                    yield Fault(rank, op.name, what, "Cut it where they begin and end")

    def left(self, rank: int) -> Iterator[Fault]:
        """Behind all ops: of buckets of gradients that none has put side by side."""
        for bucket in sorted({*self._of.values()} - self._put):
            what = "has gradients that are never put where their parameters lie"
            yield Fault(rank, GRAD + bucket, what, "Put them side by side, and scatter their sums")

    def _ties(self, pieces: Pieces) -> set[str]:
        return {self._tie_of.get(one, one) for piece in pieces for one in piece}


def _numel(spec: TensorSpec | None) -> int:
    return -1 if spec is None else spec.numel
