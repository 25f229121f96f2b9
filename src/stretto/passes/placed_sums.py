"""A sum of what several stages make is made at the stage where its messages cost least.

Where a value is read by several stages, its gradient is a sum of parts that arise on all of them; and a
stage may begin with a sum of two values that another has made. Captured, a sum stands where its code was, or
where the last of its parts arises (`stretto.capturing.split`). Which stages share a rank, and what links
take, is not known then. Parts that travel the same way are summed before they go on: one message instead of
two.

    1. Take sums of two values of one shape and dtype, of the phase in which both are made. Those that nothing
       reads but another such sum are one tree with it; the order of adding stays as it is.
    2. A sum may stand at a stage that makes one of the tree's parts or reads the tree's sum, if every stage
       that something comes from is before it in any case, and it before all to which something goes: no
       stage waits for another that did not before.
    3. Of all ways to place a tree's sums, that is taken whose messages take least together, by the links
       between ranks: none on one rank, and none for a value that something else brings there anyway. Where
       nothing is cheaper, all stays where it was.

Parts of a parameter's gradient are summed once a step instead (`stretto.capturing.stages`). Planning tries a
step with and without. No number changes. Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES, results_of
from stretto.ir.program import Edge, Job, Op, Ref
from stretto.ir.transfers import message_us
from stretto.passes.rewrite import stage_of
from stretto.passes.step import Context, Step

ADD = "aten.add.Tensor"

CLEAR = 1.0 - 1e-9
"""Of what messages take now, what they take at most elsewhere: less is rounding."""

Place = tuple[int, Phase]


@dataclass(frozen=True, slots=True)
class _Made:
    """An op and where it is: a stage, a phase of it."""

    op: Op
    stage: int
    phase: Phase


def placed_sums(step: Step, context: Context) -> Step:
    """The step with sums where messages cost least; the step itself where they do."""
    work = _Work(step, context)
    moved: dict[str, int] = {}
    for root in work.roots():
        moved |= work.better(root)
    return replace(step, job=_moved(step.job, work.made, moved)) if moved else step


class _Work:
    """made: value -> where, of those that one stage alone makes."""

    def __init__(self, step: Step, context: Context) -> None:
        self._job, self._ranks = step.job, step.schedule.stage_ranks
        self._costs = context.costs_of(step.job)
        self.made: dict[str, _Made] = {}
        self._readers: dict[str, list[_Made]] = defaultdict(list)
        several: set[str] = set()
        for stage in self._job.stages:
            for phase in PHASES:
                for op in stage.ops[phase]:
                    here = _Made(op, stage.index, phase)
                    if self.made.setdefault(op.name, here) is not here:
                        several.add(op.name)
                    for name in op.uses:
                        self._readers[name].append(here)
        for name in several:
            del self.made[name]
        self._results = {
            name
            for s in self._job.stages
            for phase in PHASES
            for name in results_of(self._job, s.index, phase)
        }
        self._behind: dict[Place, frozenset[Place]] = {}

    # --- step 1 -------------------------------------------------------------------------------------

    def roots(self) -> Iterator[str]:
        """The sums of trees, of those of which something crosses ranks."""
        for name in self._sums:
            readers = self._readers[name]
            if len(readers) == 1 and readers[0].op.name in self._sums:
                continue
            places = {self.made[value].stage for value in self._tree(name)}
            places |= {reader.stage for reader in readers}
            if len({self._ranks[stage] for stage in places}) > 1:
                yield name

    @cached_property
    def _sums(self) -> frozenset[str]:
        return frozenset(name for name, here in self.made.items() if self._is_sum(here))

    def _is_sum(self, here: _Made) -> bool:
        op = here.op
        if (
            op.target != ADD
            or op.kwargs
            or op.name in self._results
            or len(op.uses) != 2
            or len(op.args) != 2
        ):
            return False
        if not all(isinstance(arg, Ref) and arg.name in self.made for arg in op.args):
            return False
        parts = [self.made[name] for name in op.uses]
        return all(part.op.outputs == op.outputs and part.phase is here.phase for part in parts)

    def _tree(self, name: str) -> list[str]:
        """A sum, what it adds, what that adds, as far as the tree goes."""
        inner = self._inner(name)
        return [name, *(found for part in inner for found in (self._tree(part) if inner[part] else [part]))]

    def _inner(self, name: str) -> dict[str, bool]:
        """What a sum adds, each with whether it is a sum of the same tree."""
        return {
            part: part in self._sums and len(self._readers[part]) == 1 for part in self.made[name].op.uses
        }

    # --- step 2 -------------------------------------------------------------------------------------

    def _before(self, one: Place, other: Place) -> bool:
        """Whether an action is before another of the same microbatch, or the same."""
        if one not in self._behind:
            found, left = {one}, [one]
            while left:
                for following in self._follow[left.pop()]:
                    if following not in found:
                        found.add(following)
                        left.append(following)
            self._behind[one] = frozenset(found)
        return other in self._behind[one]

    @cached_property
    def _follow(self) -> Mapping[Place, set[Place]]:
        found: dict[Place, set[Place]] = defaultdict(set)
        for stage in self._job.stages:
            for one, other in pairwise(PHASES):
                found[stage.index, one].add((stage.index, other))
        for edge in self._job.edges:
            found[edge.source, edge.phase].add((edge.target, edge.user_phase))
        return found

    # --- step 3 -------------------------------------------------------------------------------------

    def better(self, root: str) -> dict[str, int]:
        """Sum -> stage, of those of a tree that stand better elsewhere."""
        tree = self._tree(root)
        places = {self.made[name].stage for name in tree}
        places |= {reader.stage for reader in self._readers[root]}
        chosen: dict[tuple[str, int], tuple[float, dict[str, int]]] = {}

        def cheapest(name: str, stage: int) -> tuple[float, dict[str, int]]:
            """What its messages take of a sum that stands at a stage, and where those before it stand."""
            if (name, stage) not in chosen:
                phase, us = self.made[name].phase, 0.0
                at: dict[str, int] = {name: stage}
                for part, inner in self._inner(name).items():
                    ways = []
                    # The place that it has first: of equal ones it stays.
                    here = self.made[part].stage
                    for source in sorted(places if inner else {here}, key=lambda s: (s != here, s)):
                        if self._before((source, phase), (stage, phase)):
                            behind_us, rest = cheapest(part, source) if inner else (0.0, {})
                            ways.append((behind_us + self._us(part, source, stage, tree), rest))
                    if not ways:
                        return chosen.setdefault((name, stage), (float("inf"), {}))
                    least_us, rest = min(ways, key=lambda way: way[0])
                    us += least_us
                    at |= rest
                chosen[name, stage] = us, at
            return chosen[name, stage]

        def whole(stage: int) -> tuple[float, dict[str, int]]:
            phase = self.made[root].phase
            readers = self._readers[root]
            if not all(self._before((stage, phase), (one.stage, one.phase)) for one in readers):
                return float("inf"), {}
            us, at = cheapest(root, stage)
            # Of a rank's stages one is sent it.
            ends = {self._ranks[one.stage]: one.stage for one in readers}
            return us + sum(self._us(root, stage, end, tree) for end in ends.values()), at

        now_us = self._now_us(root, tree)
        us, at = min((whole(stage) for stage in sorted(places)), key=lambda way: way[0])
        if us >= now_us * CLEAR:
            return {}
        return {name: stage for name, stage in at.items() if stage != self.made[name].stage}

    def _now_us(self, root: str, tree: list[str]) -> float:
        us = 0.0
        for name in tree:
            here = self.made[name].stage
            targets = {one.stage for one in self._readers[name] if name == root or one.op.name in tree}
            ends = {self._ranks[target]: target for target in targets}
            us += sum(self._us(name, here, end, tree) for end in ends.values())
        return us

    def _us(self, name: str, source: int, target: int, tree: list[str]) -> float:
        """What a value takes from one stage to another."""
        sender, receiver = self._ranks[source], self._ranks[target]
        if sender == receiver:
            return 0.0
        # A part that others read there as well is there in any case.
        others = (one for one in self._readers[name] if one.op.name not in tree)
        if tree[0] != name and any(self._ranks[one.stage] == receiver for one in others):
            return 0.0
        spec = self.made[name].op.outputs[0]
        assert spec is not None
        return message_us(self._costs.link(sender, receiver), spec.nbytes)


def _moved(job: Job, made: Mapping[str, _Made], moved: Mapping[str, int]) -> Job:
    """The job with sums at other stages."""
    programs = {stage.index: dict(stage.ops) for stage in job.stages}
    touched: set[int] = set()
    values: dict[str, None] = {}
    for name, stage in moved.items():
        here = made[name]
        touched |= {here.stage, stage}
        values |= dict.fromkeys((name, *here.op.uses))
        there = programs[here.stage]
        there[here.phase] = tuple(op for op in there[here.phase] if op.name != name)
    for place in {(stage, made[name].phase): None for name, stage in moved.items()}:
        stage, phase = place
        new = {name: made[name].op for name, to in moved.items() if (to, made[name].phase) == place}
        programs[stage][phase] = _with_sums(programs[stage][phase], new)
    stages = tuple(stage_of(s.index, programs[s.index]) if s.index in touched else s for s in job.stages)
    return replace(job, stages=stages, edges=_edges(job, _readers_of(programs, values), moved, made))


def _with_sums(ops: Sequence[Op], new: Mapping[str, Op]) -> tuple[Op, ...]:
    """A program with sums in it: each before the first op that reads it, or where the program only sends it,
    after the last op of what it adds."""
    at = {op.name: number for number, op in enumerate(ops)}

    def behind(name: str) -> int:
        """Ops of the program up to what a sum adds."""
        return max(
            (behind(part) if part in new else at.get(part, -1) + 1 for part in new[name].uses), default=0
        )

    read = {name for op in (*ops, *new.values()) for name in op.uses}
    sent: dict[int, list[Op]] = defaultdict(list)
    for name, op in new.items():
        if name not in read:
            sent[behind(name)].append(op)
    found: dict[str, Op] = {}

    def add(op: Op) -> None:
        for name in op.uses:
            if name in new and name not in found:
                add(new[name])
        found[op.name] = op

    for number in range(len(ops) + 1):
        for op in (*sent[number], *ops[number : number + 1]):
            add(op)
    return tuple(found.values())


def _readers_of(
    programs: Mapping[int, Mapping[Phase, tuple[Op, ...]]], values: Iterable[str]
) -> dict[str, dict[int, Phase]]:
    """Value -> the stages that read it, each with the first phase that does."""
    found: dict[str, dict[int, Phase]] = {value: {} for value in values}
    for stage, ops_of in programs.items():
        for phase in PHASES:
            for op in ops_of[phase]:
                for name in op.uses:
                    if name in found:
                        found[name].setdefault(stage, phase)
    return found


def _edges(
    job: Job, readers: Mapping[str, dict[int, Phase]], moved: Mapping[str, int], made: Mapping[str, _Made]
) -> tuple[Edge, ...]:
    """The job's edges, with those of values that sums bring or take."""
    kept: list[Edge] = []
    known: set[tuple[str, int]] = set()
    for edge in job.edges:
        if edge.value not in readers:
            kept.append(edge)
            continue
        source = moved.get(edge.value, edge.source)
        if edge.target in readers[edge.value] and edge.target != source:
            known.add((edge.value, edge.target))
            kept.append(replace(edge, source=source, user_phase=readers[edge.value][edge.target]))
    for value, targets in readers.items():
        here = made[value]
        source = moved.get(value, here.stage)
        spec = here.op.outputs[0]
        assert spec is not None
        for target, phase in sorted(targets.items()):
            if target != source and (value, target) not in known:
                kept.append(Edge(0, value, source, here.phase, target, phase, spec))
    return tuple(replace(edge, index=index) for index, edge in enumerate(kept))
