"""Updates of parameters: an optimizer's step over some of them, as an op of what runs once a step.

    state.update(gradients, parameters, states)      changes parameters by their gradients; makes nothing
    state.update(..., norm, most)                    by gradients that are scaled so that their norm is `most`
                                                     at most (0: by any)
    state.squares(gradients, copies)                 the sum of squares of all elements, over `copies`

`parameters` has for each gradient all names by which the rank knows what is changed: `shard/a`, or where ops
read what the rank keeps, `param/a`, of a tie each. These are what the op `writes`. `states`: tensors that the
optimizer keeps for each parameter, of its shape, which it reads and writes as well. `norm`: of all gradients.
`copies`: how many ranks of those over which squares are added up have the same gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stretto.ir.parameters import TensorSpec
from stretto.ir.program import Job, Op, Ref

UPDATE = "state.update"
SQUARES = "state.squares"

Updated = tuple[str, tuple[str, ...]]
"""A gradient, and the names of what is changed by it."""

Clipped = tuple[Ref, float]
"""The norm of all gradients, and the largest that is left as it is."""


def update_op(name: str, pairs: Sequence[Updated], states: int, clipped: Clipped | None = None) -> Op:
    """The update of some parameters."""
    gradients = tuple(Ref(gradient) for gradient, _ in pairs)
    parameters = tuple(tuple(map(Ref, names)) for _, names in pairs)
    writes = tuple(name for _, names in pairs for name in names)
    return Op(name, UPDATE, (gradients, parameters, states, *(clipped or ())), writes=writes)


def updated(op: Op) -> Iterator[Updated]:
    """What an update changes, and by what."""
    gradients, parameters = op.args[:2]
    for gradient, names in zip(gradients, parameters, strict=True):
        yield gradient.name, tuple(ref.name for ref in names)


def by_element(op: Op, specs: Mapping[str, TensorSpec]) -> Iterator[Op]:
    """Ops of the names of what an update changes that are placed as it is: functions of an element and of its
    gradient that are not linear."""
    for gradient, names in updated(op):
        for name in names:
            yield Op(name, "aten.maximum.default", (Ref(gradient), Ref(name)), (), (specs[name],))


def clipped_by(op: Op) -> Clipped | None:
    """By which norm an update's gradients are scaled, if they are."""
    return (op.args[3], op.args[4]) if len(op.args) > 3 else None


def is_update(op: Op) -> bool:
    """Whether an op can be read as one: it writes what it names as parameters, each once."""
    match op.args:
        case ((*gradients,), (*parameters,), int(states), *clipped) if len(gradients) == len(parameters) > 0:
            rows = all(type(names) is tuple and names for names in parameters)
            given = [*gradients, *(ref for names in parameters for ref in names)] if rows else [None]
        case _:
            return False
    if not all(type(ref) is Ref for ref in given):
        return False
    changed = tuple(ref.name for names in parameters for ref in names)
    right = changed == op.writes and len(set(changed)) == len(changed)
    right &= not clipped or (list(map(type, clipped)) == [Ref, float] and clipped[1] >= 0)
    return right and states >= 0 and not (op.kwargs or op.outputs or op.alias)


def is_squares(op: Op) -> bool:
    """Whether an op can be read as a sum of squares."""
    match op.args:
        case ((*gradients,), int(copies)) if gradients and all(type(ref) is Ref for ref in gradients):
            return copies > 0 and op.spec is not None and not (op.kwargs or op.writes or op.alias)
    return False


def update_bytes(op: Op, specs: Mapping[str, TensorSpec]) -> int:
    """Bytes that an update reads and writes: gradients once, twice more where they are scaled; parameters and
    states twice."""
    states, times = int(op.args[2]), 1 if clipped_by(op) is None else 3
    moved = 0
    for gradient, names in updated(op):
        kept = specs[names[0]].nbytes if names[0] in specs else 0
        moved += times * (specs[gradient].nbytes if gradient in specs else 0) + 2 * (1 + states) * kept
    return moved


def norm_spec(job: Job) -> TensorSpec:
    """Of the norm of all gradients: in the finest dtype that one of them has."""
    finest = any(p.grads and p.grad_dtype == "float64" for p in job.parameters)
    return TensorSpec((), "float64" if finest else "float32")
