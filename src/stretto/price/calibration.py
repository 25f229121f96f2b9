"""The calibration file: what `stretto calibrate` measured of a machine or a cluster, readable and strict.

    machine      "kind", "device", "torch", "threads"
    ops          by signature (`ir.prices`), "aten.mm.default(float32[64,128], float32[128,512])"
    traced       microseconds, by "aten::mm float32 [64,128] [128,512]"
    collectives  `GroupTiming`
    links        `LinkTiming`

`stride` is the distance between the ranks of a group (1 for neighbours, as those of the innermost axis);
`hosts` how many hosts it spans. `back` is a link's other direction, from the higher rank to the lower. Reads
and writes the one file; `stretto.price.priced` prices jobs from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from stretto.files.codec import UNWRITTEN, Amount, Fits, Natural
from stretto.files.typed_file import TypedFile
from stretto.ir.collectives import PRICED
from stretto.ir.costs import CollectiveCost, Link
from stretto.price.calls import Calls
from stretto.price.op_times import CODEC, Machine, Timing

Kind = Annotated[str, Fits(lambda kind: kind in PRICED, f"one of {', '.join(PRICED)}")]


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """Collectives of one kind in groups of `members` ranks, `stride` apart, over `hosts` hosts. calls: what
    they take on the compute lane; spread: the noise of the worst size."""

    kind: Kind
    members: Annotated[int, Fits(lambda n: n >= 2, "a whole number from 2")]
    stride: Natural
    hosts: Natural
    cost: CollectiveCost
    calls: Calls
    spread: Amount


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Messages between ranks `stride` apart, from the lower to the higher. back: from the higher to the
    lower; None where the two were not told apart. spread: the noise of the worse direction
    (`messages.FoundLink`)."""

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
    """What was measured. `name` is the file's, for sources and messages."""

    machine: Machine
    name: str = field(default="calibration", metadata=UNWRITTEN)
    ops: dict[str, Timing] = field(default_factory=dict)
    traced: dict[str, Amount] = field(default_factory=dict)
    collectives: list[GroupTiming] = field(default_factory=list)
    links: list[LinkTiming] = field(default_factory=list)


FILE = TypedFile(
    Calibration, "stretto-calibration", 12, "calibration", "Make one with `stretto calibrate`", CODEC
)

save_calibration = FILE.save


def load_calibration(path: Path) -> Calibration:
    """Read the file. Raises UsageError that names the file, the key and what was expected."""
    result = FILE.load(path)
    result.name = path.name
    return result
