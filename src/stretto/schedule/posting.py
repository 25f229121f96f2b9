"""When receives are posted: late, so that few buffers are kept, but never so that ranks wait forever.

1. A receive is posted before the run that needs the message `lookahead` places ahead of it on the same
   communicator, before the run that needs itself, and `ahead` runs before that, counted in runs that
   need any message of the communicator.
2. Where sends are waited for at once, also before the first run that the receiver begins after the send,
   in one order of all ranks' runs that the messages allow (`latest_posts`). Walked one run at a time in
   that order, no rank waits forever; so none does in any other order either.
3. Posts keep the sender's order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Message = tuple[int, int]
"""(edge index, microbatch)."""


def post_positions(
    messages: Sequence[Message],
    needed: Mapping[Message, int],
    lookahead: int,
    latest: Mapping[Message, int],
    ahead: int = 0,
) -> list[tuple[Message, int]]:
    """For each message of one communicator, in the sender's order: the run before which it is posted.

    needed: the run that waits for it. latest: the run before which it is posted at the latest, where step 2
    says so.
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
