"""The errors that users see. Each message says what, where, and what to do.

`StrettoError` and its kin end a command with exit status 1 and one message, never a traceback; wrong
usage (`UsageError`) ends it with 2.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path


def meant(name: object, known: Iterable[str], form: str = "{} ") -> str:
    """For a message that refuses a name: "did you mean 'zb-h1'?" with the nearest known one; nothing where
    none is near. form: the text around it."""
    near = nearest(name, known)
    return form.replace("{}", f"did you mean {near!r}?") if near is not None else ""


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that is most like another, whatever its case; None where none is."""
    lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1) if isinstance(name, str) else []
    return lower[near[0]] if near else None


SHOWN = 5
"""How many names or numbers a message has at most."""


def listed(things: Iterable[object]) -> str:
    """`3, 7 and more`: the first few of many numbers or names."""
    first = list(islice(things, SHOWN + 1))
    return ", ".join(map(str, first[:SHOWN])) + (" and more" if len(first) > SHOWN else "")


def near_path(path: str | os.PathLike[str], form: str = "; {}") -> str:
    """As `meant`, for a path that does not exist: the nearest one that does, part by part.
    Nothing where none is near, or where folders cannot be listed."""
    given = Path(path)
    result = Path(given.anchor)
    for part in given.parts[bool(given.anchor) :]:
        try:
            if not (result / part).exists():
                part = _near(part, os.listdir(result))
        except (OSError, ValueError):  # the latter of a null byte
            return ""
        if not part:
            return ""
        result /= part
    return form.replace("{}", f"did you mean {result}?")


def _near(name: str, names: Sequence[str]) -> str:
    """Of files with the ending that was given the stems are compared, else all would be alike."""
    stem, ending = os.path.splitext(name)
    alike = {os.path.splitext(one)[0]: one for one in names if os.path.splitext(one)[1] == ending}
    near = nearest(stem, alike)
    if near is not None:
        return alike[near]
    return nearest(name, [one for one in names if one not in alike.values()]) or ""


class StrettoError(Exception):
    """The work failed or was refused. Exit status 1."""

    exit_status = 1


class StoppedError(StrettoError):
    """The user stopped it. The exit status by custom: 128 and the signal's number; 130 is Ctrl-C's."""

    exit_status = 130

    def __init__(self, message: str, exit_status: int = exit_status) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class UsageError(StrettoError):
    """A setting, an argument or an input file is wrong. Exit status 2."""

    exit_status = 2


class TooLargeError(UsageError):
    """What is asked for is there, but not for work of this size."""


class CaptureError(StrettoError):
    """A model cannot be captured; names the source line and the reason."""


class PlanError(StrettoError):
    """A plan or a schedule is refused; lists every fault, each with its rank and action."""

    def __init__(self, what: str, faults: Sequence[object]) -> None:
        self.faults = list(faults)
        lines = "\n".join(f"  {fault}" for fault in self.faults)
        count = len(self.faults)
        super().__init__(f"{what}: {count} fault{'s' if count != 1 else ''}\n{lines}")
        self._what = what

    def __reduce__(self) -> tuple[type[PlanError], tuple[str, list[str]]]:
        """For ranks that learn what another one's plan is refused for."""
        return type(self), (self._what, [str(fault) for fault in self.faults])


class RunError(StrettoError):
    """A run failed: a rank was lost, or a value does not fit the plan."""


class LostRankError(RunError):
    """A rank does not answer any more. `lost` is its number, None when it is one of several."""

    def __init__(self, message: str, lost: int | None) -> None:
        self.lost = lost
        super().__init__(message)

    def __reduce__(self) -> tuple[type[LostRankError], tuple[str, int | None]]:
        return type(self), (str(self), self.lost)
