"""JSON and TOML that others wrote, as data: what Python's own readers let through or end in is a ValueError.

Numbers of hundreds of digits would end in an OverflowError somewhere later, deep nesting in a RecursionError.
Knows nothing of what the data mean; touches no other room.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any, NoReturn

LARGEST = (1 << 63) - 1
"""The largest integer that files may have: of 64 bits, as tensors' sizes and strides are."""
TOO_DEEP = "it is nested too deeply"


def parse_json(text: str | bytes, *, strict: bool = False) -> Any:
    """The data of a JSON text. Raises ValueError with the reason (JSONDecodeError, with the place, for what
    is not JSON); where it is strict, also for an object that has a key twice, of which Python's reader drops
    one, and for numbers that JSON does not have."""
    try:
        if strict:
            return json.loads(text, object_pairs_hook=_unique, parse_constant=_refused, parse_int=_full)
        return json.loads(text, parse_int=_full)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice; keep one of them")
    return members


def _refused(word: str) -> NoReturn:
    raise ValueError(f'{word} is not JSON; write infinite numbers as text, for example "inf"')


def parse_toml(text: str) -> dict[str, Any]:
    """The data of a TOML text. Raises ValueError with the reason, TOMLDecodeError for what is not TOML."""
    try:
        data = tomllib.loads(text)
        _check(data)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    return data


def _full(digits: str) -> int:
    if len(digits) > len(str(LARGEST)) + 1 or abs(int(digits)) > LARGEST:
        raise ValueError(f"a number of {len(digits.lstrip('-'))} digits is too large: {digits[:20]}...")
    return int(digits)


def _check(value: Any) -> None:
    if isinstance(value, dict):
        for item in value.values():
            _check(item)
    elif isinstance(value, list):
        for item in value:
            _check(item)
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError("an integer is too large: at most 63 bits")
