"""Lower a schedule onto a job: windows of ops, and every rank's order of instructions.

The contract: the schedule is legal (`stretto.verify` checks), stages match the job. Costs play no part: who
knows them may give windows in a better order of items (`stretto.order`).

    1. A window for each kind of slot: the ops of its parts, a wait before the first op that reads a
       received value, a send after the op that makes a value that leaves. So a message leaves when its
       tensor is ready, and is waited for as late as possible.
    2. Each rank runs its windows in the schedule's order.
    3. For each communicator, the receiver posts its receives in the order in which the sender starts
       its sends. A receive is posted `lookahead` messages before it is needed, so that the transfer
       never waits for the receiver, and no more buffers are held than that.
    4. Sends are waited for at the end, or where `sent_before` says that they have left long ago.
    5. The loss is told as soon as its last part exists. Gradients are summed (`stretto.schedule.sums`): a sum
       that waits for no other starts inside the window that completes it, those of ties after it, as they
       have one order on all ranks. All are waited for at the end of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.action import Phase, Schedule, Slot
from stretto.ir.plan import Bucket, Communicator, Instruction, InstructionKind, ItemKind, Window
from stretto.ir.program import Job, OverlapMode
from stretto.order.at_once import waits_at_once
from stretto.schedule.posting import Message, latest_posts, post_positions
from stretto.schedule.sums import Sums, communicators_of, make_sums, tells_loss
from stretto.schedule.windows import last_name, make_window, window_name, with_sums

LOOKAHEAD = 3
"""Receives posted ahead of the one that is needed. Two keep a saturated link busy (one in transfer, one
matched); the third absorbs jitter. Assumed; the cost is three activation buffers a communicator."""


def lower(
    job: Job,
    schedule: Schedule,
    *,
    overlap: OverlapMode = "local",
    windows: Mapping[str, Window] | None = None,
    sent_before: Mapping[Message, int] | None = None,
) -> tuple[dict[str, Window], tuple[tuple[Instruction, ...], ...], tuple[Communicator, ...]]:
    """Windows that are run, by name, orders by rank, and communicators in the order of their creation.

    overlap: "off" waits for every message, collective and sum (but of ties) as soon as it is started, and
    posts a receive one message ahead (less would deadlock): the baseline that hides nothing. The others
    differ in schedule and windows alone.
    windows: by name, every kind that the schedule has, in the order of their items; as captured without it.
    Of last runs, those that are there are taken, and others are made of their kind (`with_sums`).
    sent_before: for a message, the index of the sender's run (counted in runs) before which the send is
    waited for; messages that are not named are waited for at the end of the step.
    """
    sums = make_sums(job, schedule)
    if windows is None:
        windows = captured_windows(job, schedule, at_once=overlap == "off")
    start_order = _start_order(sums, schedule)
    windows = dict(windows)
    names = [[window_name(slot) for slot in order] for order in schedule.orders]
    if overlap != "off":
        for rank, at, buckets in _inside(sums, start_order):
            plain, names[rank][at] = names[rank][at], last_name(names[rank][at])
            if names[rank][at] not in windows:
                windows[names[rank][at]] = with_sums(job, windows[plain], buckets)
    windows = {name: windows[name] for of_rank in names for name in of_rank}
    of_window = {name: _Traffic.of(window) for name, window in windows.items()}
    traffic = [[of_window[name] for name in of_rank] for of_rank in names]
    sends = {rank: _sends(job, schedule, traffic, rank) for rank in range(schedule.ranks)}
    latest = _latest(job, schedule, traffic) if overlap == "off" else {}
    orders = tuple(
        _order(
            *(job, schedule, traffic, sends, rank, overlap != "off", sent_before or {}, latest, sums),
            start_order,
            names[rank],
        )
        for rank in range(schedule.ranks)
    )
    return windows, orders, communicators_of(job, schedule)


def captured_windows(job: Job, schedule: Schedule, *, at_once: bool = False) -> dict[str, Window]:
    """Step 1: every kind of window that the schedule has, by name.

    at_once: collectives are waited for directly after their starts, else where the captured ops have it.
    """
    windows: dict[str, Window] = {}
    for order in schedule.orders:
        for slot in order:
            if window_name(slot) not in windows:
                made = make_window(job, slot)
                windows[made.name] = waits_at_once(job, made) if at_once else made
    return windows


@dataclass(frozen=True, slots=True)
class _Traffic:
    """A window's sends and waits as (edge, part), in order: what its runs exchange."""

    sends: tuple[tuple[int, int], ...]
    waits: tuple[tuple[int, int], ...]

    @staticmethod
    def of(window: Window) -> _Traffic:
        def pick(kind: ItemKind) -> tuple[tuple[int, int], ...]:
            return tuple((int(item.ref), item.part) for item in window.items if item.kind is kind)

        return _Traffic(pick(ItemKind.SEND), pick(ItemKind.WAIT))


def _bound(slot: Slot, traffic: tuple[tuple[int, int], ...]) -> list[Message]:
    """A run's messages: a window's traffic with the slot's microbatches."""
    actions = slot.actions
    return [(edge, actions[part].microbatch) for edge, part in traffic]


_Traffics = Sequence[Sequence[_Traffic]]
"""By rank, of each of its runs."""


def _sends(job: Job, schedule: Schedule, traffic: _Traffics, rank: int) -> dict[int, list[Message]]:
    """What the rank sends to each other rank, in order. A value for the rank itself needs no message."""
    result: dict[int, list[Message]] = defaultdict(list)
    for slot, of_run in zip(schedule.orders[rank], traffic[rank], strict=True):
        for edge, microbatch in _bound(slot, of_run.sends):
            to = schedule.stage_ranks[job.edges[edge].target]
            if to != rank:
                result[to].append((edge, microbatch))
    return result


def _latest(job: Job, schedule: Schedule, traffic: _Traffics) -> dict[Message, int]:
    """Step 3, where sends are waited for at once: `stretto.schedule.posting`."""
    place = schedule.stage_ranks

    def across(edge: int) -> bool:
        return place[job.edges[edge].source] != place[job.edges[edge].target]

    waits = [
        [[m for m in _bound(slot, of_run.waits) if across(m[0])] for slot, of_run in zip(order, of_rank)]
        for order, of_rank in zip(schedule.orders, traffic, strict=True)
    ]
    sends = [
        [
            {m: place[job.edges[m[0]].target] for m in _bound(slot, of_run.sends) if across(m[0])}
            for slot, of_run in zip(order, of_rank)
        ]
        for order, of_rank in zip(schedule.orders, traffic, strict=True)
    ]
    return latest_posts(waits, sends)


def _order(
    job: Job,
    schedule: Schedule,
    traffic: _Traffics,
    sends: Mapping[int, Mapping[int, list[Message]]],
    rank: int,
    overlap: bool,
    sent_before: Mapping[Message, int],
    latest: Mapping[Message, int],
    sums: Sums,
    start_order: Sequence[tuple[Bucket, Mapping[int, int]]],
    names: Sequence[str],
) -> tuple[Instruction, ...]:
    """Steps 2 to 5 for one rank. names: of its runs' windows."""
    order = schedule.orders[rank]
    runs = list(zip(order, traffic[rank], strict=True))
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    end: list[Instruction] = []

    # 3. Receives, in the sender's order, posted early but never before the buffers are worth it.
    needed = {message: at for at, (slot, of_run) in enumerate(runs) for message in _bound(slot, of_run.waits)}
    for sender in range(schedule.ranks):
        messages = sends[sender].get(rank, []) if sender != rank else []
        for message, at in post_positions(messages, needed, LOOKAHEAD if overlap else 1, latest):
            before[at].append(Instruction(InstructionKind.RECV, message[0], (message[1],)))

    # 4. Sends, in their order: a later one is never waited for before an earlier one.
    started = {
        message: at for at, (slot, of_run) in enumerate(runs) for message in _bound(slot, of_run.sends)
    }
    for messages in sends[rank].values():
        earliest = 0
        for message in messages:
            when = sent_before.get(message, len(order)) if overlap else started[message] + 1
            earliest = max(earliest, when)
            instruction = Instruction(InstructionKind.SENT, message[0], (message[1],))
            (end if earliest >= len(order) else before[earliest]).append(instruction)

    # 5. The loss and gradients leave after the last run that adds to them.
    loss_stage, _ = job.loss
    finish: list[Instruction] = []
    last_forward = _last_runs(order).get((loss_stage, Phase.F))
    told = last_forward or 0
    if tells_loss(job, schedule.ranks):
        tell = Instruction(InstructionKind.LOSS)
        if last_forward is None:
            # One run before the end, so that the loss travels under that run; but before any sum of ties, as
            # where the loss is: collectives that join places start in one order on all of them.
            ties = [last[rank] for bucket, last in start_order if rank in last and _is_tied(bucket)]
            where = min([len(order) - 1, *ties])
            (before[where] if order else end).append(tell)
        else:
            after[last_forward].append(tell)
        finish.append(Instruction(InstructionKind.HEARD))
    earliest = told
    for bucket, last in start_order:
        if rank not in last:
            continue
        start, wait = (Instruction(k, bucket.name) for k in (InstructionKind.REDUCE, InstructionKind.REDUCED))
        if _is_tied(bucket):
            # One order on all ranks, so a sum never starts before those that stand before it. A rank that
            # holds a copy and adds nothing to it could start at once, but for the loss.
            earliest = max(earliest, last[rank])
            after[earliest].append(start)
        elif not overlap:
            after[last[rank]] += [start, wait]
            continue
        finish.append(wait)
    for together in sums.late[rank]:
        finish += [Instruction(InstructionKind.REDUCE, name) for name in together]
        finish += [Instruction(InstructionKind.REDUCED, name) for name in together]

    instructions: list[Instruction] = []
    for at, (slot, name) in enumerate(zip(order, names, strict=True)):
        instructions += before[at]
        microbatches = tuple(action.microbatch for action in slot.actions)
        instructions.append(Instruction(InstructionKind.RUN, name, microbatches))
        instructions += after[at]
    return (*instructions, *end, *finish)


def _last_runs(order: Sequence[Slot]) -> dict[tuple[int, Phase], int]:
    """(stage, phase) -> its last run in a rank's order."""
    return {
        (action.stage, phase): at
        for at, slot in enumerate(order)
        for action in slot.actions
        for phase in action.phase.parts
    }


def _is_tied(bucket: Bucket) -> bool:
    return bucket.communicator.startswith("tied ")


def _inside(
    sums: Sums, start_order: Sequence[tuple[Bucket, Mapping[int, int]]]
) -> Iterator[tuple[int, int, list[Bucket]]]:
    """Runs in which sums start: rank, index of the run, and the buckets."""
    for rank in range(len(sums.early)):
        inside: dict[int, list[Bucket]] = defaultdict(list)
        for bucket, last in start_order:
            if rank in last and not _is_tied(bucket):
                inside[last[rank]].append(bucket)
        for at, buckets in inside.items():
            yield rank, at, buckets


def _start_order(sums: Sums, schedule: Schedule) -> list[tuple[Bucket, dict[int, int]]]:
    """Buckets that start early with, for each rank that holds one, its last run that adds to the gradient;
    in the one order in which all ranks start the sums: by the latest last run, then as in the plan."""
    runs = [_last_runs(order) for order in schedule.orders]
    found: list[tuple[Bucket, dict[int, int]]] = []
    for bucket in sums.buckets:
        last = {
            rank: max((runs[rank][made] for made in starts[bucket.name] if made in runs[rank]), default=0)
            for rank, starts in enumerate(sums.early)
            if bucket.name in starts
        }
        if last:
            found.append((bucket, last))
    return sorted(found, key=lambda item: max(item[1].values()))
