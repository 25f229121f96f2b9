"""What an op allocates, and in which storage a value lies.

A storage has the name of the value that it was allocated for. The results of an op that returns several
tensors are storages of their own, made when the op runs, not when a `getitem` op names them; each goes on
its own, those that nobody takes at once.
"""

from __future__ import annotations

from stretto.ir.program import GETITEM, Op


def makes(op: Op) -> tuple[tuple[str, int], ...]:
    """(storage, bytes) of what the op allocates; nothing for a view and for a part of a tuple."""
    if op.alias is not None or op.target == GETITEM:
        return ()
    if len(op.outputs) == 1:
        return ((op.name, op.nbytes),) if op.outputs[0] is not None else ()
    return tuple(
        (_part(op.name, index), spec.nbytes) for index, spec in enumerate(op.outputs) if spec is not None
    )


def owner(op: Op) -> str:
    """The storage of the op's result, or the value whose storage it shares."""
    if op.alias is not None:
        return op.alias
    return _part(op.args[0].name, op.args[1]) if op.target == GETITEM else op.name


def maker_of(storage: str) -> str:
    """The op that allocates a storage, by the storage's name."""
    return storage.partition("#")[0]


def reads(op: Op) -> tuple[str, ...]:
    """The values that the op reads; a part of a tuple reads the part alone."""
    return (owner(op),) if op.target == GETITEM else op.uses


def in_flight(start: Op) -> tuple[str, ...]:
    """The values that a communication still reads until it is waited for."""
    return () if start.kind is None or start.kind.in_place else start.uses


def _part(name: str, index: int) -> str:
    return f"{name}#{index}"
