"""The calibration file: what `stretto calibrate` measured of a machine or a cluster, readable and strict.

`stride` is the distance between the ranks of a group (1 for neighbours, as those of the innermost axis);
`hosts` how many hosts it spans. `stretto.price.priced` prices jobs from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from stretto.files.codec import UNWRITTEN, Amount, Codec, Fits, Natural, rounded
from stretto.files.typed_file import TypedFile
from stretto.ir.collectives import PRICED
from stretto.ir.costs import BYTES_PER_MB, CollectiveCost, Link
from stretto.ir.program import WAIT, Job

CODEC = Codec({float: rounded(4)})
"""Of what is measured: more digits are noise."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured op. spread: range of the faster half of the rounds over their mean; flops, nbytes: its
    arithmetic, and the bytes that it reads and writes."""

    us: Amount
    spread: Amount
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What op times belong to. kind: as `Job.device` says it."""

    device: str
    torch: str
    threads: int
    kind: Annotated[str, Fits(lambda kind: kind in ("cpu", "cuda"), "cpu or cuda")] = "cpu"

    def __str__(self) -> str:
        return f"{self.device}, PyTorch {self.torch}, {self.threads} thread{'s' if self.threads != 1 else ''}"


@dataclass(frozen=True, slots=True)
class Calls:
    """start_us, start_us_per_mb: of the call that starts a collective; finish_us, finish_us_per_mb: of the
    wait for one that is done. Microseconds, and microseconds for each 10**6 bytes of the full tensor."""

    start_us: Amount
    start_us_per_mb: Amount = 0.0
    finish_us_per_mb: Amount = 0.0
    finish_us: Amount = 0.0

    def starting_us(self, nbytes: float) -> float:
        """What the call that starts takes, in microseconds, for a full tensor of `nbytes`."""
        return self.start_us + self.start_us_per_mb * nbytes / BYTES_PER_MB

    def finishing_us(self, nbytes: float) -> float:
        """What is left to do when it is done, in microseconds, for a full tensor of `nbytes`."""
        return self.finish_us + self.finish_us_per_mb * nbytes / BYTES_PER_MB


def line_through(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(microseconds whatever the size, microseconds a megabyte) from (bytes, microseconds): a line through
    the least and the most bytes, never falling."""
    (least, low_us), (most, high_us) = min(samples), max(samples)
    per_byte = max(0.0, high_us - low_us) / (most - least) if most > least else 0.0
    return max(0.0, low_us - per_byte * least), per_byte * BYTES_PER_MB


def calls_us(job: Job, calls: Mapping[tuple[str, str], Calls]) -> dict[tuple[int, str], float]:
    """(stage, op name) -> microseconds on the compute lane, for every op that starts a collective or waits
    for one. calls: by (axis, kind); collectives that it does not name are left out."""
    result: dict[tuple[int, str], float] = {}
    for stage in job.stages:
        asked = {op.name: op.collective for op in stage.all_ops if op.collective is not None}
        for op in stage.all_ops:
            collective = asked.get(op.uses[0]) if op.target == WAIT and op.uses else op.collective
            known = calls.get((collective.axis, collective.kind)) if collective is not None else None
            if collective is None or known is None:
                continue
            waits, nbytes = op.target == WAIT, collective.nbytes
            result[stage.index, op.name] = known.finishing_us(nbytes) if waits else known.starting_us(nbytes)
    return result


Kind = Annotated[str, Fits(lambda kind: kind in PRICED, f"one of {', '.join(PRICED)}")]


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """Collectives of one kind in groups of `members` ranks, `stride` apart, over `hosts` hosts. calls: what
    they take on the compute lane; spread: the noise of the worst size."""

    kind: Kind
    members: Annotated[int, Fits(lambda n: n >= 2, "an integer from 2")]
    stride: Natural
    hosts: Natural
    cost: CollectiveCost
    calls: Calls
    spread: Amount


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Messages between ranks `stride` apart, from the lower to the higher. back: the other way; None where
    the two are not known apart. spread: the noise of the worse direction."""

    stride: Natural
    hosts: Natural
    link: Link
    back: Link | None = None
    spread: Amount = 0.0

    def way(self, sender: int, receiver: int) -> Link:
        """The direction in which a message goes."""
        return self.link if sender < receiver or self.back is None else self.back


@dataclass
class Calibration:
    """What was measured. `name` is the file's, for sources and messages. ops: by signature (`ir.prices`),
    traced: microseconds, by `profiler_trace.trace_key`."""

    machine: Machine
    name: str = field(default="calibration", metadata=UNWRITTEN)
    ops: dict[str, Timing] = field(default_factory=dict)
    traced: dict[str, Amount] = field(default_factory=dict)
    collectives: list[GroupTiming] = field(default_factory=list)
    links: list[LinkTiming] = field(default_factory=list)

    @property
    def memory_bytes(self) -> None:
        """Of a device: a calibration says nothing of it."""
        return None


FILE = TypedFile(
    Calibration, "stretto-calibration", 12, "calibration", "Make one with `stretto calibrate`", CODEC
)

save_calibration = FILE.save


def load_calibration(path: Path) -> Calibration:
    """Read the file. Raises UsageError that names the file, the key and what was expected."""
    result = FILE.load(path)
    result.name = path.name
    return result
