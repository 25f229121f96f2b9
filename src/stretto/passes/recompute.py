"""Recomputation: what the forward made is not kept for the backward, but computed again there.

`stretto.passes.recompute_choice` chooses which ops are worth it; this file repeats them, and says what a
block is. Repeated ops are ordinary ops on ordinary lanes.

    1. What is not kept (`again`): with a value all views of its storage; with a part of a tuple the op that
       makes the tuple, which would keep the other parts alive.
    2. What is needed: the values of `again` that I and W read, and what it takes to make them. Nothing else
       is repeated, and nothing twice.
    3. Where: in I what I needs, in W what W alone needs.
    4. A repeated op comes directly before the first op that needs it. It has the name of the op that it
       repeats and a suffix, and `Op.repeats`, by which a random op draws the same numbers again.

A block is one of the model's repeated layers: the shortest path of a module that ends in its number in a list
(`blocks.3`, `model.layers.3`). A model without any list is one block a stage.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.program import GETITEM, Job, Op, Stage
from stretto.passes.rewrite import changed, with_uses


class Blocks:
    """To which block an op belongs; "" for none."""

    def __init__(self, job: Job) -> None:
        modules = {op.module for stage in job.stages for op in stage.ops[Phase.F]}
        members: dict[str, set[str]] = {}
        for module in modules:
            for prefix in numbered(module):
                members.setdefault(prefix.rpartition(".")[0], set()).add(prefix)
        # A list of one is a list only if there is none of more: a wrapper's `0` has the full model.
        least = 2 if any(len(result) > 1 for result in members.values()) else 1
        self._of: dict[str, str] = {}
        for module in modules:
            known = (p for p in numbered(module) if len(members[p.rpartition(".")[0]]) >= least)
            self._of[module] = next(known, "")
        self._full = not members

    def of(self, op: Op) -> str:
        return "stage" if self._full else self._of[op.module]


def numbered(module: str) -> list[str]:
    """The parts of a module's path that end in a number, shortest first."""
    return [module[: result.end()] for result in re.finditer(r"(?:^|\.)\d+(?=\.|$)", module)]


def borders(stage: Stage, blocks: Blocks, root: Mapping[str, str]) -> set[str]:
    """Storages that the forward of another block than their own reads."""
    home = {op.name: blocks.of(op) for op in stage.ops[Phase.F]}
    return {
        root[name]
        for op in stage.ops[Phase.F]
        for name in op.uses
        if root.get(name, "") in home and home[root[name]] != home[op.name]
    }


AGAIN = "_again"
"""Ends the name of a repeated op."""


def repeat(job: Job, again: Mapping[int, Collection[str]]) -> Job:
    """The job whose backward computes ops of the forward again. again: stage -> names of ops of its F whose
    results are not kept; what nothing in the backward needs is not repeated either.

    Losses and gradients are those of `job`, bit by bit.
    """
    return replace(
        job,
        stages=tuple(
            _Repeat(stage, again[stage.index]).stage() if again.get(stage.index) else stage
            for stage in job.stages
        ),
    )


def forget(job: Job) -> Job:
    """The job as it was before `repeat`: without the repeated ops."""
    stages = tuple(_forget(stage) for stage in job.stages)
    same = all(new is old for new, old in zip(stages, job.stages, strict=True))
    return job if same else replace(job, stages=stages)


def is_repeated(op: Op) -> bool:
    """Whether the op is one that `repeat` made."""
    return bool(op.repeats) and op.name == op.repeats + AGAIN


def storages(ops: Sequence[Op]) -> dict[str, str]:
    """Value -> the value that owns its storage: itself, or what it is a view of."""
    return {op.name: op.name if op.alias is None else op.alias for op in ops}


def closed(forward: Sequence[Op], again: Collection[str]) -> set[str]:
    """Step 1: `again` with all that goes with it. Views of parameters and of received values cost nothing to
    keep and stay."""
    root = storages(forward)
    roots = {root[name] for name in again}
    for op in reversed(forward):
        if op.target == GETITEM and root[op.name] in roots:
            roots.add(root[op.uses[0]])
    return {op.name for op in forward if root[op.name] in roots and root[op.name] in root}


class _Repeat:
    """Steps 1 to 4 for one stage."""

    def __init__(self, stage: Stage, again: Collection[str]) -> None:
        self.old = stage
        self.forward = stage.ops[Phase.F]
        self.made = {op.name: op for op in self.forward}
        self.position = {op.name: at for at, op in enumerate(self.forward)}
        read = {name for op in self.forward for name in op.uses}
        # What is made of nothing, for the backward alone, would be left in F with no reader.
        single = {op.name for op in self.forward if not op.uses and op.name not in read}
        self.again = closed(self.forward, again) - single
        self.needed = self._needed()
        self.new_name = {name: name + AGAIN for name in self.needed}
        taken = {op.name for op in stage.all_ops}.intersection(self.new_name.values())
        assert not taken, f"stage {stage.index} has ops named as repeated ones would be: {sorted(taken)}"

    def stage(self) -> Stage:
        """The stage with its repeated ops."""
        done: set[str] = set()
        into = tuple(self._placed(Phase.I, done))
        weight = tuple(self._placed(Phase.W, done))
        return Stage(self.old.index, {Phase.F: self.forward, Phase.I: into, Phase.W: weight})

    def _needed(self) -> set[str]:
        """Step 2: what I and W read of `again`, and what it takes to make that."""
        read = {name for phase in (Phase.I, Phase.W) for op in self.old.ops[phase] for name in op.uses}
        needed = read & self.again
        for op in reversed(self.forward):
            if op.name in needed:
                needed.update(self._inputs(op.name))
        return needed

    def _inputs(self, name: str) -> list[str]:
        return [use for use in self.made[name].uses if use in self.again]

    def _placed(self, phase: Phase, done: set[str]) -> Iterator[Op]:
        """Steps 3 and 4: the phase's ops, each after the repeated ops that it needs. done: those that are
        already; grows."""
        for op in self.old.ops[phase]:
            wanted = [name for name in op.uses if name in self.needed]
            result: set[str] = set()
            while wanted:
                name = wanted.pop()
                if name not in done and name not in result:
                    result.add(name)
                    wanted += self._inputs(name)
            for name in sorted(result, key=self.position.__getitem__):
                yield replace(self._now(self.made[name]), name=self.new_name[name], repeats=name)
            done |= result
            yield self._now(op)

    def _now(self, op: Op) -> Op:
        """The op with the repeated ones in the places of what it reads."""
        return with_uses(op, lambda used: self.new_name.get(used, used))


def _forget(stage: Stage) -> Stage:
    first = {op.name: op.repeats for op in stage.all_ops if is_repeated(op)}
    if not first:
        return stage
    return changed(
        stage, lambda op: () if op.name in first else (with_uses(op, lambda used: first.get(used, used)),)
    )
