"""The path that a wrong one was probably meant to be. Lists folders, and reads no file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from stretto.errors import nearest


def near_path(path: str | os.PathLike[str], form: str = "; {}") -> str:
    """As `stretto.errors.meant`, for a path that does not exist: the nearest one that does, part by part.
    Nothing where none is near, or where folders cannot be listed."""
    given = Path(path)
    found = Path(given.anchor)
    for part in given.parts[bool(given.anchor) :]:
        try:
            if not (found / part).exists():
                part = _near(part, os.listdir(found))
        except (OSError, ValueError):  # the latter of a null byte
            return ""
        if not part:
            return ""
        found /= part
    return form.replace("{}", f"did you mean {found}?")


def _near(name: str, names: Sequence[str]) -> str:
    """Of files with the ending that was given the stems are compared, else all would be alike."""
    stem, ending = os.path.splitext(name)
    alike = {os.path.splitext(one)[0]: one for one in names if os.path.splitext(one)[1] == ending}
    near = nearest(stem, alike)
    if near is not None:
        return alike[near]
    return nearest(name, [one for one in names if one not in alike.values()]) or ""
