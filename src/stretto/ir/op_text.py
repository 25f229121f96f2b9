"""Ops as lines of JSON: `["mm_3", "aten.mm.default", ["%view_8", "%t_3"], {}, "float32[16,32]"]`.

A sixth element holds what differs from its default: alias, random, flops, module, repeats. Arguments:

    %name            the value of that name
    'text            a string
    @dtype:float32   a constant of the framework
    inf, -inf, nan   floats that JSON has no number for
    [...]            a tuple; numbers, true, false and null stand for themselves

The text is plain data; nothing in it is ever evaluated. Touches `stretto.ir` only.
"""

from __future__ import annotations

import json
import keyword
import math
from typing import Any

from stretto.errors import StrettoError
from stretto.files.parse import LARGEST
from stretto.ir.program import GETITEM, Arg, Const, Op, Ref, TensorSpec
from stretto.ir.reading import SPECIAL_FLOATS, Cursor

MOST_FLOPS = 10**30
"""More than any op has: a year of a million devices of 10**16 flops a second is less."""

EXTRAS = ("alias", "random", "flops", "module", "repeats")


def encode_float(value: float) -> float | str:
    """A float as JSON has it: infinities and not-a-number become text."""
    return float(value) if math.isfinite(value) else str(float(value))


def encode_arg(arg: Arg, of: str) -> Any:
    """An argument as JSON data. Raises StrettoError, naming the op `of`, for a type
    that a plan cannot hold."""
    if isinstance(arg, Ref):
        return f"%{arg.name}"
    if isinstance(arg, Const):
        return f"@{arg.kind}:{arg.text}"
    if isinstance(arg, str):
        return f"'{arg}"
    if isinstance(arg, float):
        return encode_float(arg)
    if arg is None or isinstance(arg, (bool, int)):
        return arg
    if isinstance(arg, tuple):
        return [encode_arg(item, of) for item in arg]
    raise StrettoError(
        f"op {of}: an argument of type {type(arg).__name__} has no place in a plan file ({arg!r}). "
        "Capture it as a value, a number, a string or a framework constant"
    )


MOST_NESTED = 8
"""Lists within lists of an argument. Ops of the dispatcher take lists of numbers and of values."""


def decode_arg(cursor: Cursor, depth: int = 0) -> Arg:
    """An argument from JSON data. Raises UsageError with its path."""
    value = cursor.value
    if isinstance(value, list):
        if depth == MOST_NESTED:
            raise cursor.error(f"an argument has lists within lists, more than {MOST_NESTED} of them")
        return cursor.sequence(lambda item: decode_arg(item, depth + 1))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = cursor.text()
    if text in SPECIAL_FLOATS:
        # The interpreter's one nan object, so that equal plans compare equal.
        return math.nan if text == "nan" else float(text)
    if text.startswith("%") and len(text) > 1:
        return Ref(text[1:])
    if text.startswith("'"):
        return text[1:]
    kind, colon, rest = text[1:].partition(":")
    if text.startswith("@") and colon and kind:
        return Const(kind, rest)
    raise cursor.error(
        f"cannot read the argument {text!r}: write %name for a value, 'text for a string, "
        "@dtype:float32 for a constant"
    )


def encode_op(op: Op) -> list[Any]:
    """The op as JSON data: five elements, and a sixth if something is not at its default."""
    outputs: Any = [None if spec is None else str(spec) for spec in op.outputs]
    if len(outputs) == 1 and outputs[0] is not None:
        outputs = outputs[0]
    kwargs = {key: encode_arg(value, op.name) for key, value in op.kwargs}
    line: list[Any] = [op.name, op.target, encode_arg(op.args, op.name), kwargs, outputs]
    extras: dict[str, Any] = {}
    if op.alias is not None:
        extras["alias"] = op.alias
    if op.random:
        extras["random"] = True
    if op.flops:
        extras["flops"] = op.flops
    if op.module:
        extras["module"] = op.module
    if op.repeats:
        extras["repeats"] = op.repeats
    return [*line, extras] if extras else line


def decode_op(cursor: Cursor) -> Op:
    """The op from JSON data. Raises UsageError with the path of what cannot be read."""
    parts = cursor.elements()
    if len(parts) not in (5, 6):
        raise cursor.error(
            "an op is [name, target, arguments, keyword arguments, result] and perhaps an object of extras; "
            f"this has {len(parts)} elements"
        )
    name, target, args, kwargs, outputs = parts[:5]
    extras = parts[5].fields((), EXTRAS) if len(parts) == 6 else {}
    op = Op(
        name=name.text(),
        target=target.text(),
        args=args.sequence(decode_arg),
        kwargs=tuple((_keyword(key, value), decode_arg(value)) for key, value in kwargs.members().items()),
        outputs=_decode_outputs(outputs),
        alias=extras["alias"].text() if "alias" in extras else None,
        random=extras["random"].flag() if "random" in extras else False,
        flops=_flops(extras["flops"]) if "flops" in extras else 0,
        module=extras["module"].text() if "module" in extras else "",
        repeats=extras["repeats"].text() if "repeats" in extras else "",
    )
    if op.target == GETITEM and not _takes_a_part(op):
        raise args.error(f'a {GETITEM} takes a value and which of its parts, from 0: ["%name", 0]')
    return op


def _flops(cursor: Cursor) -> int:
    found = cursor.integer()
    if not 0 <= found <= MOST_FLOPS:
        raise cursor.error(f"expected a count from 0 to {MOST_FLOPS:.0e}, found {found:.3g}")
    return found


def _keyword(name: str, cursor: Cursor) -> str:
    """A keyword argument's name. It stands in the source of the functions that a plan's windows become, so
    nothing but a name may be one."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise cursor.error(f"{name!r} is no name of a keyword argument")
    return name


def _takes_a_part(op: Op) -> bool:
    match op.args:
        case (Ref(), int(index)) if not isinstance(index, bool):
            return index >= 0 and not op.kwargs
    return False


def decode_spec(cursor: Cursor) -> TensorSpec:
    spec = cursor.parsed(TensorSpec.parse)
    if max(spec.nbytes, *(spec.stride or (0,))) > LARGEST:
        raise cursor.error("a tensor is too large: its bytes and strides must be numbers of 63 bits")
    return spec


def _decode_outputs(cursor: Cursor) -> tuple[TensorSpec | None, ...]:
    if isinstance(cursor.value, str):
        return (decode_spec(cursor),)
    return cursor.sequence(lambda part: None if part.value is None else decode_spec(part))


def one_line(value: Any) -> str:
    """JSON data on one line; the same data gives the same bytes."""
    return json.dumps(value, allow_nan=False)
