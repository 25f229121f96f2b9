"""Lower a schedule onto a job: windows of ops, and every rank's order of instructions.

The contract: the schedule is legal (`stretto.verify` checks), stages match the job. Costs play no part: who
knows them may give windows in a better order of items (`stretto.order`).

    1. A window for each kind of slot: the ops of its parts, a wait before the first op that reads a
       received value, a send after the op that makes a value that leaves. So a message leaves when its
       tensor is ready, and is waited for as late as possible.
    2. Each rank runs its windows in the schedule's order.
    3. For each communicator, the receiver posts its receives in the order in which the sender starts
       its sends. A receive is posted some messages before it is needed, and `ahead` microbatches before,
       so that the transfer never waits for the receiver, and no more buffers are live than that. Where
       sends are waited for at once, also before the first run that the receiver begins after the send, in
       one order of all ranks' runs that the messages allow: walked one run at a time in that order, no rank
       waits forever; so none does in any other order either.
    4. Sends are waited for at the end, or where `sent_before` says that they have left long ago.
    5. What runs once a step is added (`stretto.schedule.once`). Parameters begin to be gathered in the first
       window, and are waited for in the one that reads them first; a gather that needs another starts in a
       window between. A reduction starts in the window that completes the gradient, and one that needs
       another in a window after that, or in the last. One that joins pipeline ranks, as that of the loss,
       starts in a window of its own, as these have one order on all ranks. What no start needs is waited for
       in a window at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from stretto.ir.action import BEFORE, Schedule
from stretto.ir.costs import Costs
from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan, Window
from stretto.ir.program import Job, OverlapMode
from stretto.order.policies import waits_at_once
from stretto.planning.once_places import OncePlaces, once_places
from stretto.schedule.once import communicators_of, has_once, with_once
from stretto.schedule.windows import make_window, window_name, with_guests

LOOKAHEAD = 3
"""Receives posted ahead of the one that is needed, at least. Two keep a saturated link busy (one in transfer,
one matched); the third absorbs jitter. Assumed; the cost is three activation buffers a communicator. Where
many messages make a microbatch's, `stretto.planning.finish` decides whether more are worth it."""


Message = tuple[int, int]
"""(edge index, microbatch)."""


def lower(
    job: Job,
    schedule: Schedule,
    costs: Costs,
    *,
    overlap: OverlapMode = "local",
    windows: Mapping[str, Window] | None = None,
    sent_before: Mapping[Message, int] | None = None,
    ahead: int = 0,
) -> Plan:
    """The plan, neither proved nor simulated.

    overlap: "off" waits for every message, collective and sum (but of ties) as soon as it is started, and
    posts a receive one message ahead (less would deadlock): the baseline that hides nothing. The others
    differ in schedule and windows only.
    windows: by name, every kind that the schedule has, in the order of their items; as captured without it.
    Of last runs, those that are there are taken, and others are made of their kind (`last_run`).
    sent_before: for a message, the index of the sender's run (counted in runs) before which the send is
    waited for; messages that are not named are waited for at the end of the step.
    ahead: microbatches before the one that needs it a receive is posted at the latest (`post_positions`);
    of one message a microbatch, `LOOKAHEAD` is more. Not where overlap is "off".
    """
    if windows is None:
        windows = captured_windows(job, schedule, at_once=overlap == "off")
    job = job if has_once(job) else with_once(job, schedule)
    communicators = communicators_of(job, schedule)
    once = once_places(job, schedule, communicators, overlap != "off")
    windows = dict(windows)
    names = [[window_name(slot) for slot in order] for order in schedule.orders]
    for rank, of_rank in enumerate(once):
        for at, guests in sorted(of_rank.guests.items()):
            plain, names[rank][at] = names[rank][at], guests.name(names[rank][at])
            if names[rank][at] not in windows:
                windows[names[rank][at]] = with_guests(
                    job, windows[plain], names[rank][at], of_rank.stage, guests
                )
    windows = {name: windows[name] for of_rank in names for name in of_rank}
    sends = _messages(job, schedule, windows, names, ItemKind.SEND)
    waits = _messages(job, schedule, windows, names, ItemKind.WAIT)
    if overlap == "off":
        posts = partial(post_positions, lookahead=1, latest=latest_posts(waits, sends), ahead=0)
        sent_before = {
            message: at + 1 for of_rank in sends for at, of_run in enumerate(of_rank) for message in of_run
        }
    else:
        posts = partial(post_positions, lookahead=LOOKAHEAD, latest={}, ahead=ahead)
    orders = tuple(
        _order(schedule, rank, names[rank], sends, waits[rank], posts, sent_before or {}, once[rank])
        for rank in range(schedule.ranks)
    )
    windows.update((window.name, window) for of_rank in once for window in of_rank.windows)
    return Plan(job, schedule, windows, orders, communicators, costs, overlap=overlap)


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


def _messages(
    job: Job,
    schedule: Schedule,
    windows: Mapping[str, Window],
    names: Sequence[Sequence[str]],
    kind: ItemKind,
) -> list[list[dict[Message, int]]]:
    """By rank, of each of its runs: what it sends to other ranks, or waits for, in order, with the rank that
    receives it. names: of runs' windows. A value for the rank itself needs no message."""
    receivers = [schedule.stage_ranks[edge.target] for edge in job.edges]
    crosses = [schedule.stage_ranks[edge.source] != to for edge, to in zip(job.edges, receivers, strict=True)]
    of_window = {
        name: [(int(item.ref), item.part) for item in window.items if item.kind is kind]
        for name, window in windows.items()
    }
    return [
        [
            {
                (edge, slot.actions[part].microbatch): receivers[edge]
                for edge, part in of_window[name]
                if crosses[edge]
            }
            for slot, name in zip(order, of_rank, strict=True)
        ]
        for order, of_rank in zip(schedule.orders, names, strict=True)
    ]


def _order(
    schedule: Schedule,
    rank: int,
    names: Sequence[str],
    sends: Sequence[Sequence[Mapping[Message, int]]],
    waits: Sequence[Mapping[Message, int]],
    posts: Callable[[Sequence[Message], Mapping[Message, int]], Iterable[tuple[Message, int]]],
    sent_before: Mapping[Message, int],
    once: OncePlaces,
) -> tuple[Instruction, ...]:
    """Steps 2 to 5 for one rank. names: of its runs' windows; sends: of all ranks, waits: of this one."""
    order = schedule.orders[rank]
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    end: list[Instruction] = []

    # 3. Receives, in the sender's order, posted early but never before the buffers are worth it.
    needed = {message: at for at, of_run in enumerate(waits) for message in of_run}
    for of_sender in sends:
        messages = [message for of_run in of_sender for message, to in of_run.items() if to == rank]
        for message, at in posts(messages, needed):
            before[at].append(Instruction(InstructionKind.RECV, message[0], (message[1],)))

    # 4. Sends, in their order: a later one is never waited for before an earlier one.
    sent_to: dict[int, list[Message]] = defaultdict(list)
    for of_run in sends[rank]:
        for message, to in of_run.items():
            sent_to[to].append(message)
    for messages in sent_to.values():
        earliest = 0
        for message in messages:
            earliest = max(earliest, sent_before.get(message, len(order)))
            instruction = Instruction(InstructionKind.SENT, message[0], (message[1],))
            (end if earliest >= len(order) else before[earliest]).append(instruction)

    # 5. What is summed.
    begin = [once.run(once.first, BEFORE)] if once.first else []
    for at, ops in sorted(once.before.items()):
        before[at].append(once.run(ops, BEFORE))
    for at, ops in sorted(once.after.items()):
        (after[at] if at >= 0 else before[0]).append(once.run(ops))
    if once.end:
        end.append(once.run(once.end))

    instructions: list[Instruction] = begin
    for at, (slot, name) in enumerate(zip(order, names, strict=True)):
        instructions += before[at]
        microbatches = tuple(action.microbatch for action in slot.actions)
        once_too = once.guests[at].microbatches if at in once.guests else ()
        instructions.append(Instruction(InstructionKind.RUN, name, microbatches + once_too))
        instructions += after[at]
    return (*instructions, *end)


def post_positions(
    messages: Sequence[Message],
    needed: Mapping[Message, int],
    lookahead: int,
    latest: Mapping[Message, int],
    ahead: int = 0,
) -> list[tuple[Message, int]]:
    """For each message of one communicator, in the sender's order: the run before which it is posted.

    That is before the run that needs the message `lookahead` places ahead of it on the same communicator,
    before the run that needs itself, and `ahead` runs before that, counted in runs that need any message of
    the communicator. needed: the run that waits for it. latest: the run before which it is posted at the
    latest, where sends are waited for at once.
    """
    positions = [0] * len(messages)
    limit: int | None = None
    runs = sorted({needed[message] for message in messages})
    turns = {run: turn for turn, run in enumerate(runs)}
    for k in reversed(range(len(messages))):
        run = needed[messages[k]]
        early = needed[messages[k - lookahead]] if k >= lookahead else 0
        before = runs[turns[run] - ahead] if turns[run] >= ahead else 0
        position = min(early, before, latest.get(messages[k], early))
        limit = position if limit is None else min(limit, position)
        positions[k] = limit
    return list(zip(messages, positions, strict=True))


def latest_posts(
    waits: Sequence[Sequence[Collection[Message]]],
    sends: Sequence[Sequence[Mapping[Message, int]]],
) -> dict[Message, int]:
    """Message -> the first run that its receiver has not begun when it is sent.

    waits[rank][run]: messages of other ranks that a run needs; sends[rank][run]: what it sends, with the rank
    that receives it. All ranks go on by one run at a time, those behind first, as far as their messages are
    there. Messages of runs that can never begin are left out.
    """
    heads = [0] * len(waits)
    sent: set[Message] = set()
    result: dict[Message, int] = {}
    while True:
        able = [
            rank
            for rank in reversed(range(len(waits)))
            if heads[rank] < len(waits[rank]) and sent.issuperset(waits[rank][heads[rank]])
        ]
        if not able:
            return result
        for rank in able:
            for message, receiver in sends[rank][heads[rank]].items():
                result[message] = heads[receiver]
                sent.add(message)
            heads[rank] += 1
