"""The plan file: a plan as readable, versioned JSON, and back. `docs/plan-format.md` describes the format.

Equal plans give equal bytes; what is written is read back equal. Reading never trusts the file: every
trouble is a UsageError with file and JSON path, references included. Whether a plan that can be read is also
right is for `stretto.verify`. Touches `stretto.ir` only.
"""

from __future__ import annotations

import os

from stretto.errors import UsageError
from stretto.files.codec import Codec
from stretto.files.form import Layout, text
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
        Item: text(Item.parse, Layout.ENTRY),
        Instruction: text(Instruction.parse, Layout.ENTRY),
    }
)
CODEC.row(Op, 5, Layout.ENTRY)
CODEC.row(Shard, 3, Layout.WORD)

FILE = TypedFile(Plan, "stretto-plan", VERSION, "plan", "Make one with `stretto plan`", CODEC)

plan_to_text, save_plan = FILE.to_text, FILE.save
written_by(save_plan)


def plan_from_text(text: str, where: str = "plan") -> Plan:
    """Read a plan; `where` names the text in messages.

    Raises UsageError (file, JSON path, trouble) for text that is not JSON, not this format or version, that
    misses or adds keys, and for references to stages, ops, edges, windows or ranks that do not exist.
    """
    plan = FILE.from_text(text, where)
    for broken in broken_references(plan):
        raise UsageError(f"{where}: {broken}")
    return plan


def job_text(job: Job) -> str:
    """A job as one line of text: equal jobs give equal texts."""
    return to_line(job, CODEC)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file. Raises UsageError as `plan_from_text`, and for a file that cannot be read."""
    return plan_from_text(read_text(path, "plan"), os.fspath(path))
