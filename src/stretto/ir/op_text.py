"""Ops as lines of JSON: `["mm_3", "aten.mm.default", ["%view_8", "%t_3"], [], ["float32[16,32]"]]`.

A sixth element holds what differs from its default: alias, random, flops, module, repeats. Arguments:

    %name            the value of that name
    'text            a string
    @dtype:float32   a constant of the framework
    inf, -inf, nan   floats that JSON has no number for
    [...]            a tuple; numbers, true, false and null stand for themselves

The text is plain data; nothing in it is ever evaluated. Touches `stretto.ir` only.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat
from typing import Any

from stretto.errors import StrettoError
from stretto.files.codec import SPECIAL_FLOATS, Form, Misfit, read_list, text, write_float
from stretto.files.parse import LARGEST
from stretto.ir.program import DTYPE_BYTES, Arg, Const, Ref, TensorSpec

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
"""Of what ops hold; an `Op` is then a row of its first five fields."""
