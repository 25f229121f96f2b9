"""The calibration file: what `stretto calibrate` measured of a machine or a cluster, readable and strict.

    {
      "format": "stretto-calibration", "version": 10,
      "machine": {"kind": "cpu" or "cuda", "device": "...", "torch": "...", "threads": 1},
      "ops": {"aten.mm.default(float32[64,128], float32[128,512])": {"us", "spread", "flops", "bytes"}, ...},
      "traced": {"aten::mm float32 [64,128] [128,512]": us, ...},
      "collectives": [{"kind", "members", "stride", "hosts", "curve", ...}, ...],
      "links": [{"stride", "hosts", "latency_us", "bytes_per_us", "back", "spread", ...}, ...]
    }

`stride` is the distance between the ranks of a group (1 for neighbours, as those of the innermost axis);
`hosts` how many hosts it spans. `back` is a link's other direction, from the higher rank to the lower. Reads
and writes the one file; `stretto.price.priced` prices jobs from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.ir.collectives import PRICED
from stretto.ir.cost_text import decode_part
from stretto.ir.costs import CollectiveCost, Link
from stretto.ir.curve import Curve
from stretto.ir.reading import Cursor, read_json
from stretto.price.calls import Calls
from stretto.price.op_cache import (
    Machine,
    Timing,
    decode_machine,
    decode_ops,
    encode_machine,
    encode_ops,
    write_whole,
)

FORMAT = "stretto-calibration"
VERSION = 10

COST_KEYS = (
    "curve",
    "processor_us_per_mb",
    "processor_us",
    "slowdown",
    "start_us",
    "start_us_per_mb",
    "finish_us_per_mb",
    "finish_us",
    "spread",
)


WAY_KEYS = ("latency_us", "bytes_per_us", "processor_us_per_mb")


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """Collectives of one kind in groups of `members` ranks, `stride` apart, over `hosts` hosts. calls: what
    they take on the compute lane; spread: the noise of the worst size."""

    kind: str
    members: int
    stride: int
    hosts: int
    cost: CollectiveCost
    calls: Calls
    spread: float


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Messages between ranks `stride` apart, from the lower to the higher. back: from the higher to the
    lower; None where the two were not told apart. spread: the noise of the worse direction
    (`messages.FoundLink`)."""

    stride: int
    hosts: int
    link: Link
    back: Link | None = None
    spread: float = 0.0

    def way(self, sender: int, receiver: int) -> Link:
        """The direction in which a message goes."""
        return self.link if sender < receiver or self.back is None else self.back


@dataclass
class Calibration:
    """What was measured. `name` is the file's, for sources and messages."""

    machine: Machine
    name: str = "calibration"
    ops: dict[str, Timing] = field(default_factory=dict)
    traced: dict[str, float] = field(default_factory=dict)
    collectives: list[GroupTiming] = field(default_factory=list)
    links: list[LinkTiming] = field(default_factory=list)


def save_calibration(found: Calibration, path: Path) -> None:
    """Write the file whole or not at all. Raises UsageError when its folder is missing, else StrettoError."""
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: the folder {path.parent} does not exist; create it")
    lines = [
        f' "format": "{FORMAT}"',
        f' "version": {VERSION}',
        f' "machine": {json.dumps(encode_machine(found.machine))}',
        _lines("ops", encode_ops(found.ops)),
        _lines("traced", {key: round(found.traced[key], 3) for key in sorted(found.traced)}),
        _lines("collectives", [_group_data(one) for one in found.collectives]),
        _lines("links", [_link_data(one) for one in found.links]),
    ]
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def load_calibration(path: Path) -> Calibration:
    """Read the file. Raises UsageError that names the file, the key and what was expected."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    root = read_json(text, str(path))
    head = root.members()
    if "format" not in head or head["format"].value != FORMAT:
        raise root.error(
            f'not a calibration: expected "format": "{FORMAT}". Make one with `stretto calibrate`'
        )
    version = head.get("version")
    if version is None or version.value != VERSION:
        raise root.error(f"this Stretto reads version {VERSION}; make it again with `stretto calibrate`")
    fields = root.fields(("format", "version", "machine", "ops", "traced", "collectives", "links"))
    return Calibration(
        decode_machine(fields["machine"]),
        path.name,
        decode_ops(fields["ops"]),
        {key: us.amount() for key, us in fields["traced"].members().items()},
        [_group_of(entry, path.name) for entry in fields["collectives"].elements()],
        [_link_of(entry, path.name) for entry in fields["links"].elements()],
    )


def _lines(key: str, data: dict[str, Any] | list[Any]) -> str:
    """A member with each of its elements on a line of its own."""
    if isinstance(data, dict):
        inner = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items()]
    else:
        inner = [f"  {json.dumps(value)}" for value in data]
    opening, closing = ("{", "}") if isinstance(data, dict) else ("[", "]")
    return f' "{key}": {opening}' + ("\n" + ",\n".join(inner) + "\n " if inner else "") + closing


def _group_data(one: GroupTiming) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "members": one.members,
        "stride": one.stride,
        "hosts": one.hosts,
        "curve": [[round(nbytes), round(us, 2)] for nbytes, us in one.cost.curve.points],
        "processor_us_per_mb": round(one.cost.processor_us_per_mb, 2),
        "processor_us": round(one.cost.processor_us, 2),
        "slowdown": round(one.cost.slowdown, 4),
        "start_us": round(one.calls.start_us, 2),
        "start_us_per_mb": round(one.calls.start_us_per_mb, 2),
        "finish_us_per_mb": round(one.calls.finish_us_per_mb, 2),
        "finish_us": round(one.calls.finish_us, 2),
        "spread": round(one.spread, 3),
    }


def _group_of(entry: Cursor, name: str) -> GroupTiming:
    parts = entry.fields(("kind", "members", "stride", "hosts", *COST_KEYS))
    kind = parts["kind"].text()
    if kind not in PRICED:
        raise parts["kind"].error(f"expected {', '.join(PRICED[:-1])} or {PRICED[-1]}")
    members = _count(parts["members"], 2)
    try:
        curve = Curve.of(point.sequence(Cursor.number) for point in parts["curve"].elements())
    except ValueError as error:
        raise parts["curve"].error(str(error)) from None
    cost = CollectiveCost(
        curve,
        parts["processor_us_per_mb"].amount(),
        decode_part(parts["slowdown"]),
        f"measured: {name}",
        parts["processor_us"].amount(),
    )
    return GroupTiming(
        kind,
        members,
        _count(parts["stride"], 1),
        _count(parts["hosts"], 1),
        cost,
        Calls(
            parts["start_us"].amount(),
            parts["start_us_per_mb"].amount(),
            parts["finish_us_per_mb"].amount(),
            parts["finish_us"].amount(),
        ),
        parts["spread"].amount(),
    )


def _link_data(one: LinkTiming) -> dict[str, Any]:
    return {
        "stride": one.stride,
        "hosts": one.hosts,
        **_way_data(one.link),
        "back": None if one.back is None else _way_data(one.back),
        "spread": round(one.spread, 3),
    }


def _way_data(link: Link) -> dict[str, Any]:
    return {
        "latency_us": round(link.latency_us, 2),
        "bytes_per_us": round(link.bytes_per_us, 3),
        "processor_us_per_mb": round(link.processor_us_per_mb, 2),
    }


def _link_of(entry: Cursor, name: str) -> LinkTiming:
    parts = entry.fields(("stride", "hosts", *WAY_KEYS, "back", "spread"))
    back = parts["back"]
    return LinkTiming(
        _count(parts["stride"], 1),
        _count(parts["hosts"], 1),
        _way_of(parts, name),
        None if back.value is None else _way_of(back.fields(WAY_KEYS), name),
        parts["spread"].amount(),
    )


def _way_of(parts: Mapping[str, Cursor], name: str) -> Link:
    rate = parts["bytes_per_us"].amount()
    if not rate:
        raise parts["bytes_per_us"].error("expected a rate above 0")
    return Link(
        parts["latency_us"].amount(),
        rate,
        parts["processor_us_per_mb"].amount(),
        f"measured: {name}",
    )


def _count(cursor: Cursor, least: int) -> int:
    value = cursor.integer()
    if value < least:
        raise cursor.error(f"expected {least} or more, found {value}")
    return value
