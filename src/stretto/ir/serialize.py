"""The plan file: a plan as readable, versioned JSON, and back. `docs/plan-format.md` describes the format.

Equal plans give equal bytes; what is written is read back equal. Reading never trusts the file: every
trouble is a UsageError with file and JSON path, references included. Whether a plan that can be read is also
right is for `stretto.verify`. What a plan computes is not all provable, so the file has a digest of each
program and of the rest of the job: one that was edited since is read only by who says that it was. The
digests find edits and damage; they are no signature.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from typing import Any

from stretto.errors import StrettoError, UsageError
from stretto.files.codec import SPECIAL_FLOATS, Codec, Form, Misfit, TextLayout, read_list, text, write_float
from stretto.files.parse import LARGEST
from stretto.files.typed_file import TypedFile, read_text, to_line
from stretto.ir.action import Slot, parse_slot
from stretto.ir.plan import VERSION, Instruction, Item, Plan, written_by
from stretto.ir.program import DTYPE_BYTES, Arg, Const, Job, Op, Ref, Shard, TensorSpec
from stretto.ir.references import broken_references

MOST_NESTED = 8
"""Lists within lists of an argument. Ops of the dispatcher take lists of numbers and of values."""


CONSTANTS: dict[str, tuple[str, ...]] = {
    "dtype": tuple(DTYPE_BYTES),
    "device": ("job",),
    "layout": ("strided",),
    "memory_format": ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
}
"""Constants of the framework by kind. Nothing else may be looked up by a name from a file."""


def _write_arg(arg: Arg) -> Any:
    if isinstance(arg, Ref):
        return f"%{arg.name}"
    if isinstance(arg, Const):
        return f"@{arg.kind}:{arg.text}"
    if isinstance(arg, str):
        return f"'{arg}"
    if isinstance(arg, float):
        return write_float(arg)
    if arg is None or isinstance(arg, (bool, int)):
        return arg
    if isinstance(arg, tuple):
        return [_write_arg(item) for item in arg]
    raise StrettoError(
        f"an argument of type {type(arg).__name__} has no place in a plan file ({arg!r}). "
        "Capture it as a value, a number, a string or a framework constant"
    )


def _read_arg(value: Any, depth: int = 0) -> Arg:
    if isinstance(value, list):
        if depth == MOST_NESTED:
            raise Misfit(f"an argument has lists within lists, more than {MOST_NESTED} of them")
        return tuple(read_list(value, repeat(lambda item: _read_arg(item, depth + 1))))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if not isinstance(value, str):
        raise Misfit("an argument", value)
    if value in SPECIAL_FLOATS:
        return SPECIAL_FLOATS[value]
    if value.startswith("%") and len(value) > 1:
        return Ref(value[1:])
    if value.startswith("'"):
        return value[1:]
    kind, colon, rest = value[1:].partition(":")
    if value.startswith("@") and colon and kind:
        if rest not in CONSTANTS.get(kind, ()):
            raise Misfit(f"{value!r} is no constant of a program: {_known(kind)}")
        return Const(kind, rest)
    raise Misfit(
        f"cannot read the argument {value!r}: write %name for a value, 'text for a string, "
        "@dtype:float32 for a constant"
    )


def _known(kind: str) -> str:
    if kind in CONSTANTS:
        return f"those of {kind} are {', '.join(CONSTANTS[kind])}"
    return f"write one of {', '.join(CONSTANTS)}"


@lru_cache(4096)  # few specs, many ops
def _read_spec(word: str) -> TensorSpec:
    spec = TensorSpec.parse(word)
    if spec.dtype not in DTYPE_BYTES:
        raise ValueError(f"there is no dtype {spec.dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    if spec.stride is not None and len(spec.stride) != len(spec.shape):
        raise ValueError(f"{len(spec.shape)} dims have {len(spec.stride)} strides")
    if max(spec.nbytes, *(spec.stride or (0,))) > LARGEST:
        raise ValueError("a tensor is too large: its bytes and strides must be numbers of 63 bits")
    return spec


FORMS: dict[Any, Form] = {Arg: Form(_read_arg, _write_arg), TensorSpec: text(_read_spec)}
"""The forms of what ops contain; an `Op` is then a row of its first five fields."""


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
    """The text of the plan's file. Raises StrettoError for what files cannot express."""
    return FILE.to_text(plan, plan.edited)


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the file in full or not at all. Raises StrettoError and UsageError as `TypedFile.save`."""
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
