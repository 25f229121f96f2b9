"""A job as JSON data, and back: stages, edges, parameters, buffers, constants. Part of the plan file.

Touches `stretto.ir` only; `stretto.ir.serialize` writes and reads the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stretto.ir.action import Phase
from stretto.ir.axes import AXES
from stretto.ir.flow import PHASES
from stretto.ir.op_text import decode_op, decode_spec, encode_float, encode_op
from stretto.ir.program import (
    OVERLAP_MODES,
    Buffer,
    Constant,
    Count,
    Edge,
    Job,
    OverlapMode,
    Parameter,
    Shard,
    Stage,
)
from stretto.ir.reading import Cursor

Made = tuple[int, Phase, str]
"""(stage, phase, value name): where a gradient or a buffer's update arises."""


@dataclass(frozen=True, slots=True)
class Line:
    """JSON data that is written on one line."""

    value: Any


def encode_job(job: Job) -> dict[str, Any]:
    return {
        "name": job.name,
        "microbatches": job.microbatches,
        "param_dtype": job.param_dtype,
        "schedule": job.schedule,
        "max_live": job.max_live,
        "pp": job.pp,
        "overlap": job.overlap,
        "recompute": job.recompute,
        "split_ops": job.split_ops,
        "message_parts": job.message_parts,
        "device": job.device,
        "axes": Line([list(axis) for axis in job.axes]),
        "fixed": [Line(list(leaf)) for leaf in job.fixed],
        "whole": Line(list(job.whole)),
        "loss": Line(list(job.loss)),
        "count": _encode_count(job.count),
        "mean_over": _encode_count(job.mean_over),
        "batch": [Line([name, str(spec)]) for name, spec in job.batch],
        "stages": [
            {
                "index": stage.index,
                "ops": {
                    phase.value: [Line(encode_op(op)) for op in stage.ops[phase]]
                    for phase in (*PHASES, Phase.REDUCE_GRAD)
                    if phase in stage.ops
                },
            }
            for stage in job.stages
        ],
        "edges": [Line(_encode_edge(edge)) for edge in job.edges],
        "parameters": [
            Line(
                {
                    "name": p.name,
                    "spec": str(p.spec),
                    "stages": list(p.stages),
                    "grads": [list(made) for made in p.grads],
                    "tied_to": p.tied_to,
                    "own_dtype": p.own_dtype,
                    "shards": [_encode_shard(s) for s in p.shards],
                    "partial": list(p.partial),
                    **({"frozen": True} if p.frozen else {}),
                }
            )
            for p in job.parameters
        ],
        "buffers": [
            Line(
                {
                    "name": b.name,
                    "spec": str(b.spec),
                    "stages": list(b.stages),
                    "updates": [list(made) for made in b.updates],
                }
            )
            for b in job.buffers
        ],
        "constants": [
            Line({"name": c.name, "spec": str(c.spec), "data": [_encode_element(e) for e in c.data]})
            for c in job.constants
        ],
    }


def decode_job(cursor: Cursor) -> Job:
    """Raises UsageError with the path of what cannot be read."""
    fields = cursor.fields(
        (
            "name",
            "microbatches",
            "param_dtype",
            "schedule",
            "max_live",
            "pp",
            "overlap",
            "recompute",
            "split_ops",
            "message_parts",
            "device",
            "axes",
            "fixed",
            "whole",
            "loss",
            "count",
            "mean_over",
            "batch",
            "stages",
            "edges",
            "parameters",
            "buffers",
            "constants",
        )
    )
    loss_stage, loss_value = _exactly(fields["loss"], 2, "[stage, value]")
    dtype = fields["param_dtype"]
    batch = []
    for leaf in fields["batch"].elements():
        name, spec = _exactly(leaf, 2, "[name, tensor]")
        batch.append((name.text(), decode_spec(spec)))
    fixed = []
    for leaf in fields["fixed"].elements():
        path, text = _exactly(leaf, 2, "[path, text]")
        fixed.append((path.text(), text.text()))
    return Job(
        name=fields["name"].text(),
        microbatches=fields["microbatches"].integer(),
        stages=fields["stages"].sequence(_decode_stage),
        edges=fields["edges"].sequence(_decode_edge),
        parameters=fields["parameters"].sequence(_decode_parameter),
        buffers=fields["buffers"].sequence(_decode_buffer),
        constants=fields["constants"].sequence(_decode_constant),
        batch=tuple(batch),
        loss=(loss_stage.integer(), loss_value.text()),
        param_dtype=None if dtype.value is None else dtype.text(),
        schedule=fields["schedule"].text(),
        max_live=None if fields["max_live"].value is None else fields["max_live"].integer(),
        pp=None if fields["pp"].value is None else fields["pp"].integer(),
        overlap=decode_overlap(fields["overlap"]),
        recompute=_decode_recompute(fields["recompute"]),
        split_ops=fields["split_ops"].flag(),
        message_parts=fields["message_parts"].flag(),
        device=fields["device"].text(),
        fixed=tuple(fixed),
        whole=fields["whole"].sequence(Cursor.text),
        count=_decode_count(fields["count"]),
        mean_over=_decode_count(fields["mean_over"]),
        axes=fields["axes"].sequence(_decode_axis),
    )


def decode_overlap(cursor: Cursor) -> OverlapMode:
    """An overlap mode."""
    text = cursor.text()
    for mode in OVERLAP_MODES:
        if text == mode:
            return mode
    raise cursor.error(f"expected an overlap mode ({', '.join(OVERLAP_MODES)}), found {text!r}")


def _decode_recompute(cursor: Cursor) -> str | int:
    return cursor.text() if isinstance(cursor.value, str) else cursor.integer()


def decode_phase(cursor: Cursor) -> Phase:
    """A program's phase: F, I or W."""
    text = cursor.text()
    if text not in ("F", "I", "W"):
        raise cursor.error(f"expected a phase (F, I or W), found {text!r}")
    return Phase(text)


def _exactly(cursor: Cursor, count: int, form: str) -> list[Cursor]:
    parts = cursor.elements()
    if len(parts) != count:
        raise cursor.error(f"expected {form}, found a list of {len(parts)}")
    return parts


def _decode_stage(cursor: Cursor) -> Stage:
    fields = cursor.fields(("index", "ops"))
    programs = fields["ops"].fields(("F", "I", "W"), ("REDUCE_GRAD",))
    ops = {Phase(name): program.sequence(decode_op) for name, program in programs.items()}
    return Stage(fields["index"].integer(), ops)


def _encode_count(count: Count | None) -> dict[str, Any] | None:
    if count is None:
        return None
    return {"value": count.value, "ops": [Line(encode_op(op)) for op in count.ops]}


def _decode_count(cursor: Cursor) -> Count | None:
    if cursor.value is None:
        return None
    fields = cursor.fields(("value", "ops"))
    value, ops = fields["value"], fields["ops"].sequence(decode_op)
    if isinstance(value.value, str) and ops:
        return Count(value.text(), ops)
    number = value.number()
    if ops or not 0 < number < math.inf:
        raise value.error("expected the name of one of `ops`, or without any a number above 0")
    return Count(number)


def _encode_edge(edge: Edge) -> dict[str, Any]:
    return {
        "index": edge.index,
        "value": edge.value,
        "source": edge.source,
        "phase": edge.phase.value,
        "target": edge.target,
        "user_phase": edge.user_phase.value,
        "spec": str(edge.spec),
    }


def _decode_edge(cursor: Cursor) -> Edge:
    fields = cursor.fields(("index", "value", "source", "phase", "target", "user_phase", "spec"))
    return Edge(
        index=fields["index"].integer(),
        value=fields["value"].text(),
        source=fields["source"].integer(),
        phase=decode_phase(fields["phase"]),
        target=fields["target"].integer(),
        user_phase=decode_phase(fields["user_phase"]),
        spec=decode_spec(fields["spec"]),
    )


def _decode_made(cursor: Cursor) -> Made:
    stage, phase, value = _exactly(cursor, 3, "[stage, phase, value]")
    return stage.integer(), decode_phase(phase), value.text()


def _decode_axis(cursor: Cursor) -> tuple[str, int]:
    axis, size = _exactly(cursor, 2, "[axis, size]")
    if axis.text() not in AXES[1:]:
        raise axis.error(f"there is no axis {axis.text()!r}; known: {', '.join(AXES[1:])}")
    if size.integer() < 1:
        raise size.error(f"axis {axis.text()} has at least one rank, found {size.integer()}")
    return axis.text(), size.integer()


def _encode_shard(shard: Shard) -> list[str | int]:
    fields: list[str | int] = [shard.axis, shard.dim, shard.blocks]
    return fields if shard.copies == 1 else [*fields, shard.copies]


def _decode_shard(cursor: Cursor) -> Shard:
    if isinstance(cursor.value, list) and len(cursor.value) == 4:
        axis, dim, blocks, copies = _exactly(cursor, 4, "[axis, dim, blocks, copies]")
        return Shard(axis.text(), dim.integer(), blocks.integer(), copies.integer())
    axis, dim, blocks = _exactly(cursor, 3, "[axis, dim, blocks] or [axis, dim, blocks, copies]")
    return Shard(axis.text(), dim.integer(), blocks.integer())


def _decode_parameter(cursor: Cursor) -> Parameter:
    required = ("name", "spec", "stages", "grads", "tied_to", "own_dtype", "shards", "partial")
    fields = cursor.fields(required, ("frozen",))
    return Parameter(
        name=fields["name"].text(),
        spec=decode_spec(fields["spec"]),
        stages=fields["stages"].sequence(Cursor.integer),
        grads=fields["grads"].sequence(_decode_made),
        tied_to=fields["tied_to"].text(),
        own_dtype=None if fields["own_dtype"].value is None else fields["own_dtype"].text(),
        shards=fields["shards"].sequence(_decode_shard),
        partial=fields["partial"].sequence(Cursor.text),
        frozen="frozen" in fields and fields["frozen"].flag(),
    )


def _decode_buffer(cursor: Cursor) -> Buffer:
    fields = cursor.fields(("name", "spec", "stages", "updates"))
    return Buffer(
        name=fields["name"].text(),
        spec=decode_spec(fields["spec"]),
        stages=fields["stages"].sequence(Cursor.integer),
        updates=fields["updates"].sequence(_decode_made),
    )


def _encode_element(value: float | int | bool) -> Any:
    return encode_float(value) if isinstance(value, float) else value


def _decode_element(cursor: Cursor) -> float | int | bool:
    value = cursor.value
    if isinstance(value, (bool, int)):
        return value
    return cursor.number()


def _decode_constant(cursor: Cursor) -> Constant:
    fields = cursor.fields(("name", "spec", "data"))
    spec = decode_spec(fields["spec"])
    data = fields["data"].sequence(_decode_element)
    if len(data) != spec.numel:
        raise fields["data"].error(f"{spec} has {spec.numel} elements, found {len(data)}")
    return Constant(fields["name"].text(), spec, data)
