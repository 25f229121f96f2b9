"""The reshard race: plans carried out over slow links, measured against what they predict.

Four hosts with two ranks each, float32, one thread a rank. A worker (`run_worker`, once for each rank)
takes every case in small first, which opens connections and checks all values; then the cases take
turns. A turn lasts from a barrier until the last rank has its part and all that it sent has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from benchmarks.racing import Times, race, say_on_first
from stretto.errors import RunError, UsageError
from stretto.lab.network import parse_rate
from stretto.tensor.layout import Layout, Region, region_shape
from stretto.tensor.reshard.agree import agreement
from stretto.tensor.reshard.execute import LocalBox, execute, lines
from stretto.tensor.reshard.plan import (
    Choice,
    Hosts,
    Mode,
    ReshardPlan,
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
    full, rows, columns = (Replicate(),), (Shard(0),), (Shard(1),)
    first = [host * RANKS_PER_HOST for host in range(HOSTS)]  # the first rank of each host
    result = []
    for part, ranks_each in (("fan-out", 1), ("devices", RANKS_PER_HOST)):
        for count in range(1, HOSTS):
            receivers = tuple(rank + i for rank in first[1 : 1 + count] for i in range(ranks_each))
            what = f"one host to {count}" if ranks_each == 1 else f"one rank to {count} x {ranks_each}"
            targets = (Layout(receivers, full),)
            # to one receiver a chain is a plain message
            several = len(receivers) > 1
            modes: tuple[Mode, ...] = ("broadcast", "point_to_point") if several else ("broadcast",)
            result += [Case(part, what, Layout((0,), full), targets, mode, "balanced") for mode in modes]
    choices: tuple[Choice, ...] = ("naive", "balanced")
    for what, before in (("two replicas to rows", full), ("columns to rows", columns)):
        source, targets = Layout(tuple(first[:2]), before), (Layout(tuple(first[2:]), rows),)
        result += [Case("layouts", what, source, targets, "broadcast", choice) for choice in choices]
    two = tuple(Layout((rank, rank + 1), full) for rank in first[2:])
    for what, source in (("whole", Layout((0,), full)), ("rows", Layout(tuple(first[:2]), rows))):
        for how, together in (("in turn", False), ("together", True)):
            words = f"{what} to 2 meshes {how}"
            result.append(Case("meshes", words, source, two, "broadcast", "balanced", together))
    return [case for case in result if case.part in parts]


def planned(case: Case, rows: int, bytes_per_s: float) -> list[Planned]:
    """The plans of a case for a tensor of so many rows, on links of this rate; one after the other."""
    shape, hosts = (rows, COLUMNS), _hosts(bytes_per_s)
    if case.together:
        joint = plan_together([_tensor(case, rows)], hosts, case.mode)
        return [Planned(joint.plan, tuple(targets for _, targets in joint.parts))]
    plans = (
        plan_reshards(
            [Tensor(shape, ITEMSIZE_BYTES, case.source, target)], hosts, case.mode, choice=case.choice
        )
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


CHECKED_ROWS = 64
"""Rows of the tensor with which values are checked: a MiB."""


@dataclass(frozen=True, slots=True)
class ReshardRace:
    """mib: size of the tensor. in_flight_bytes: what a rank may have under way before it waits."""

    rate: str = "200mbit"
    mib: int = 64
    rounds: int = 3
    parts: tuple[str, ...] = PARTS
    in_flight_bytes: int = 4 << 20
    threads_per_rank: int = 1
    world: int = HOSTS * RANKS_PER_HOST


Memory = dict[tuple[str, Region], torch.Tensor]


class Reshard:
    """One case on this rank: `run` moves the tensor once, `check` looks whether all of it came.

    memory: of parts by name and region, those kept and those to be filled, which the cases of one size share.
    """

    def __init__(
        self, case: Case, rows: int, bytes_per_s: float, in_flight_bytes: int, memory: Memory
    ) -> None:
        self.case = case
        self.shape = (rows, COLUMNS)
        self.plans = planned(case, rows, bytes_per_s)
        self.bound_s = bound_s(case, rows, bytes_per_s)
        self.in_flight_bytes = in_flight_bytes
        rank = dist.get_rank()
        kept = case.source.region(self.shape, rank)
        if kept is not None and ("kept", kept) not in memory:
            memory["kept", kept] = self._values(kept)
        self.source = LocalBox(kept, None if kept is None else memory["kept", kept])
        self.targets = []
        for number, target in enumerate(case.targets):
            wanted = target.region(self.shape, rank)
            key = f"target {number}", wanted or ()
            if wanted is not None and key not in memory:
                memory[key] = torch.empty(region_shape(wanted))
            self.targets.append(LocalBox(wanted, None if wanted is None else memory[key]))

    def _values(self, region: Region) -> torch.Tensor:
        """A part of the tensor, whose values are integers that float32 has exactly."""
        rows, columns = self.shape
        full = torch.arange(rows * columns, dtype=torch.float32).remainder_(1 << 24).view(self.shape)
        return full[tuple(slice(*ends) for ends in region)].clone()

    def run(self) -> None:
        ranks = {rank for layout in (self.case.source, *self.case.targets) for rank in layout.ranks}
        agreement().enter(f"{self.case.name}, {self.shape}")
        group = lines().group("cpu", sorted(ranks))
        if dist.get_rank() in ranks:
            for one in self.plans:
                sources = [self.source for _ in one.goes]
                targets = [[self.targets[number] for number in numbers] for numbers in one.goes]
                execute(one.plan, sources, targets, lines(), group, self.in_flight_bytes)
            lines().drain()

    def check(self) -> None:
        """Raises RunError if a value is not what a target layout says."""
        for part in self.targets:
            if part.tensor is not None:
                part.tensor.fill_(-1.0)  # what an earlier case left must not count
        self.run()
        for part in self.targets:
            if part.tensor is None or part.region is None:
                continue
            if not torch.equal(part.tensor, self._values(part.region)):
                raise RunError(f"{self.case.name}: rank {dist.get_rank()} did not get its part of the tensor")


def run_worker(setup: ReshardRace) -> dict[str, Any]:
    """One rank of the race. Raises RunError when values are wrong."""
    bytes_per_s = link_bytes_per_s(setup.rate)
    chosen = cases(tuple(setup.parts))

    def made(rows: int) -> list[Reshard]:
        memory: Memory = {}
        return [Reshard(case, rows, bytes_per_s, setup.in_flight_bytes, memory) for case in chosen]

    for small in made(CHECKED_ROWS):
        small.check()
    rows = (setup.mib << 20) // (COLUMNS * ITEMSIZE_BYTES)
    reshards = {one.case.name: one for one in made(rows)}
    systems: dict[str, Callable[[], object]] = {name: one.run for name, one in reshards.items()}
    # what warm-ups are for was done in small
    times = race(systems, setup.rounds, say=say_on_first, warm_ups=0)
    return {"setup": asdict(setup), "rows": [_row(one, times[name]) for name, one in reshards.items()]}


def link_bytes_per_s(rate: str) -> float:
    """Bytes a second of a link's rate. Raises UsageError for `unlimited`, of which no plan can be made."""
    bits_per_s = parse_rate(rate)
    if bits_per_s is None:
        raise UsageError("--rate unlimited: a plan has nothing to predict from; give a rate such as 200mbit")
    return bits_per_s / 8


def _row(one: Reshard, times: Times) -> dict[str, Any]:
    predicted_s = sum(planned.plan.makespan_us for planned in one.plans) / 1e6
    return {
        "case": one.case.what,
        "mode": one.case.mode,
        "choice": one.case.choice,
        "predicted_s": predicted_s,
        "bound_s": one.bound_s,
        "measured_s": times.median_s,
        "rounds_s": list(times.rounds),
        "measured_over_predicted": times.median_s / predicted_s,
        "ratio_to_bound": times.median_s / one.bound_s,
        "link_bytes": sum(planned.plan.link_bytes for planned in one.plans),
    }


SETUP = ReshardRace
"""What a worker of this module takes."""
