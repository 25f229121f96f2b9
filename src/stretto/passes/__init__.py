"""All passes, in the one order in which they run, from a captured graph to the step that planning orders.

    GRAPH_PASSES   StepProgram, sharded -> StepProgram   the ops of a full step, before there are stages
    JOB_PASSES     Job -> Job                stages and what crosses between them, before there are prices
    STEP_PASSES    Step, Context -> Step     ranks and costs are known: `stretto.planning` makes variants

Each returns its argument where there is nothing to do. After those of a step, a variant has passes that
know windows (`stretto.planning.choose`). A new pass is a file of this room and a line of these lists;
one of your own is given to `register`, which puts it beside one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from stretto.errors import StrettoError, UsageError, meant
from stretto.ir.program import Job
from stretto.passes.borders import gather_behind, scatter_borders
from stretto.passes.layout.lower import lower
from stretto.passes.layout.program import StepProgram
from stretto.passes.messages import dense_messages, handed_on, sent_once
from stretto.passes.messages_in_parts import messages_in_parts
from stretto.passes.no_ops import dead_ops, equal_collectives, no_ops
from stretto.passes.products import gradient_parts, plain_matmuls
from stretto.passes.recompute_choice import recomputed
from stretto.passes.sequence_first import sequence_first
from stretto.passes.sharded_state import auto_gathered, auto_scattered, sharded_state
from stretto.passes.split_ops import split_products
from stretto.passes.step import LeftOutError, Pass, Step


@dataclass(frozen=True, slots=True)
class OfStep:
    """tried: planning also tries steps without it, and takes the faster."""

    apply: Pass
    tried: bool = False


GRAPH_PASSES: list[Callable[[StepProgram, Collection[str]], StepProgram]] = [
    dead_ops,  # what nothing needs is dropped
    plain_matmuls,  # batched products that are one plain product become one
    sequence_first,  # MLPs take tokens in the order in which they are gathered
    lower,  # collectives of layouts are along dim 0, each a start and a wait
    no_ops,  # what changes nothing is dropped; chains of reshapes are joined
    equal_collectives,  # one collective instead of two of the same value
]
JOB_PASSES: list[Callable[[Job], Job]] = [
    scatter_borders,  # sums that leave a stage are scattered before the border, gathered behind it
    gather_behind,  # what is gathered for other stages alone is gathered by them
    gradient_parts,  # a gradient that is a sum of products becomes these, which are added one by one
]
STEP_PASSES = [
    OfStep(split_products, tried=True),  # products and the collectives of their results in parts
    OfStep(dense_messages),  # what crosses stages is contiguous
    OfStep(messages_in_parts),  # what tensor-parallel ranks have replicated crosses in parts
    OfStep(sent_once),  # a value that several stages of a rank read is sent there once
    OfStep(handed_on, tried=True),  # values that several ranks read are handed on by those that have them
    OfStep(auto_scattered, tried=True),  # gradients are to be scattered where made, if planning is to say
    OfStep(auto_gathered, tried=True),  # parameters are to be gathered where read too, if planning is to say
    OfStep(recomputed),  # what the backward computes again instead of keeping it
    OfStep(sharded_state),  # both, as was asked for
]
BUILT_IN = frozenset(
    one.__name__ for one in (*GRAPH_PASSES, *JOB_PASSES, *(one.apply for one in STEP_PASSES))
)
OWN: set[str] = set()
"""Names of passes that users have registered."""


def register(apply: Callable[..., Any], *, before: str = "", after: str = "", tried: bool = False) -> None:
    """Put a pass of your own before or after one of Stretto's, in the list that it is in, and so of its kind:
    `(StepProgram, sharded) -> StepProgram`, `Job -> Job` or `(Step, Context) -> Step`.

    It must keep the numbers that a step computes (`stretto.check` compares them with the plain model's), and
    give what it was given where there is nothing to do; one of a step that cannot be done raises
    `stretto.passes.step.LeftOutError`. Its name is the function's, by which `skip_passes` leaves it out where
    it is of a graph or a job. tried: of a step: planning also tries steps without it, and takes the faster.

    Raises UsageError for a name of Stretto's passes (a pass of your own is replaced), for a neighbour that
    there is not, and for what is no function; and when it is used, for a pass that fails, or gives something
    else than its kind does.
    """
    name = getattr(apply, "__name__", "")
    if not callable(apply) or not name.isidentifier():
        raise UsageError(
            f"a pass is a function with a name, not {apply!r:.60}: register(function, after=...)"
        )
    if name in BUILT_IN:
        raise UsageError(f"Stretto has a pass {name!r}: give yours another name")
    beside = before or after
    if not beside or (before and after):
        raise UsageError(f"pass {name!r}: say where it runs, before=... or after=..., the name of a pass")
    lists: list[tuple[list[Any], type]] = [
        (GRAPH_PASSES, StepProgram),
        (JOB_PASSES, Job),
        (STEP_PASSES, Step),
    ]
    found = [(at, *one) for one in lists for at, other in enumerate(one[0]) if _name(other) == beside != name]
    if not found:
        known = [_name(other) for passes, _ in lists for other in passes]
        raise UsageError(
            f"pass {name!r}: no pass is called {beside!r}; {meant(beside, known)}they are {', '.join(known)}"
        )
    [(_, chosen, kind)] = found
    if tried and kind is not Step:
        raise UsageError(
            f"pass {name!r}: tried=True is of passes of a step, and {beside!r} is of a {kind.__name__}"
        )
    for passes, _ in lists:
        passes[:] = [one for one in passes if _name(one) != name]
    made = _checked(apply, name, kind)
    at = [_name(one) for one in chosen].index(beside)
    chosen.insert(at + bool(after), OfStep(made, tried) if kind is Step else made)
    OWN.add(name)


def _name(one: Any) -> str:
    """Of a pass, or of what is said of one."""
    name: str = (one.apply if isinstance(one, OfStep) else one).__name__
    return name


def _checked(apply: Callable[..., Any], name: str, kind: type) -> Callable[..., Any]:
    """A user's pass, whose faults name it."""
    let_through = (StrettoError, LeftOutError) if kind is Step else (StrettoError,)

    @wraps(apply)
    def checked(*given: Any) -> Any:
        try:
            made = apply(*given)
        except let_through:
            raise
        except Exception as error:
            raise UsageError(f"pass {name!r}: it fails with {type(error).__name__}: {error}") from error
        if not isinstance(made, kind):
            raise UsageError(
                f"pass {name!r} gives {made!r:.60}; give a {kind.__name__}, where there is nothing to do the "
                "one that was given"
            )
        return made

    return checked


def check_names(names: Collection[str]) -> None:
    """Raises UsageError for a name that no pass has that can be left out. (`split_products` and `recomputed`
    are asked for, by settings of their own.)"""
    may = (one for one in (*GRAPH_PASSES, *JOB_PASSES, messages_in_parts) if one is not lower)
    known = tuple(one.__name__ for one in may)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"skip_passes names {', '.join(map(repr, unknown))}, which no pass is called: "
            f"{meant(unknown[0], known)}the passes are {', '.join(known)}"
        )


def on_graph(program: StepProgram, sharded: Collection[str], skip: Collection[str] = ()) -> StepProgram:
    """The program after all passes of a graph but those in `skip`. sharded: values of whose first dim
    tensor-parallel ranks have parts."""
    for apply in GRAPH_PASSES:
        if apply.__name__ not in skip:
            program = apply(program, sharded)
    return program


def on_job(job: Job, skip: Collection[str] = ()) -> Job:
    """The job after all passes of a job but those in `skip`; planning has the passes of a step left out that
    are in it."""
    for apply in JOB_PASSES:
        if apply.__name__ not in skip:
            job = apply(job)
    return replace(job, message_parts=messages_in_parts.__name__ not in skip)
