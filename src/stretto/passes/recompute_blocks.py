"""Blocks: the model's repeated layers, from whose inputs their inside can be computed again.

A block is the shortest path of a module that ends in its number in a list (`blocks.3`, `model.layers.3`). A
model without any list is one block a stage. Touches `stretto.ir` only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from stretto.ir.action import Phase
from stretto.ir.program import Job, Op, Stage


class Blocks:
    """To which block an op belongs; "" for none."""

    def __init__(self, job: Job) -> None:
        modules = {op.module for stage in job.stages for op in stage.ops[Phase.F]}
        members: dict[str, set[str]] = {}
        for module in modules:
            for prefix in numbered(module):
                members.setdefault(prefix.rpartition(".")[0], set()).add(prefix)
        # A list of one is a list only if there is none of more: a wrapper's `0` holds the whole model.
        least = 2 if any(len(found) > 1 for found in members.values()) else 1
        self._of: dict[str, str] = {}
        for module in modules:
            known = (p for p in numbered(module) if len(members[p.rpartition(".")[0]]) >= least)
            self._of[module] = next(known, "")
        self._whole = not members

    def of(self, op: Op) -> str:
        return "stage" if self._whole else self._of[op.module]


def numbered(module: str) -> list[str]:
    """The parts of a module's path that end in a number, shortest first."""
    return [module[: found.end()] for found in re.finditer(r"(?:^|\.)\d+(?=\.|$)", module)]


def borders(stage: Stage, blocks: Blocks, root: Mapping[str, str]) -> set[str]:
    """Storages that the forward of another block than their own reads."""
    home = {op.name: blocks.of(op) for op in stage.ops[Phase.F]}
    return {
        root[name]
        for op in stage.ops[Phase.F]
        for name in op.uses
        if root.get(name, "") in home and home[root[name]] != home[op.name]
    }
