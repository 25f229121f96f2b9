"""A tensor that several meshes need at one time: whoever has received it may send it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.modes import Mode
from stretto.tensor.reshard.plan import (
    PARTS_MUST_SAVE,
    PIECE_BYTES,
    ReshardPlan,
    plan_reshards,
)
from stretto.tensor.reshard.tasks import Tensor


@dataclass(frozen=True, slots=True)
class Together:
    """One plan for tensors of which each may go to several targets.

    parts: for each tensor that the plan speaks of, which of the given ones it is, and to which of its targets
    it goes: all those, for which a rank receives a box once and hands it on, or one by itself.
    """

    plan: ReshardPlan
    parts: tuple[tuple[int, tuple[int, ...]], ...]


def plan_together(
    tensors: Sequence[Tensor],
    hosts: Hosts,
    mode: Mode = "broadcast",
    *,
    piece_bytes: int = PIECE_BYTES,
) -> Together:
    """Plan all that moves at one time; ranks of one target serve those of another where that is better.

    First every target is served for itself, from the source. Then, tensor by tensor, its targets are joined:
    a box goes once to all ranks that need it for any of them, so that a chain runs through the hosts of all,
    and a host that gets it for one target has it for the others. It stays so if that ends earlier, or at the
    same time with fewer bytes between hosts. Targets with a Partial axis hold terms, not the value, and stay
    apart.

    See `plan_reshards` for the rest.
    """
    joined: frozenset[int] = frozenset()
    found = _planned(tensors, joined, hosts, mode, piece_bytes)
    for index, tensor in enumerate(tensors):
        if sum(not target.partial_axes for target in tensor.targets) > 1:
            other = _planned(tensors, joined | {index}, hosts, mode, piece_bytes)
            if _is_better(other.plan, found.plan):
                joined, found = joined | {index}, other
    return found


def _planned(
    tensors: Sequence[Tensor],
    joined: frozenset[int],
    hosts: Hosts,
    mode: Mode,
    piece_bytes: int,
) -> Together:
    parts: list[tuple[int, tuple[int, ...]]] = []
    for index, tensor in enumerate(tensors):
        apart = list(range(len(tensor.targets)))
        if index in joined:
            apart = [at for at in apart if tensor.targets[at].partial_axes]
            parts.append((index, tuple(at for at in range(len(tensor.targets)) if at not in apart)))
        parts += [(index, (at,)) for at in apart]
    split = [
        replace(tensors[index], target=[tensors[index].targets[at] for at in targets])
        for index, targets in parts
    ]
    return Together(plan_reshards(split, hosts, mode, piece_bytes=piece_bytes), tuple(parts))


def _is_better(plan: ReshardPlan, than: ReshardPlan) -> bool:
    """Whether joined targets are worth their smaller boxes."""
    if plan.makespan_us < than.makespan_us * (1 - PARTS_MUST_SAVE):
        return True
    return plan.makespan_us <= than.makespan_us * (1 + 1e-9) and plan.link_bytes < than.link_bytes
