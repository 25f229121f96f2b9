"""Proves that what lies one behind another in buckets of parameters that one rank keeps each (`Parameter.slot`)
is put there, and taken out, where the plan says that it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from stretto.ir.kept import bucket_pieces
from stretto.ir.placements import SIDE_BY_SIDE, SPLITS
from stretto.ir.program import GRAD, SHARD, Job, Op, Parameter, TensorSpec
from stretto.verifying.fault import Fault
from stretto.verifying.pieces import Pieces


class Buckets:
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
            found = [(self._ties(made.get(name, ())), _numel(specs.get(name))) for name in op.uses]
            here = {self._of[one] for name in op.uses for piece in made.get(name, ()) for one in piece if one in self._of}
            for bucket in here - self._put:  # afterwards it is one row
                self._put.add(bucket)
                wanted = [({p.tied_to} if p is not None else set(), numel) for p, numel in self._lie[bucket]]
                if found != wanted:
                    what = f"puts gradients elsewhere than the parameters of bucket {bucket} lie"
                    yield Fault(rank, op.name, what, "Put each where its parameter is")
        elif op.target in SPLITS:
            [pieces] = made.get(op.uses[0], ()) if len(made.get(op.uses[0], ())) == 1 else ((),)
            bucket = next((name for name in self._lie if pieces == dict(self.begin())[SHARD + name][0]), None)
            if bucket is not None:
                lie = self._lie[bucket]
                self.known[op.name] = tuple((SHARD + p.tied_to,) if p is not None else () for p, _ in lie)
                if [_numel(spec) for spec in op.outputs] != [numel for _, numel in lie]:
                    what = f"cuts bucket {bucket} elsewhere than its parameters lie"
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
