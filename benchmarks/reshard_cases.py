"""The cases of the reshard race, and how each is planned. No device, no process group.

fan-out   a tensor on a rank goes whole to a rank on one, two and three other hosts, along a chain or a
          copy to each
devices   the same to both ranks of one, two and three other hosts: a copy to each goes over the
          receiver's link twice, a chain once
layouts   a tensor on two hosts, a rank each, goes to two others, with naive and with balanced senders
          and order
meshes    a tensor goes to two meshes, one after the other, and both together
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard

from stretto.errors import UsageError
from stretto.tensor.layout import Layout
from stretto.tensor.reshard.plan import (
    Choice,
    Hosts,
    Mode,
    ReshardPlan,
    plan_reshard,
    plan_reshards,
    plan_together,
)
from stretto.tensor.reshard.tasks import Tensor

HOSTS = 4
RANKS_PER_HOST = 2
"""Of the lab."""

ITEMSIZE_BYTES = 4
COLUMNS = 4096

PARTS = ("fan-out", "devices", "layouts", "meshes")
"""Parts of the race that can be chosen."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is moved and how it is planned. what: in words. together: to all targets by one plan."""

    part: str
    what: str
    source: Layout
    targets: tuple[Layout, ...]
    mode: Mode
    choice: Choice
    together: bool = False

    @property
    def name(self) -> str:
        return f"{self.what}, {self.mode}, {self.choice}"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan to carry out. goes: for each tensor that it speaks of, the numbers of the case's targets."""

    plan: ReshardPlan
    goes: tuple[tuple[int, ...], ...]


def cases(parts: tuple[str, ...] = PARTS) -> list[Case]:
    """The cases of these parts. Raises UsageError for a part that there is not."""
    if wrong := [part for part in parts if part not in PARTS]:
        raise UsageError(f"--cases {wrong[0]}: choose of {', '.join(PARTS)}")
    whole, rows, columns = (Replicate(),), (Shard(0),), (Shard(1),)
    first = [host * RANKS_PER_HOST for host in range(HOSTS)]  # the first rank of each host
    found = []
    for part, ranks_each in (("fan-out", 1), ("devices", RANKS_PER_HOST)):
        for count in range(1, HOSTS):
            receivers = tuple(rank + i for rank in first[1 : 1 + count] for i in range(ranks_each))
            what = f"one host to {count}" if ranks_each == 1 else f"one rank to {count} x {ranks_each}"
            targets = (Layout(receivers, whole),)
            # to one receiver a chain is a plain message
            several = len(receivers) > 1
            modes: tuple[Mode, ...] = ("broadcast", "point_to_point") if several else ("broadcast",)
            found += [Case(part, what, Layout((0,), whole), targets, mode, "balanced") for mode in modes]
    choices: tuple[Choice, ...] = ("naive", "balanced")
    for what, before in (("two replicas to rows", whole), ("columns to rows", columns)):
        source, targets = Layout(tuple(first[:2]), before), (Layout(tuple(first[2:]), rows),)
        found += [Case("layouts", what, source, targets, "broadcast", choice) for choice in choices]
    two = tuple(Layout((rank, rank + 1), whole) for rank in first[2:])
    for what, source in (("whole", Layout((0,), whole)), ("rows", Layout(tuple(first[:2]), rows))):
        for how, together in (("in turn", False), ("together", True)):
            words = f"{what} to 2 meshes {how}"
            found.append(Case("meshes", words, source, two, "broadcast", "balanced", together))
    return [case for case in found if case.part in parts]


def planned(case: Case, rows: int, bytes_per_s: float) -> list[Planned]:
    """The plans of a case for a tensor of so many rows, on links of this rate; one after the other."""
    shape, hosts = (rows, COLUMNS), _hosts(bytes_per_s)
    if case.together:
        joint = plan_together([_tensor(case, rows)], hosts, case.mode)
        return [Planned(joint.plan, tuple(targets for _, targets in joint.parts))]
    plans = (
        plan_reshard(shape, ITEMSIZE_BYTES, case.source, target, hosts, case.mode, choice=case.choice)
        for target in case.targets
    )
    return [Planned(plan, ((number,),)) for number, plan in enumerate(plans)]


def bound_s(case: Case, rows: int, bytes_per_s: float) -> float:
    """The time that nothing which moves this tensor to all targets can be under, seconds."""
    return plan_reshards([_tensor(case, rows)], _hosts(bytes_per_s)).bound_us / 1e6


def _tensor(case: Case, rows: int) -> Tensor:
    return Tensor((rows, COLUMNS), ITEMSIZE_BYTES, case.source, case.targets)


def _hosts(bytes_per_s: float) -> Hosts:
    return Hosts.of(RANKS_PER_HOST, HOSTS * RANKS_PER_HOST, link_bytes_per_s=bytes_per_s)
