"""Costs and predictions as JSON data, and back. Part of the plan file; `stretto.ir.serialize` writes it.

Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from stretto.ir.costs import CollectiveCost, Costs, Link, Prediction
from stretto.ir.curve import Curve
from stretto.ir.job_text import Line
from stretto.ir.op_text import encode_float
from stretto.ir.processor import decode_processor, encode_processor
from stretto.ir.reading import Cursor

T = TypeVar("T")

COLLECTIVE_KEYS = (
    "communicator",
    "kind",
    "curve",
    "processor_us_per_mb",
    "processor_us",
    "slowdown",
    "source",
)
COST_KEYS = (
    "source",
    "action_us",
    "default_link",
    "links",
    "collectives",
    "shared",
    "skew",
    "processor",
    "op_how",
    "op_us",
)
LINK_KEYS = ("latency_us", "bytes_per_us", "processor_us_per_mb", "source")

LEAST_RATE = 1e-6
"""Bytes a microsecond. A link that is slower is none, and what it takes is no finite time."""


def encode_costs(costs: Costs) -> dict[str, Any]:
    return {
        "source": costs.source,
        "action_us": encode_float(costs.action_us),
        "default_link": Line(_encode_link(costs.default_link)),
        "links": [
            Line({"from": sender, "to": receiver, **_encode_link(costs.links[sender, receiver])})
            for sender, receiver in sorted(costs.links)
        ],
        "collectives": [
            Line({"communicator": name, "kind": kind, **_encode_collective(costs.collectives[name, kind])})
            for name, kind in sorted(costs.collectives)
        ],
        "shared": Line(list(costs.shared)),
        "skew": encode_float(costs.skew),
        "processor": None if costs.processor is None else Line(encode_processor(costs.processor)),
        "op_how": _encode_ops(costs.op_how),
        "op_us": _encode_ops({key: encode_float(us) for key, us in costs.op_us.items()}),
    }


def _encode_ops(by_op: Mapping[tuple[int, str], Any]) -> dict[str, dict[str, Any]]:
    """By stage, and then by op."""
    found: dict[str, dict[str, Any]] = {}
    for stage, name in sorted(by_op):
        found.setdefault(str(stage), {})[name] = by_op[stage, name]
    return found


def _decode_ops(cursor: Cursor, read: Callable[[Cursor], T]) -> dict[tuple[int, str], T]:
    found: dict[tuple[int, str], T] = {}
    for stage, ops in cursor.members().items():
        if not (stage.isascii() and stage.isdigit() and len(stage) < 10):
            raise ops.error("the key is not a stage's number")
        for name, value in ops.members().items():
            found[int(stage), name] = read(value)
    return found


def decode_costs(cursor: Cursor) -> Costs:
    fields = cursor.fields(COST_KEYS)
    links: dict[tuple[int, int], Link] = {}
    for entry in fields["links"].elements():
        parts = entry.fields(("from", "to", *LINK_KEYS))
        pair = (parts["from"].integer(), parts["to"].integer())
        if pair in links:
            raise entry.error(
                f"the link from rank {pair[0]} to rank {pair[1]} is there twice; keep one of them"
            )
        links[pair] = _decode_link(parts)
    return Costs(
        op_us=_decode_ops(fields["op_us"], Cursor.amount),
        links=links,
        default_link=_decode_link(fields["default_link"].fields(LINK_KEYS)),
        action_us=fields["action_us"].amount(),
        source=fields["source"].text(),
        collectives=_decode_collectives(fields["collectives"]),
        shared=fields["shared"].sequence(Cursor.text),
        skew=fields["skew"].amount(),
        processor=decode_processor(fields["processor"]),
        op_how=_decode_ops(fields["op_how"], Cursor.text),
    )


def _encode_collective(cost: CollectiveCost) -> dict[str, Any]:
    return {
        "curve": [[encode_float(nbytes), encode_float(us)] for nbytes, us in cost.curve.points],
        "processor_us_per_mb": encode_float(cost.processor_us_per_mb),
        "processor_us": encode_float(cost.processor_us),
        "slowdown": encode_float(cost.slowdown),
        "source": cost.source,
    }


def _decode_collectives(cursor: Cursor) -> dict[tuple[str, str], CollectiveCost]:
    found: dict[tuple[str, str], CollectiveCost] = {}
    for entry in cursor.elements():
        parts = entry.fields(COLLECTIVE_KEYS)
        key = (parts["communicator"].text(), parts["kind"].text())
        if key in found:
            raise entry.error(f"the cost of {key[1]} on {key[0]} is there twice; keep one of them")
        found[key] = CollectiveCost(
            curve=_decode_curve(parts["curve"]),
            processor_us_per_mb=parts["processor_us_per_mb"].amount(),
            slowdown=decode_part(parts["slowdown"]),
            source=parts["source"].text(),
            processor_us=parts["processor_us"].amount(),
        )
    return found


def _decode_curve(cursor: Cursor) -> Curve:
    points = []
    for entry in cursor.elements():
        pair = entry.sequence(Cursor.amount)
        if len(pair) != 2:
            raise entry.error(f"a point of a curve is [bytes, us]; this has {len(pair)} numbers")
        points.append((float(pair[0]), float(pair[1])))
    try:
        return Curve(tuple(points))
    except ValueError as error:
        raise cursor.error(str(error)) from None


def _encode_link(link: Link) -> dict[str, Any]:
    return {
        "latency_us": encode_float(link.latency_us),
        "bytes_per_us": encode_float(link.bytes_per_us),
        "processor_us_per_mb": encode_float(link.processor_us_per_mb),
        "source": link.source,
    }


def _decode_link(fields: Mapping[str, Cursor]) -> Link:
    return Link(
        latency_us=fields["latency_us"].amount(),
        bytes_per_us=_decode_rate(fields["bytes_per_us"]),
        processor_us_per_mb=fields["processor_us_per_mb"].amount(),
        source=fields["source"].text(),
    )


def _decode_rate(cursor: Cursor) -> float:
    """In bytes a microsecond, from a byte in a second; a link that takes no time has an infinite one."""
    value = cursor.number()
    if not value > 0.0:
        raise cursor.error(f"expected a rate above 0, found {value}")
    if value < LEAST_RATE:
        raise cursor.error(f"expected a rate of at least {LEAST_RATE} bytes a microsecond, found {value}")
    return value


def decode_part(cursor: Cursor) -> float:
    """A share from 0 to 1. Raises UsageError for any other number."""
    value = float(cursor.number())
    if not 0.0 <= value <= 1.0:
        raise cursor.error(f"expected a share from 0 to 1, not {value}")
    return value


def encode_prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "step_us": encode_float(prediction.step_us),
        "compute_us": Line([encode_float(value) for value in prediction.compute_us]),
        "exposed_us": Line([encode_float(value) for value in prediction.exposed_us]),
        "bubble_us": Line([encode_float(value) for value in prediction.bubble_us]),
        "peak_bytes": Line(list(prediction.peak_bytes)),
        "bound_us": encode_float(prediction.bound_us),
        "binds": prediction.binds,
        "exposed_axis_us": _encode_axes(prediction.exposed_axis_us),
        "comm_axis_us": _encode_axes(prediction.comm_axis_us),
    }


def _encode_axes(by_axis: Mapping[str, tuple[float, ...]]) -> dict[str, Any]:
    return {axis: Line([encode_float(us) for us in by_axis[axis]]) for axis in sorted(by_axis)}


def decode_prediction(cursor: Cursor) -> Prediction:
    by_rank = ("compute_us", "exposed_us", "bubble_us")
    by_axis = ("exposed_axis_us", "comm_axis_us")
    fields = cursor.fields(("step_us", *by_rank, "peak_bytes", "bound_us", "binds", *by_axis))
    exposed_axis, comm_axis = (
        {axis: part.sequence(Cursor.number) for axis, part in fields[key].members().items()}
        for key in by_axis
    )
    compute, exposed, bubble = (fields[key].sequence(Cursor.number) for key in by_rank)
    return Prediction(
        step_us=fields["step_us"].number(),
        compute_us=compute,
        exposed_us=exposed,
        bubble_us=bubble,
        peak_bytes=fields["peak_bytes"].sequence(Cursor.integer),
        bound_us=fields["bound_us"].number(),
        binds=fields["binds"].text(),
        exposed_axis_us=exposed_axis,
        comm_axis_us=comm_axis,
    )
