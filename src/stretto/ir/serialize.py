"""The plan file: a plan as readable, versioned JSON, and back. `docs/plan-format.md` describes the format.

Equal plans give equal bytes; what is written is read back equal. Reading never trusts the file: every
trouble is a UsageError with file and JSON path, references included. Whether a plan that can be read is also
right is for `stretto.verify`. Touches `stretto.ir` only.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError, UsageError
from stretto.files.whole_file import write_file
from stretto.ir.action import Phase, Schedule, parse_slot
from stretto.ir.cost_text import decode_costs, decode_prediction, encode_costs, encode_prediction
from stretto.ir.job_text import Line, decode_job, decode_overlap, encode_job
from stretto.ir.op_text import one_line
from stretto.ir.plan import VERSION, Communicator, Instruction, Item, Plan, Window, written_by
from stretto.ir.reading import Cursor, read_json
from stretto.ir.references import broken_references

FORMAT = "stretto-plan"


def plan_to_text(plan: Plan) -> str:
    """The plan as text. Raises StrettoError for names that the text forms cannot hold."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "job": encode_job(plan.job),
        "overlap": plan.overlap,
        "overlap_why": plan.overlap_why,
        "schedule": _encode_schedule(plan.schedule),
        "windows": {name: _encode_window(plan.windows[name]) for name in sorted(plan.windows)},
        "orders": [[_written(i, Instruction.parse) for i in order] for order in plan.orders],
        "communicators": [
            Line({"name": c.name, "ranks": list(c.ranks), "axes": list(c.axes)}) for c in plan.communicators
        ],
        "costs": encode_costs(plan.costs),
        "prediction": None if plan.prediction is None else encode_prediction(plan.prediction),
    }
    return _layout(document, "") + "\n"


def plan_from_text(text: str, where: str = "plan") -> Plan:
    """Read a plan; `where` names the text in messages.

    Raises UsageError (file, JSON path, trouble) for text that is not JSON, not this format or version, that
    misses or adds keys, and for references to stages, ops, edges, windows or ranks that do not exist.
    """
    root = read_json(text, where)
    head = root.members()
    if "format" not in head or head["format"].value != FORMAT:
        raise root.error(f'not a plan file: expected "format": "{FORMAT}". Make one with `stretto plan`')
    version = head["version"].value if "version" in head else None
    if version != VERSION or isinstance(version, (bool, float)):
        raise root.error(
            f"plan format version {version!r} cannot be read: this Stretto reads version {VERSION}. "
            "Make the plan again with `stretto plan`"
        )
    fields = root.fields(
        (
            "format",
            "version",
            "job",
            "overlap",
            "overlap_why",
            "schedule",
            "windows",
            "orders",
            "communicators",
            "costs",
            "prediction",
        )
    )
    prediction = fields["prediction"]
    plan = Plan(
        job=decode_job(fields["job"]),
        schedule=_decode_schedule(fields["schedule"]),
        windows={name: _decode_window(name, part) for name, part in fields["windows"].members().items()},
        orders=fields["orders"].sequence(lambda order: order.sequence(_decode_instruction)),
        communicators=fields["communicators"].sequence(_decode_communicator),
        costs=decode_costs(fields["costs"]),
        prediction=None if prediction.value is None else decode_prediction(prediction),
        overlap=decode_overlap(fields["overlap"]),
        overlap_why=fields["overlap_why"].text(),
    )
    for broken in broken_references(plan):
        raise UsageError(f"{where}: {broken}")
    return plan


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan file whole or not at all.

    Raises StrettoError if it cannot be written, for example because the disk is full; UsageError if its
    folder does not exist.
    """
    text = plan_to_text(plan)
    shown = os.fspath(path)
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise UsageError(f"cannot write plan {shown}: the folder {folder} does not exist; create it")
    try:
        write_file(path, text)
    except OSError as error:
        raise StrettoError(
            f"cannot write plan {shown}: {error.strerror}. Free space or choose another place with -o"
        ) from None


written_by(save_plan)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file. Raises UsageError as `plan_from_text`, and for a file that cannot be read."""
    shown = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read plan {shown}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or a path with a null byte
        raise UsageError(f"cannot read plan {shown}: not a text file ({error})") from None
    return plan_from_text(text, shown)


def _written(thing: Item | Instruction, parse: Any) -> str:
    """The thing's text form, if it reads back as the same thing."""
    text = str(thing)
    with contextlib.suppress(ValueError):
        if parse(text) == thing:
            return text
    raise StrettoError(f"{thing!r} has no text form that reads back; rename it without spaces and '#'")


def _encode_schedule(schedule: Schedule) -> dict[str, Any]:
    return {
        "family": schedule.family,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "stage_ranks": Line(list(schedule.stage_ranks)),
        "orders": [Line([str(slot) for slot in order]) for order in schedule.orders],
    }


def _decode_schedule(cursor: Cursor) -> Schedule:
    fields = cursor.fields(("family", "stages", "microbatches", "stage_ranks", "orders"))
    return Schedule(
        family=fields["family"].text(),
        stages=fields["stages"].integer(),
        microbatches=fields["microbatches"].integer(),
        stage_ranks=fields["stage_ranks"].sequence(Cursor.integer),
        orders=fields["orders"].sequence(lambda order: order.sequence(lambda c: c.parsed(parse_slot))),
    )


def _encode_window(window: Window) -> dict[str, Any]:
    return {
        "parts": Line([f"{stage}{phase.value}" for stage, phase in window.parts]),
        **({"shares": Line(list(window.shares))} if window.shares else {}),
        "items": [_written(item, Item.parse) for item in window.items],
    }


def _decode_window(name: str, cursor: Cursor) -> Window:
    fields = cursor.fields(("parts", "items"), ("shares",))
    return Window(
        name,
        fields["parts"].sequence(_decode_part),
        fields["items"].sequence(lambda item: item.parsed(Item.parse)),
        fields["shares"].sequence(Cursor.integer) if "shares" in fields else (),
    )


def _decode_part(cursor: Cursor) -> tuple[int, Phase]:
    def parse(text: str) -> tuple[int, Phase]:
        phase = Phase.REDUCE_GRAD if text.endswith(Phase.REDUCE_GRAD) else text[-1:]
        stage = text.removesuffix(phase)
        if not (stage.isascii() and stage.isdigit()) or phase not in list(Phase):
            raise ValueError("expected <stage><F|I|W|B|REDUCE_GRAD>, for example 1B")
        return int(stage), Phase(phase)

    return cursor.parsed(parse)


def _decode_instruction(cursor: Cursor) -> Instruction:
    return cursor.parsed(Instruction.parse)


def _decode_communicator(cursor: Cursor) -> Communicator:
    fields = cursor.fields(("name", "ranks", "axes"))
    return Communicator(
        fields["name"].text(), fields["ranks"].sequence(Cursor.integer), fields["axes"].sequence(Cursor.text)
    )


def _layout(value: Any, indent: str) -> str:
    """JSON with one entry a line; a `Line` and everything in it stays on one line."""
    if isinstance(value, Line):
        return one_line(value.value)
    if not isinstance(value, (dict, list)) or not value:
        return one_line(value)
    deeper = indent + "  "
    if isinstance(value, dict):
        entries = [f"{one_line(key)}: {_layout(part, deeper)}" for key, part in value.items()]
    else:
        entries = [_layout(part, deeper) for part in value]
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    body = ",\n".join(deeper + entry for entry in entries)
    return f"{opening}\n{body}\n{indent}{closing}"
