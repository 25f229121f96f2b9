"""One collective where two would bring the same: the same value, seen the same way, on the same axis.

A plan of one's own may gather the slices of a sequence for each matrix of a layer; gathered once they serve
all. Both must stand in the forward, or both in the backward, so that nothing is kept between the two for it
(`recompute = "gathers"` is that choice), and in one module, or side by side in one layer, so that
no stage has to send what is gathered to the next. An all-reduce of the backward may be one of the forward:
its result is as large as the value that would be kept to reduce it again. DTensor reduces so, for an op keeps
what it was given before it is summed.

    1. A value is told by the op that made it; a view by what it is a view of, and how.
    2. A start whose input, words and place are those of an earlier one is gone, with its wait: what used them
       uses the earlier ones.
"""

from __future__ import annotations

from typing import Any

from stretto.ir.program import WAIT, Op, Ref
from stretto.passes.graph import Graph
from stretto.passes.rewrite import live, rebuilt, with_uses


def equal_collectives(graph: Graph) -> Graph:
    """See the module."""
    same: dict[str, str] = {}
    keys: dict[str, Any] = {}
    first: dict[Any, str] = {}
    waits: dict[str, str] = {}
    ops: list[Op] = []
    for was in graph.ops:
        op = with_uses(was, lambda name: same.get(name, name))
        source = op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
        if op.alias is not None and op.target != WAIT and len(op.uses) == 1:
            keys[op.name] = (op.target, keys.get(source, source), op.args[1:], op.kwargs)  # step 1
        elif op.kind is not None:
            told = (
                op.target,
                keys.get(source, source),
                op.args[1:],
                not op.kind.in_place and graph.is_backward(op.name),
                _place(op.module),
            )
            if first.setdefault(told, op.name) != op.name:  # step 2
                same[op.name] = first[told]
                continue
        elif op.target == WAIT and waits.setdefault(source, op.name) != op.name:
            same[op.name] = waits[source]
            continue
        ops.append(op)
    if not same:
        return graph
    roots = {same.get(root, root) for root in graph.roots}
    return rebuilt(graph, live(ops, roots), same)


def _place(module: str) -> str:
    """The module itself, or the one that it is a part of when both are in a layer (a numbered module)."""
    parent = module.rpartition(".")[0]
    return parent if any(part.isdigit() for part in parent.split(".")[:-1]) else module
