"""Of whom values are made: which gradients or parameters lie side by side in a flat tensor, and in what is
taken out of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stretto.ir.placements import IN_DTYPE, SIDE_BY_SIDE, SPLITS
from stretto.ir.program import FREE, GETITEM, STARTS, WAIT, Op, refs
from stretto.ir.updates import UPDATE, updated

Pieces = tuple[tuple[str, ...], ...]
"""By piece of a value, the names of what it is made of."""


def pieces_of(op: Op, made: dict[str, Pieces]) -> Pieces:
    """Those of what an op makes. made: those of what it reads, where they are known."""
    pieces = [piece for name in refs(op.args) for piece in made.get(name, ())]
    if op.target == GETITEM:
        return tuple(pieces[op.args[1] :][:1])
    if op.target in (*STARTS, WAIT, SIDE_BY_SIDE, IN_DTYPE, *SPLITS):
        return tuple(pieces)
    return (tuple(one for piece in pieces for one in piece),)


def walked(ops: Iterable[Op], made: dict[str, Pieces], known: Mapping[str, Pieces]) -> Iterator[Op]:
    """The ops, after each of which `made` has what it makes, and what it writes. known: of ops of which it is
    known otherwise; it may grow on the way."""
    for op in ops:
        yield op
        made[op.name] = known[op.name] if op.name in known else pieces_of(op, made)
        if op.target == UPDATE:
            for gradient, names in updated(op):
                for name in names:
                    pieces = (*made.get(name, ()), *made.get(gradient, ()))
                    made[name] = (tuple(one for piece in pieces for one in piece),)
        elif op.target == FREE:
            for name in op.writes:
                made.pop(name, None)
        else:
            made.update(dict.fromkeys(op.writes, made[op.name]))
