"""The shortest order of a small window, by looking at all of them: what policies are compared with.

    1. What of an order counts for what comes after it: which nodes are already, the time, when each lane is
       free, and when the collectives that no one has waited for are done.
    2. Of two orders of the same nodes, one that is no later in any of these can only end sooner.

So orders grow node by node, and only those that no other beats are kept. Knows collectives on lanes and
waits; nothing of messages, of shares of the processor, of ranks that come apart, or of memory.
"""

from __future__ import annotations

from stretto.order.depend import Role, WindowGraph

State = tuple[float, ...]
"""Time, then by lane when it is free, then by collective when it is done (0 before its start and after its
wait)."""


def shortest_us(graph: WindowGraph) -> float:
    """How long the shortest legal order takes."""
    nodes = graph.nodes
    assert not graph.skew
    assert all(n.role in (Role.COMPUTE, Role.START, Role.FINISH) and not n.load for n in nodes)
    lanes = sorted({node.lane for node in nodes if node.role is Role.START})
    starts = [index for index, node in enumerate(nodes) if node.role is Role.START]
    free_at = {lane: 1 + k for k, lane in enumerate(lanes)}
    done_at = {start: 1 + len(lanes) + k for k, start in enumerate(starts)}
    needs = [sum(1 << needed for needed in before) for before in graph.before]

    def behind(state: State, index: int) -> State:
        node, new = nodes[index], list(state)
        if node.role is Role.FINISH:
            new[0] = max(new[0], new[done_at[node.start]])
            new[done_at[node.start]] = 0.0
        elif node.role is Role.START:
            free = free_at[node.lane]
            new[free] = new[done_at[index]] = max(new[0], new[free]) + node.time_us
        new[0] += node.work_us
        return tuple(new)

    first = (0.0,) * (1 + len(lanes) + len(starts))
    found: dict[int, list[State]] = {0: [first]}
    for _ in nodes:
        longer: dict[int, list[State]] = {}
        for placed, states in found.items():
            for index in range(len(nodes)):
                if not placed >> index & 1 and placed & needs[index] == needs[index]:
                    kept = longer.setdefault(placed | 1 << index, [])
                    for state in states:
                        _keep(kept, behind(state, index))
        found = longer
    [ends] = found.values()
    return min(state[0] for state in ends)


def _keep(kept: list[State], new: State) -> None:
    """Step 2."""
    if any(all(a <= b for a, b in zip(old, new, strict=True)) for old in kept):
        return
    kept[:] = [old for old in kept if not all(a <= b for a, b in zip(new, old, strict=True))]
    kept.append(new)
