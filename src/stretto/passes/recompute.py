"""Recomputation: what the forward made is not kept for the backward, but computed again there.

`stretto.passes.recompute_choice` chooses which ops are worth it; this file repeats them, and says what a
block is. Repeated ops are ordinary ops on ordinary lanes.

    1. What is not kept (`again`): with a value all views of its storage; with a part of a tuple the op that
       makes the tuple, which would keep the other parts alive.
    2. What is needed: the values of `again` that I and W read, and what it takes to make them. Nothing else
       is repeated, and nothing twice.
    3. Where: in I what I needs. What W alone needs is in W, unless more would then have to be kept from I
       to W than the result is.
    4. A repeated op comes directly before the first op that needs it. It has the name of the op that it
       repeats and a suffix, and `Op.repeats`, by which a random op draws the same numbers again.

A block is one of the model's repeated layers: the shortest path of a module that ends in its number in a list
(`blocks.3`, `model.layers.3`). A model without any list is one block a stage.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.program import GETITEM, WAIT, Job, Op, Stage
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
    sizes = {edge.value: edge.spec.nbytes for edge in job.edges}
    return replace(
        job,
        stages=tuple(
            _Repeat(stage, again[stage.index], sizes).stage() if again.get(stage.index) else stage
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
    """Steps 1 to 4 for one stage. sizes: received value -> bytes."""

    def __init__(self, stage: Stage, again: Collection[str], sizes: Mapping[str, int]) -> None:
        self.old = stage
        self.forward = stage.ops[Phase.F]
        self.made = {op.name: op for op in self.forward}
        self.position = {op.name: at for at, op in enumerate(self.forward)}
        self.root = storages(self.forward)
        self.sizes = sizes
        read = {name for op in self.forward for name in op.uses}
        # What is made of nothing, for the backward alone, would be left in F with no reader.
        single = {op.name for op in self.forward if not op.uses and op.name not in read}
        self.again = closed(self.forward, again) - single
        self.needed = self._needed((Phase.I, Phase.W))
        self.new_name = {name: name + AGAIN for name in self.needed}
        taken = {op.name for op in stage.all_ops}.intersection(self.new_name.values())
        assert not taken, f"stage {stage.index} has ops named as repeated ones would be: {sorted(taken)}"

    def stage(self) -> Stage:
        """The stage with its repeated ops."""
        in_i = self._in_i()
        for_i = self._needed((Phase.I,))
        done: set[str] = set()
        into = tuple(self._placed(Phase.I, done, sorted(in_i - for_i, key=self.position.__getitem__)))
        weight = tuple(self._placed(Phase.W, done, []))
        return Stage(self.old.index, {Phase.F: self.forward, Phase.I: into, Phase.W: weight})

    def _needed(self, phases: Sequence[Phase]) -> set[str]:
        """Step 2: what the phases read of `again`, and what it takes to make that."""
        needed = {
            name for phase in phases for op in self.old.ops[phase] for name in op.uses if name in self.again
        }
        for op in reversed(self.forward):
            if op.name in needed:
                needed.update(self._inputs(op.name))
        return needed

    def _inputs(self, name: str) -> list[str]:
        return [use for use in self.made[name].uses if use in self.again]

    def _in_i(self) -> set[str]:
        """Step 3: the repeated ops that are in I; the others are in W."""
        match = self._needed((Phase.I,))
        in_w: set[str] = set()
        # Storages that W reads, anyone who made them: they are kept until then.
        until_w = {self._owner(name) for op in self.old.ops[Phase.W] for name in op.uses}
        parts: dict[str, list[Op]] = defaultdict(list)
        for op in reversed(self.forward):
            if op.name in match:
                match.update(self._inputs(op.name))
            elif op.name not in self.needed or op.name in in_w:
                continue
            elif op.target in (GETITEM, WAIT) and op.uses[0] in self.needed:
                # A part goes with its tuple, a wait with its start: what decides is there.
                parts[op.uses[0]].append(op)
                if op.uses[0] in match:
                    match.add(op.name)
            elif op.alias is not None:
                until_w |= {self._owner(name) for name in op.uses}
            else:
                together = (op, *parts[op.name])
                result = sum(one.nbytes for one in together if one.name in until_w)
                chain, reads = self._chain(op, match)
                # What is given from outside takes nothing.
                kept = (
                    self.made[o].nbytes if o in self.made else self.sizes.get(o, 0) for o in reads - until_w
                )
                if sum(kept) <= result:
                    in_w |= chain
                    until_w |= reads
                else:
                    match.update(one.name for one in together)
                    match.update(self._inputs(op.name))
        return match

    def _chain(self, op: Op, in_i: Collection[str]) -> tuple[set[str], set[str]]:
        """The op and those that have to be in W if it does, and the storages that these read of others."""
        chain = {op.name}
        reached = [op.name]
        while reached:
            more = [use for use in self._inputs(reached.pop()) if use not in in_i and use not in chain]
            chain.update(more)
            reached += more
        reads = {self._owner(use) for name in chain for use in self.made[name].uses}
        return chain, reads - chain

    def _owner(self, name: str) -> str:
        return self.root.get(name, name)

    def _placed(self, phase: Phase, done: set[str], for_w: Sequence[str]) -> Iterator[Op]:
        """Step 4: the phase's ops, each after the repeated ops that it needs. done: those that are already;
        grows. for_w: those that are here for W alone, as soon as what they read is there."""
        late = list(for_w)
        for op in self.old.ops[phase]:
            wanted = [name for name in op.uses if name in self.needed]
            result: set[str] = set()
            while wanted:
                name = wanted.pop()
                if name not in done and name not in result:
                    result.add(name)
                    wanted += self._inputs(name)
            if result:
                for name in late:
                    inputs = self._inputs(name)
                    if inputs and all(use in done or use in result for use in inputs):
                        result.add(name)
                late = [name for name in late if name not in result]
            yield from self._clones(result, done)
            yield self._now(op)
        yield from self._clones(late, done)

    def _now(self, op: Op) -> Op:
        """The op with the repeated ones in the places of what it reads."""
        return with_uses(op, lambda used: self.new_name.get(used, used))

    def _clones(self, names: Collection[str], done: set[str]) -> Iterator[Op]:
        for name in sorted(names, key=self.position.__getitem__):
            done.add(name)
            yield replace(self._now(self.made[name]), name=self.new_name[name], repeats=name)


def _forget(stage: Stage) -> Stage:
    first = {op.name: op.repeats for op in stage.all_ops if is_repeated(op)}
    if not first:
        return stage
    return changed(
        stage, lambda op: () if op.name in first else (with_uses(op, lambda used: first.get(used, used)),)
    )
