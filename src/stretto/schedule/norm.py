"""The norm of all gradients, of which each rank has a part, once they are reduced.

1. Squares of the elements that a rank has are added up, of gradients apart of which ranks have parts over
   different axes. What several pipeline ranks have the first of them counts.
2. Over one axis after the other these sums are added up, where ranks have parts over it; what has no
   parts any more is added to the rest.
3. So are the sums of pipeline ranks. The norm is the root of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.plan import NORM
from stretto.ir.program import GRAD, STEP_NORM, WAIT, Const, Job, Op, Parameter, Ref
from stretto.ir.updates import SQUARES, norm_spec
from stretto.passes.flat import ADD

ROOT = "aten.sqrt.default"


def norm_of(job: Job, pp_rank: int, pp_ranks: int, counted: Sequence[Sequence[Parameter]]) -> Iterator[Op]:
    """The ops that make it on a pipeline rank, the last of which is the norm. counted: those whose gradients
    the rank counts, by what is ready together."""
    made = _Sums(job, pp_rank)
    for bucket in counted:
        alike: dict[tuple[tuple[str, ...], int], list[Parameter]] = defaultdict(list)
        for parameter in bucket:
            alike[parts_over(job, parameter)].append(parameter)
        for (over, copies), parameters in alike.items():
            yield made.squares(parameters, over, copies)
    for axis, size in reversed(job.axes):  # innermost first: over outer ones more has parts
        for axes in [one for one in made.left if axis in one]:
            yield from made.added(axes)
            yield from made.reduced(f"{axis}.norm.{pp_rank}", axis, size, axes, axes - {axis})
    yield from made.added(frozenset())
    if pp_ranks > 1:
        yield from made.reduced(f"{PIPELINE}.norm", NORM, pp_ranks, frozenset(), frozenset())
    [total] = made.left[frozenset()]
    yield Op(f"{PIPELINE}.norm.root", ROOT, (Ref(total),), (), (norm_spec(job),), writes=(STEP_NORM,))


class _Sums:
    """Sums of squares on their way."""

    def __init__(self, job: Job, pp_rank: int) -> None:
        self._spec = norm_spec(job)
        self._name = f"{PIPELINE}.squares.{pp_rank}"
        self._count = 0
        self._lies_in: dict[str, str] = {}
        self.left: dict[frozenset[str], list[str]] = {}
        """Axes over which ranks have parts -> sums."""

    def _made(self, axes: frozenset[str]) -> str:
        """A new sum of gradients with parts over these."""
        name = f"{self._name}.{self._count}"
        self._count += 1
        self.left.setdefault(axes, []).append(name)
        return name

    def squares(self, parameters: Sequence[Parameter], axes: Sequence[str], copies: int) -> Op:
        """Step 1."""
        gradients = tuple(Ref(GRAD + parameter.name) for parameter in parameters)
        return Op(self._made(frozenset(axes)), SQUARES, (gradients, copies), (), (self._spec,))

    def added(self, axes: frozenset[str]) -> Iterator[Op]:
        """The sums become one; zero where there is none."""
        spec = self._spec
        first, *others = self.left.pop(axes, [""])
        if not first:
            how = (("dtype", Const("dtype", spec.dtype)), ("device", Const("device", "job")))
            yield Op(self._made(axes), "aten.zeros.default", ((),), (*how, ("pin_memory", False)), (spec,))
            return
        for other in others:
            made = self._made(axes)
            yield Op(made, ADD, (Ref(first), Ref(other)), (), (spec,))
            self.left.pop(axes)
            first = made
        self.left[axes] = [first]

    def reduced(
        self, name: str, lane: str, size: int, axes: frozenset[str], after: frozenset[str]
    ) -> Iterator[Op]:
        """Step 2 or 3 of a sum, where it is."""
        [value] = self.left.pop(axes)
        spec, place = self._spec, self._lies_in.get(value, value)
        name = f"{name}.{self._count}" if lane != NORM else name
        self._count += 1
        yield Op(name, ALL_REDUCE.target, (Ref(value), "sum", lane, size), (), (spec,), place)
        yield Op(f"{name}.sum", WAIT, (Ref(name),), (), (spec,), place)
        self._lies_in[f"{name}.sum"] = place
        self.left.setdefault(after, []).append(f"{name}.sum")


def parts_over(job: Job, parameter: Parameter) -> tuple[tuple[str, ...], int]:
    """The axes over which ranks have different parts of a gradient that is reduced, and how many of these
    ranks have the same one."""
    axes, copies = [], 1
    for axis, size in job.axes:
        shard = next((one for one in parameter.shards if one.axis == axis), None)
        if size > 1 and (axis in parameter.kept or (shard is not None and shard.parts(size) > 1)):
            axes.append(axis)
            copies *= 1 if shard is None else shard.copies
    return tuple(axes), copies
