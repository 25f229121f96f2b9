"""The plan file: a plan as readable, versioned JSON, and back. `docs/plan-format.md` describes the format.

Equal plans give equal bytes; what is written is read back equal. Reading never trusts the file: every
trouble is a UsageError with file and JSON path, references included. Whether a plan that can be read is also
right is for `stretto.verify`. What a plan computes is not all provable, so the file has a digest of each
program and of the rest of the job: one that was edited since is read only by who says that it was. The
digests find edits and damage; they are no signature. Touches `stretto.ir` only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stretto.errors import UsageError
from stretto.files.codec import Codec, TextLayout, text
from stretto.files.typed_file import TypedFile, read_text, to_line
from stretto.ir.action import Slot, parse_slot
from stretto.ir.op_text import FORMS
from stretto.ir.plan import VERSION, Instruction, Item, Plan, written_by
from stretto.ir.program import Job, Op, Shard
from stretto.ir.references import broken_references

CODEC = Codec(
    {
        **FORMS,
        Slot: text(parse_slot),
        Item: text(Item.parse, TextLayout.ENTRY),
        Instruction: text(Instruction.parse, TextLayout.ENTRY),
    }
)
CODEC.row(Op, 5, TextLayout.ENTRY)
CODEC.row(Shard, 3, TextLayout.WORD)


def _computed(plan: Any) -> Mapping[str, Any]:
    """Place in a plan file -> what is there, of all that says what a step computes."""
    programs = {
        f"job.stages[{at}].ops.{phase}": ops
        for at, stage in enumerate(plan["job"]["stages"])
        for phase, ops in stage["ops"].items()
    }
    return {
        "job (all but stages)": {key: part for key, part in plan["job"].items() if key != "stages"},
        **programs,
    }


FILE = TypedFile(Plan, "stretto-plan", VERSION, "plan", "Make one with `stretto plan`", CODEC, _computed)


def plan_to_text(plan: Plan) -> str:
    """The text of the plan's file. Raises StrettoError for what files cannot hold."""
    return FILE.to_text(plan, plan.edited)


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the file whole or not at all. Raises StrettoError and UsageError as `TypedFile.save`."""
    FILE.save_text(plan_to_text(plan), path)


written_by(save_plan)


def plan_from_text(text: str, where: str = "plan", edited: bool = False) -> Plan:
    """Read a plan; `where` names the text in messages. edited: its job may have been edited.

    Raises UsageError (file, JSON path, trouble) for text that is not JSON, not this format or version, that
    misses or adds keys, for references to stages, ops, edges, windows or ranks that do not exist, and unless
    `edited` for a job that is not the one that was written.
    """
    plan, changed = FILE.read(text, where)
    for broken in broken_references(plan):
        raise UsageError(f"{where}: {broken}")
    if changed and not edited:
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UsageError(
            f"{where}: {changed[0]} is not what planning has written{more}: the file was edited, and what it "
            "computes cannot be proved. Plan again, or if it was edited on purpose, say so: --edited on the "
            "command line, load_plan(path, edited=True)"
        )
    return replace(plan, edited=True) if changed else plan


def job_text(job: Job) -> str:
    """A job as one line of text: equal jobs give equal texts."""
    return to_line(job, CODEC)


def load_plan(path: str | os.PathLike[str], *, edited: bool = False) -> Plan:
    """Read a plan file. edited: its programs were edited on purpose; all that can be proved of them still is,
    but not that they compute what the model does. Raises UsageError as `plan_from_text`, and for a file that
    cannot be read."""
    return plan_from_text(read_text(path, "plan"), os.fspath(path), edited)
