"""Why communication is exposed, and what would help: a row an axis, sequence parallelism apart from tp.

A reason is read off a timeline and its plan, in the order of `_why`: the first that explains half of what is
exposed. What helps against it has the plan's own numbers; settings are named as in a settings file. Spans are
read by their names, so that predicted and measured steps are judged in one way.

Nothing is advised that costs more than it gains. It can gain what is exposed, at most; where it costs bubble,
both are estimated (`Stakes`), and said. What may cost compute (bfloat16 on processors) is not advised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stretto.ir.axes import AXES, CP, DP, DP_SHARD, EP, PIPELINE, PP, TENSOR, TP
from stretto.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from stretto.ir.costs import BYTES_PER_MB
from stretto.ir.parameters import scatters
from stretto.ir.plan import Plan
from stretto.ir.timeline import COMPUTE_LANE, SpanKind, Timeline
from stretto.ir.transfers import SUM, message_us
from stretto.report.findings import LEAST_SHARE
from stretto.report.grid import Grid, format_bytes, format_share, format_us
from stretto.report.tables import Traffic, communication_of, traffic_of
from stretto.schedule.families import FAMILIES

SEQUENCE = "sequence parallelism"
"""Instead of an axis: what tp ranks gather and scatter, as they share the sequence."""

OF_SEQUENCE = (ALL_GATHER.name, REDUCE_SCATTER.name)
"""Kinds along tp by which its ranks share the sequence."""
MOST = 0.5
"""A reason that explains this share of what is exposed is given as the reason."""


@dataclass(frozen=True, slots=True)
class Stakes:
    """What can be gained, and lost: means over ranks of a row's exposed time, and of the step's bubbles."""

    exposed_us: float
    bubble_us: float = 0.0

    def pays(self, gained: float, times: float) -> str | None:
        """For what would save a part of the exposed time and make bubbles so many times as long: what it
        saves and costs, in words; None where it costs more."""
        gain_us, cost_us = self.exposed_us * gained, self.bubble_us * (times - 1.0)
        if gain_us <= cost_us:
            return None
        cost = f", for {format_us(cost_us)} more bubble" if cost_us > 0.0 else ""
        return f"saves up to {format_us(gain_us)}{cost}"


def less_to_send(name: str, plan: Plan | None, *, links: bool = True) -> Iterator[str]:
    """Less to communicate for the same compute; with `links`, also over faster ones."""
    # Gradients are reduced in the parameters' own dtype. Processors may be slower in bfloat16.
    if plan is not None and name != DP.name and plan.job.device != "cpu" and _in_float32(plan):
        yield 'precision = "bf16", which halves its bytes'
    size = 0 if plan is None else plan.ranks if name == PP.name else plan.job.size(name)
    now = f" (now {size})" if size else ""
    if name == PP.name:
        yield f"fewer pipeline ranks{now} and as many more copies" + ", or neighbours on faster links" * links
    elif _in_microbatches(name, plan):
        yield (
            "parallel.zero = 1, with which parameters and gradients travel once a step, where memory allows"
            + (
                f", or fewer and larger microbatches{_now(plan)}"
                if plan is not None and plan.ranks == 1
                else ""
            )
        )
    elif name == DP.name:
        yield f"more microbatches to a step{_now(plan)}, which share one gradient reduction"
    elif name == DP_SHARD.name:
        yield f"a smaller dp_shard{now}" + ", or dp_shard within a node" * links
    elif name == CP.name:
        yield (
            f"fewer cp ranks{now}, or longer sequences: attention's compute grows with the square of their "
            "length, its messages with the length"
        )
    elif name == EP.name:
        yield f"experts shared by fewer ranks{now}" + " or within a node" * links
        yield "a smaller capacity or parallel.ep_buffer"
    else:
        yield f"a smaller tp{now} and as many more copies" + ", or tp within a node" * links


def _in_microbatches(name: str, plan: Plan | None) -> bool:
    """Whether each microbatch gathers or scatters over data-parallel copies."""
    return plan is not None and scatters(plan.job.zero) and name in (DP.name, DP_SHARD.name)


def _larger(name: str, plan: Plan | None, latency: float, at_stake: Stakes) -> Iterator[str]:
    """Fewer and larger messages. latency: its share of their time."""
    if name == DP.name and not _in_microbatches(name, plan):
        yield f"more microbatches to a step{_now(plan)}, which share one gradient reduction"
        return
    if name == EP.name and plan is not None and plan.job.chunks > 1:
        yield f'parallel.ampipe_degree = "auto" (now {plan.job.chunks}): fewer chunks where they pay'
    if plan is not None and plan.job.microbatches == 1:
        yield "a larger batch to a rank, so that each message carries more"
        return
    # With half the microbatches a pipeline is empty for twice as long a share.
    pipelined = plan is not None and plan.ranks > 1
    saved = at_stake.pays(latency / 2, 2.0 if pipelined else 1.0)
    if saved is None:
        yield f"a larger batch in as many microbatches{_now(plan)}: fewer cost more bubble than they save"
    else:
        yield f"fewer and larger microbatches{_now(plan)}: half as many have half the messages; it {saved}"


def more_to_run(name: str, plan: Plan | None, at_stake: Stakes) -> Iterator[str]:
    """Other ops to run meanwhile."""
    if name == PP.name:
        yield from _ahead(plan, at_stake)
        return
    if plan is None:
        yield 'parallel.overlap = "window" and two microbatches or more: one computes, another communicates'
        return
    if plan.overlap != "window" and plan.job.overlap != "window":
        now = f'(now "{plan.job.overlap}")'
        yield f'parallel.overlap = "window" {now}, which has ops of two microbatches to choose from'
    if name == DP.name and not _in_microbatches(name, plan):
        yield (
            "more compute in the last backward, which alone can hide gradient reductions: a larger batch, in "
            f"as many microbatches (now {plan.job.microbatches})"
        )
        return
    if plan.job.microbatches == 1:
        yield "two microbatches or more (now 1): one computes while another communicates"
    if name == EP.name and plan.job.chunks == 1:
        yield 'parallel.ampipe_degree = "auto": one chunk of the sequence computes while another communicates'
    if name == TP.name and not plan.job.split_ops:
        yield "parallel.split_ops = true: a product and its communication in parts, which hide each other"
    if plan.overlap_why:
        yield f"planning found: {plan.overlap_why}"
    yield from less_to_send(name, plan)


def _ahead(plan: Plan | None, at_stake: Stakes) -> Iterator[str]:
    """Microbatches further ahead, in pipelines."""
    if plan is None:
        yield "a schedule that keeps more microbatches ahead of what needs them, such as eager-1f1b"
        return
    schedule = plan.schedule
    if schedule.stages > plan.ranks:
        # Virtual stages divide the bubble; without them it is as many times as long.
        gained = 1.0 - (plan.ranks - 1) / (schedule.stages - 1)
        if (saved := at_stake.pays(gained, schedule.stages / plan.ranks)) is not None:
            yield (
                f"one stage a pipeline rank: with {schedule.stages} stages each microbatch crosses "
                f"{schedule.stages - 1} borders each way, with {plan.ranks} it crosses {plan.ranks - 1}; "
                f"it {saved}"
            )
    family = FAMILIES.get(schedule.family)
    if family is not None and family.eager:
        yield f'parallel.schedule = "{family.eager}" (now "{family.name}"), whose forwards run further ahead'
    elif not plan.schedule_why:
        yield f'parallel.schedule = "auto" (now "{schedule.family}"), the fastest of all within the memory'
    if plan.job.max_live is not None:
        yield f"a higher parallel.max_live (now {plan.job.max_live}): more microbatches may be under way"
    yield from less_to_send(PP.name, plan)


def _now(plan: Plan | None) -> str:
    return "" if plan is None else f" (now {plan.job.microbatches})"


def _in_float32(plan: Plan) -> bool:
    return plan.job.param_dtype is None and any(p.spec.dtype == "float32" for p in plan.job.parameters)


def advice_grid(timeline: Timeline, plan: Plan | None) -> Grid | None:
    """A row for each axis with exposed communication that is worth a reader's time; None where there is none.

    Without a plan only the timeline is judged."""
    rows = []
    for traffic in sorted(traffic_of(timeline, _name), key=lambda one: (AXES.index(one.axis), one.kind)):
        share = traffic.exposed_us / timeline.step_us if timeline.step_us else 0.0
        if share < LEAST_SHARE:
            continue
        words, helps = _why(traffic, timeline, plan)
        exposed = f"{format_us(traffic.exposed_us)} ({format_share(share)})"
        rows.append((traffic.kind, exposed, words, "; ".join(helps)))
    if not rows:
        return None
    head = ("", "exposed", "why", "what would help")
    caption = f"exposed: mean of the {timeline.counted}, and the most that anything in its row can save"
    return Grid("Why communication is exposed", head, rows, (0, 2, 3), caption)


def _name(axis: str, kind: str) -> str:
    """What a row is of: an axis, or sequence parallelism."""
    return SEQUENCE if axis == TENSOR and kind in OF_SEQUENCE else axis


def _why(traffic: Traffic, timeline: Timeline, plan: Plan | None) -> tuple[str, Iterable[str]]:
    """The reason in words; and what would help against it, one thing after another."""
    axis, exposed_us, compute_us = (
        traffic.axis,
        traffic.exposed_us,
        sum(timeline.by_rank(SpanKind.COMPUTE)) / timeline.ranks,
    )
    at_stake = Stakes(exposed_us, sum(timeline.by_rank(SpanKind.BUBBLE)) / timeline.ranks)
    late_us = _late_us(traffic, timeline)
    if late_us >= MOST * exposed_us:
        words = f"{format_us(late_us)} a rank is spent until the last rank has begun its part"
        if axis == EP.name:
            return words, ["ranks with less uneven experts: a loss that balances the router, or a capacity"]
        return words, ["ranks that compute equally long: the table of who waits for whom names the slow ones"]
    if plan is not None and plan.overlap == "off":
        why = plan.overlap_why
        helps = f"nothing by order alone: {why}" if why else 'parallel.overlap = "window"'
        return "the plan waits for each as soon as it is started (overlap = off)", [helps]
    before_us, after_us = _outside_us(traffic, timeline)
    if after_us >= MOST * exposed_us:
        words = f"{format_us(after_us)} of it is after a rank's last op, with nothing left to hide it"
        return words, less_to_send(axis, plan)
    if before_us >= MOST * exposed_us:
        fills = f"more microbatches{_now(plan)}: the pipeline fills once for all of them"
        words = f"{format_us(before_us)} of it is before a rank's first op: the pipeline fills"
        return words, [fills, *less_to_send(axis, plan)]
    busy = _of_processor(traffic, plan)
    if busy >= MOST:
        words = f"{format_share(busy)} of its time is processor time: cores that compute copy and add for it"
        return words, [
            *less_to_send(axis, plan, links=False),
            "a core for it: ranks with one thread less than they have cores",
        ]
    if traffic.total_us > compute_us:
        times = traffic.total_us / compute_us if compute_us else 0.0
        faster = [f"links {times:.1f} times as fast, which compute could hide"] if times else []
        words = f"it takes {format_us(traffic.total_us)}, and all compute that could hide it "
        return words + format_us(compute_us), [*less_to_send(axis, plan), *faster]
    latency = _latency(traffic, plan)
    if latency >= MOST:
        count = len(traffic.messages)
        words = f"{count:,} of {format_bytes(traffic.nbytes / count)} on average"
        why = f"{words}: {format_share(latency)} of their time is latency"
        return why, _larger(axis, plan, latency, at_stake)
    words = "what needs it follows too soon: there are not enough other ops to run meanwhile"
    return words, more_to_run(axis, plan, at_stake)


def _late_us(group: Traffic, timeline: Timeline) -> float:
    """How long a rank waits, on average, for other ranks along the axis, by a measured timeline. Between
    pipeline ranks such waiting is a bubble."""
    if group.axis == PIPELINE or not timeline.busy_us:
        return 0.0
    return sum(stall.us for stall in timeline.stalls if stall.axis == group.axis) / len(timeline.busy_us)


def _outside_us(group: Traffic, timeline: Timeline) -> tuple[float, float]:
    """What is exposed before a rank's first op, and after its last: means over ranks."""
    ends: dict[int, tuple[float, float]] = {}
    for span in timeline.spans:
        if span.lane == COMPUTE_LANE and span.kind is SpanKind.COMPUTE:
            first, last = ends.get(span.rank, (span.start_us, span.end_us))
            ends[span.rank] = min(first, span.start_us), max(last, span.end_us)
    before_us = after_us = 0.0
    for span in group.exposed:
        first, last = ends.get(span.rank, (0.0, timeline.step_us))
        before_us += span.duration_us if span.end_us <= first else 0.0
        after_us += span.duration_us if span.start_us >= last else 0.0
    return before_us / timeline.ranks, after_us / timeline.ranks


def _latency(group: Traffic, plan: Plan | None) -> float:
    """Share of its communications' time that they would take without a byte, by the plan's costs; 0 where
    these have none."""
    empty_us, _, total_us = _priced(group, plan)
    return empty_us / total_us if total_us else 0.0


def _of_processor(group: Traffic, plan: Plan | None) -> float:
    """Share of its communications' time in which each end's processor works for them, by the plan's costs."""
    _, busy_us, total_us = _priced(group, plan)
    return min(1.0, busy_us / total_us) if total_us else 0.0


def _priced(group: Traffic, plan: Plan | None) -> tuple[float, float, float]:
    """By the plan's costs: what its communications take without a byte, what they take of a processor, and
    what they take; zeros where there are no costs."""
    if plan is None:
        return 0.0, 0.0, 0.0
    empty_us = busy_us = total_us = 0.0
    counted: dict[tuple[str, int, int, int], int] = defaultdict(int)
    for span in group.messages:
        kind = communication_of(span.name)[1]
        counted[kind, span.nbytes, -1 if span.sender is None else span.sender, span.rank] += 1
    for (kind, nbytes, sender, receiver), count in counted.items():
        if sender >= 0:
            link = plan.costs.link(sender, receiver)
            empty_us += count * message_us(link, 0)
            busy_us += count * (link.processor_us + link.processor_us_per_mb * nbytes / BYTES_PER_MB)
            total_us += count * message_us(link, nbytes)
            continue
        cost = plan.costs.collectives.get((group.axis, kind)) or plan.costs.collectives.get((group.axis, SUM))
        if cost is not None:
            empty_us += count * cost.curve.us(0)
            busy_us += count * cost.lost_us(nbytes)
            total_us += count * cost.curve.us(nbytes)
    return empty_us, busy_us, total_us
