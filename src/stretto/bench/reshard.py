"""The reshard race: plans carried out over slow links, measured against what they predict.

Four hosts with one rank each, float32, one thread a rank. A worker (this module as a program, once on each
host) takes every case in small first, which opens connections and checks all values; then the cases take
turns. A turn lasts from a barrier until the last rank has its part and all that it sent has arrived.

Cases: a tensor on one host goes whole to one, two and three others, along a chain or a copy to each; and a
tensor on two hosts goes to two others, with naive and with balanced senders and order.
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
from stretto.tensor.layout import Layout
from stretto.tensor.reshard.agree import agreement
from stretto.tensor.reshard.execute import execute, part_of
from stretto.tensor.reshard.lines import lines
from stretto.tensor.reshard.plan import Choice, Hosts, Mode, ReshardPlan, plan_reshard

HOSTS = 4
"""Hosts of the lab; each holds one rank."""

ITEMSIZE_BYTES = 4
COLUMNS = 4096
CHECKED_ROWS = 64
"""Rows of the tensor with which values are checked: a MiB."""

PARTS = ("fan-out", "layouts")
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
    found = []
    for count in range(1, HOSTS):
        target = Layout(tuple(range(1, 1 + count)), whole)
        what = f"one host to {count}"
        modes: tuple[Mode, ...] = ("broadcast", "point_to_point") if count > 1 else ("broadcast",)
        found += [Case("fan-out", what, Layout((0,), whole), target, mode, "balanced") for mode in modes]
    choices: tuple[Choice, ...] = ("naive", "balanced")
    for what, before in (("two replicas to rows", whole), ("columns to rows", columns)):
        layouts = Layout((0, 1), before), Layout((2, 3), rows)
        found += [Case("layouts", what, *layouts, "broadcast", choice) for choice in choices]
    return [case for case in found if case.part in parts]


def planned(case: Case, rows: int, bytes_per_s: float) -> ReshardPlan:
    """The plan of a case for a tensor of so many rows, on links of this rate."""
    hosts = Hosts.of(1, HOSTS, link_bytes_per_s=bytes_per_s)
    shape = (rows, COLUMNS)
    return plan_reshard(shape, ITEMSIZE_BYTES, case.source, case.target, hosts, case.mode, choice=case.choice)


class Reshard:
    """One case on this rank: `run` moves the tensor once, `check` looks whether all of it came."""

    def __init__(self, case: Case, rows: int, bytes_per_s: float, in_flight_bytes: int) -> None:
        self.case = case
        self.shape = (rows, COLUMNS)
        self.plan = planned(case, rows, bytes_per_s)
        self.in_flight_bytes = in_flight_bytes
        rank = dist.get_rank()
        # whole numbers that float32 tells apart
        whole = torch.arange(rows * COLUMNS, dtype=torch.float32).remainder_(1 << 24).view(self.shape)
        self.held, self.wanted = (
            None if region is None else whole[tuple(slice(*ends) for ends in region)].clone()
            for region in (case.source.region(self.shape, rank), case.target.region(self.shape, rank))
        )
        self.got = None if self.wanted is None else torch.empty_like(self.wanted)

    def run(self) -> None:
        ranks = sorted({*self.case.source.ranks, *self.case.target.ranks})
        agreement().enter(f"{self.case.name}, {self.shape}")
        group = lines().group("cpu", ranks)
        rank = dist.get_rank()
        if rank in ranks:
            execute(
                self.plan,
                part_of(self.case.source, self.shape, rank, self.held),
                part_of(self.case.target, self.shape, rank, self.got),
                lines(),
                group,
                self.in_flight_bytes,
            )
            lines().drain()

    def check(self) -> None:
        """Raises RunError if a value is not what the target layout says."""
        self.run()
        if self.got is not None and self.wanted is not None and not torch.equal(self.got, self.wanted):
            raise RunError(f"{self.case.name}: rank {dist.get_rank()} did not get its part of the tensor")


def run_worker(setup: Setup, out: Path) -> None:
    """One rank of the race; rank 0 writes the result to `out`. Raises RunError when values are wrong."""
    torch.set_num_threads(setup.threads_per_rank)
    dist.init_process_group("gloo")
    bytes_per_s = link_bytes_per_s(setup.rate)
    chosen = cases(setup.parts)
    for case in chosen:
        Reshard(case, CHECKED_ROWS, bytes_per_s, setup.in_flight_bytes).check()
    rows = (setup.mib << 20) // (COLUMNS * ITEMSIZE_BYTES)
    reshards = {case.name: Reshard(case, rows, bytes_per_s, setup.in_flight_bytes) for case in chosen}
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
