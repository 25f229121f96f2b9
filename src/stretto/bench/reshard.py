"""The reshard race: plans carried out over slow links, measured against what they predict.

Four hosts with two ranks each, float32, one thread a rank. A worker (this module as a program, once for each
rank) takes every case in small first, which opens connections and checks all values; then the cases take
turns. A turn lasts from a barrier until the last rank has its part and all that it sent has arrived.

    fan-out   a tensor on a rank goes whole to a rank on one, two and three other hosts, along a chain or a
              copy to each
    devices   the same to both ranks of one, two and three other hosts: a copy to each goes over the
              receiver's link twice, a chain once
    layouts   a tensor on two hosts, a rank each, goes to two others, with naive and with balanced senders
              and order
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from stretto.bench.race import Times, race
from stretto.errors import RunError, UsageError
from stretto.lab.rates import parse_rate
from stretto.tensor.layout import Layout, Region, region_shape
from stretto.tensor.reshard.agree import agreement
from stretto.tensor.reshard.execute import execute, part_of
from stretto.tensor.reshard.lines import lines
from stretto.tensor.reshard.plan import Choice, Hosts, Mode, ReshardPlan, plan_reshard

HOSTS = 4
RANKS_PER_HOST = 2
"""Of the lab."""

ITEMSIZE_BYTES = 4
COLUMNS = 4096
CHECKED_ROWS = 64
"""Rows of the tensor with which values are checked: a MiB."""

PARTS = ("fan-out", "devices", "layouts")
"""Parts of the race that can be chosen."""


@dataclass(frozen=True, slots=True)
class Setup:
    """mib: size of the tensor. in_flight_bytes: what a rank may have under way before it waits."""

    rate: str = "200mbit"
    mib: int = 64
    rounds: int = 3
    parts: tuple[str, ...] = PARTS
    in_flight_bytes: int = 4 << 20
    threads_per_rank: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One reshard and how it is planned. what: the reshard in words."""

    part: str
    what: str
    source: Layout
    target: Layout
    mode: Mode
    choice: Choice

    @property
    def name(self) -> str:
        return f"{self.what}, {self.mode}, {self.choice}"


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
            layouts = Layout((0,), whole), Layout(receivers, whole)
            # to one receiver a chain is a plain message
            several = len(receivers) > 1
            modes: tuple[Mode, ...] = ("broadcast", "point_to_point") if several else ("broadcast",)
            found += [Case(part, what, *layouts, mode, "balanced") for mode in modes]
    choices: tuple[Choice, ...] = ("naive", "balanced")
    for what, before in (("two replicas to rows", whole), ("columns to rows", columns)):
        layouts = Layout(tuple(first[:2]), before), Layout(tuple(first[2:]), rows)
        found += [Case("layouts", what, *layouts, "broadcast", choice) for choice in choices]
    return [case for case in found if case.part in parts]


def planned(case: Case, rows: int, bytes_per_s: float) -> ReshardPlan:
    """The plan of a case for a tensor of so many rows, on links of this rate."""
    hosts = Hosts.of(RANKS_PER_HOST, HOSTS * RANKS_PER_HOST, link_bytes_per_s=bytes_per_s)
    shape = (rows, COLUMNS)
    return plan_reshard(shape, ITEMSIZE_BYTES, case.source, case.target, hosts, case.mode, choice=case.choice)


Memory = dict[tuple[str, Region], torch.Tensor]


class Reshard:
    """One case on this rank: `run` moves the tensor once, `check` looks whether all of it came.

    memory: of parts by region, those held and those to be filled, which the cases of one size share.
    """

    def __init__(
        self, case: Case, rows: int, bytes_per_s: float, in_flight_bytes: int, memory: Memory
    ) -> None:
        self.case = case
        self.shape = (rows, COLUMNS)
        self.plan = planned(case, rows, bytes_per_s)
        self.in_flight_bytes = in_flight_bytes
        rank = dist.get_rank()
        held, self.wanted = case.source.region(self.shape, rank), case.target.region(self.shape, rank)
        if held is not None and ("held", held) not in memory:
            memory["held", held] = self._values(held)
        if self.wanted is not None and ("got", self.wanted) not in memory:
            memory["got", self.wanted] = torch.empty(region_shape(self.wanted))
        self.held = None if held is None else memory["held", held]
        self.got = None if self.wanted is None else memory["got", self.wanted]

    def _values(self, region: Region) -> torch.Tensor:
        """A part of the tensor, whose values are whole numbers that float32 tells apart."""
        rows, columns = self.shape
        whole = torch.arange(rows * columns, dtype=torch.float32).remainder_(1 << 24).view(self.shape)
        return whole[tuple(slice(*ends) for ends in region)].clone()

    def run(self) -> None:
        ranks = sorted({*self.case.source.ranks, *self.case.target.ranks})
        agreement().enter(f"{self.case.name}, {self.shape}")
        group = lines().group("cpu", ranks)
        rank = dist.get_rank()
        if rank in ranks:
            execute(
                self.plan,
                [part_of(self.case.source, self.shape, rank, self.held)],
                [[part_of(self.case.target, self.shape, rank, self.got)]],
                lines(),
                group,
                self.in_flight_bytes,
            )
            lines().drain()

    def check(self) -> None:
        """Raises RunError if a value is not what the target layout says."""
        if self.got is not None:
            self.got.fill_(-1.0)  # what an earlier case left must not count
        self.run()
        if (
            self.got is not None
            and self.wanted is not None
            and not torch.equal(self.got, self._values(self.wanted))
        ):
            raise RunError(f"{self.case.name}: rank {dist.get_rank()} did not get its part of the tensor")


def run_worker(setup: Setup, out: Path) -> None:
    """One rank of the race; rank 0 writes the result to `out`. Raises RunError when values are wrong."""
    torch.set_num_threads(setup.threads_per_rank)
    dist.init_process_group("gloo")
    bytes_per_s = link_bytes_per_s(setup.rate)
    chosen = cases(setup.parts)

    def made(rows: int) -> list[Reshard]:
        memory: Memory = {}
        return [Reshard(case, rows, bytes_per_s, setup.in_flight_bytes, memory) for case in chosen]

    for small in made(CHECKED_ROWS):
        small.check()
    rows = (setup.mib << 20) // (COLUMNS * ITEMSIZE_BYTES)
    reshards = {one.case.name: one for one in made(rows)}
    systems: dict[str, Callable[[], object]] = {name: one.run for name, one in reshards.items()}

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, file=sys.stderr, flush=True)

    # what warm-ups are for was done in small
    times = race(systems, setup.rounds, say=say, warm_ups=0)
    if dist.get_rank() == 0:
        result = {"setup": asdict(setup), "rows": [_row(one, times[name]) for name, one in reshards.items()]}
        out.write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def link_bytes_per_s(rate: str) -> float:
    """Bytes a second of a link's rate. Raises UsageError for `unlimited`, of which no plan can be made."""
    bits_per_s = parse_rate(rate)
    if bits_per_s is None:
        raise UsageError("--rate unlimited: a plan has nothing to predict from; give a rate such as 200mbit")
    return bits_per_s / 8


def _row(one: Reshard, times: Times) -> dict[str, Any]:
    predicted_s, bound_s = one.plan.makespan_us / 1e6, one.plan.bound_us / 1e6
    return {
        "case": one.case.what,
        "mode": one.case.mode,
        "choice": one.case.choice,
        "predicted_s": predicted_s,
        "bound_s": bound_s,
        "measured_s": times.median_s,
        "rounds_s": list(times.rounds),
        "measured_over_predicted": times.median_s / predicted_s,
        "ratio_to_bound": times.median_s / bound_s,
        "link_bytes": one.plan.link_bytes,
    }


def main() -> None:
    """The worker's entry: `python -m stretto.bench.reshard SETUP_JSON OUT`, once on each host."""
    given = json.loads(sys.argv[1])
    run_worker(Setup(**{**given, "parts": tuple(given["parts"])}), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
