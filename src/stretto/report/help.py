"""What helps against exposed communication, by its reason and axis, with the numbers of the plan.

Settings are named as in a settings file (`parallel.*`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from stretto.ir.axes import CP, DP, EP, PP, TP
from stretto.ir.plan import Plan
from stretto.report.traffic import Traffic

SEQUENCE = "sequence parallelism"
"""In the place of an axis: what tp ranks gather and scatter, as they share the sequence."""


class Reason(StrEnum):
    """late: ranks begin their parts late. off: nothing is to be hidden. end, begin: it is after a rank's last
    op, or before its first. network: it takes longer than all compute. latency: of its messages. order: the
    ops around it leave nothing to run meanwhile."""

    LATE = "late"
    OFF = "off"
    END = "end"
    BEGIN = "begin"
    NETWORK = "network"
    LATENCY = "latency"
    ORDER = "order"


def help_for(reason: Reason, name: str, plan: Plan | None, compute_us: float, traffic: Traffic) -> str:
    """In words: one thing after another, of which each would help."""
    if reason is Reason.LATE:
        said = [_even(name)]
    elif reason is Reason.OFF:
        said = [_on(plan)]
    elif reason is Reason.LATENCY:
        said = [*_larger(name, plan)]
    elif reason is Reason.ORDER:
        said = [*_more_to_run(name, plan)]
    elif reason is Reason.BEGIN:
        said = [_filled(plan), *_less(name, plan)]
    else:
        said = [*_less(name, plan)]
    if reason is Reason.NETWORK and compute_us:
        said.append(f"links {traffic.total_us / compute_us:.1f} times as fast, which compute could hide")
    return "; ".join(said)


def _even(name: str) -> str:
    if name == EP.name:
        return "ranks with less uneven experts: a loss that balances the router, or a capacity"
    return "ranks that compute equally long: the table of who waits for whom names the slow ones"


def _on(plan: Plan | None) -> str:
    if plan is not None and plan.overlap_why:
        return f"nothing by order alone: {plan.overlap_why}"
    return 'parallel.overlap = "window"'


def _filled(plan: Plan | None) -> str:
    now = _now(plan, lambda p: p.job.microbatches)
    return f"more microbatches{now}: the pipeline fills once for all of them"


def _less(name: str, plan: Plan | None) -> Iterator[str]:
    """Less to communicate for the same compute."""
    if plan is not None and _in_float32(name, plan):
        yield 'precision = "bf16", which halves its bytes'
    size = 0 if plan is None else plan.ranks if name == PP.name else plan.job.size(_axis(name))
    of_size = f" (now {size})" if size else ""
    if name == PP.name:
        yield f"fewer places{of_size}, or neighbours on faster links"
    elif name == DP.name:
        yield (
            f"more microbatches to a step{_now(plan, lambda p: p.job.microbatches)}, which share one sum of "
            "gradients, or more tp and pp, with which a rank has fewer gradients"
        )
    elif name == CP.name:
        yield (
            f"fewer cp ranks{of_size}, or longer sequences: attention's compute grows with the square of "
            "their length, its messages with the length"
        )
    elif name == EP.name:
        yield (
            f"experts shared by fewer ranks{of_size} or within a node, or a smaller capacity or "
            "parallel.ep_buffer"
        )
    elif size == 2:
        yield "tp = 1 where the model fits, or tp within a node"
    else:
        half = (size // 2 - 1) / (size // 2) * size / (size - 1) if size > 2 else 0.0
        gain = f", at which a rank computes twice as much for {half:.2f} of the bytes each" if half else ""
        yield f"a smaller tp{of_size}{f': {size // 2}' if half else ''}{gain}, or tp within a node"


def _larger(name: str, plan: Plan | None) -> Iterator[str]:
    """Fewer and larger messages."""
    if name == DP.name:
        yield "fewer sums: more layers to a stage, or more microbatches to a step, which share them"
        return
    if name == EP.name and plan is not None and plan.job.chunks > 1:
        yield f"fewer chunks (parallel.ampipe_degree, now {plan.job.chunks})"
    if plan is not None and plan.job.microbatches == 1:
        yield "a larger batch to a rank, so that each message carries more"
    else:
        now = _now(plan, lambda p: p.job.microbatches)
        yield f"fewer and larger microbatches{now}: half as many have half the messages"


def _more_to_run(name: str, plan: Plan | None) -> Iterator[str]:
    """Other ops to run meanwhile."""
    if name == PP.name:
        yield from _ahead(plan)
        return
    if plan is None:
        yield 'parallel.overlap = "window" and two microbatches or more: one computes, another communicates'
        return
    if plan.overlap != "window" and plan.job.overlap != "window":
        now = f'(now "{plan.job.overlap}")'
        yield f'parallel.overlap = "window" {now}, which has ops of two microbatches to choose from'
    if name == DP.name:
        yield (
            "more compute in the last backward, which alone can hide sums of gradients: larger microbatches "
            f"(now {plan.job.microbatches}), or fewer gradients to a rank by more tp and pp"
        )
        return
    if plan.job.microbatches == 1:
        yield "two microbatches or more (now 1): one computes while another communicates"
    if name == EP.name and plan.job.chunks == 1:
        yield 'parallel.ampipe_degree = "auto": one chunk of the sequence computes while another communicates'
    if name in (TP.name, SEQUENCE) and not plan.job.split_ops:
        yield "parallel.split_ops = true: a product and its communication in parts, which hide each other"
    if plan.overlap_why:
        yield f"planning found: {plan.overlap_why}"
    yield from _less(name, plan)


def _ahead(plan: Plan | None) -> Iterator[str]:
    """Microbatches further ahead, in pipelines."""
    if plan is None:
        yield "a schedule that keeps more microbatches ahead of what needs them, such as eager-1f1b"
        return
    schedule = plan.schedule
    if schedule.stages > plan.ranks:
        yield (
            f"one stage a place: with {schedule.stages} stages each microbatch crosses {schedule.stages - 1} "
            f"borders each way, with {plan.ranks} it crosses {plan.ranks - 1}"
        )
    if schedule.family in ("gpipe", "1f1b"):
        now = f'(now "{schedule.family}")'
        yield f'parallel.schedule = "eager-1f1b" {now}, which is a microbatch further ahead'
    elif not plan.schedule_why:
        yield f'parallel.schedule = "auto" (now "{schedule.family}"), the fastest of all within the memory'
    if plan.job.max_live is not None:
        yield f"a higher parallel.max_live (now {plan.job.max_live}): more microbatches may be under way"
    yield from _less(PP.name, plan)


def _axis(name: str) -> str:
    return TP.name if name == SEQUENCE else name


def _now(plan: Plan | None, number: Callable[[Plan], int]) -> str:
    return "" if plan is None else f" (now {number(plan)})"


def _in_float32(name: str, plan: Plan) -> bool:
    """Whether most of what the axis carries is in float32, which `precision = "bf16"` would halve: gradients
    of parameters are summed in the parameters' own dtype, and in a job of that precision what is left in
    float32, as sums of a loss, stays."""
    if name == DP.name or plan.job.param_dtype is not None:
        return False
    if name == PP.name:
        carried = [edge.spec for edge in plan.job.edges]
    else:
        carried = [
            made
            for stage in plan.job.stages
            for ops in stage.ops.values()
            for op in ops
            if op.collective is not None and op.collective.axis == _axis(name)
            for made in op.outputs
            if made is not None
        ]
    whole = sum(one.nbytes for one in carried)
    return 2 * sum(one.nbytes for one in carried if one.dtype == "float32") > whole
