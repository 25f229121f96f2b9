"""Op times that were measured once and kept: on disk, by op and shapes, for each device and PyTorch.

A key is an op's signature (`stretto.ir.prices`). What else decides a time is the file: device, PyTorch's
version, threads. Files lie in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`) under
`stretto/ops`; they are written whole or not at all, and a damaged one is told of and made anew.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from stretto.errors import StrettoError, UsageError
from stretto.files.codec import Codec
from stretto.files.form import Amount, Fits, rounded
from stretto.files.typed_file import TypedFile

CODEC = Codec({float: rounded(4)})
"""Of what is measured: more digits are noise."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured op. spread: range of the faster half of the rounds over their mean; flops, nbytes: its
    arithmetic, and the bytes that it reads and writes."""

    us: Amount
    spread: Amount
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What op times belong to. kind: as `Job.device` says it."""

    device: str
    torch: str
    threads: int
    kind: Annotated[str, Fits(lambda kind: kind in ("cpu", "cuda"), "cpu or cuda")] = "cpu"

    def __str__(self) -> str:
        return f"{self.device}, PyTorch {self.torch}, {self.threads} thread{'s' if self.threads != 1 else ''}"


@dataclass(frozen=True, slots=True)
class Kept:
    """What a file of the cache holds."""

    machine: Machine
    ops: dict[str, Timing]


FILE = TypedFile(Kept, "stretto-op-times", 3, "op times", "They are kept by `stretto plan`", CODEC)


def cache_folder() -> Path:
    """Where op times are kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of base directories says that a relative path is not to be used.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "stretto" / "ops"


@dataclass
class OpCache:
    """Op times of one machine. `put` keeps in memory; `save` writes."""

    machine: Machine
    path: Path
    ops: dict[str, Timing] = field(default_factory=dict)

    @staticmethod
    def open(machine: Machine, folder: Path | None = None) -> OpCache:
        """The machine's cache, empty if there is none. Warns when its file is damaged."""
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{machine.device} {machine.torch} {machine.threads}").strip(
            "-"
        )
        path = (folder if folder is not None else cache_folder()) / f"{name}.json"
        return OpCache(machine, path, _read(path, machine))

    def save(self) -> None:
        """Write the file; times that another process has kept meanwhile stay. Raises StrettoError."""
        self.ops = {**_read(self.path, self.machine), **self.ops}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StrettoError(f"cannot keep op times in {self.path.parent}: {error.strerror}") from None
        FILE.save(Kept(self.machine, self.ops), self.path)


def _read(path: Path, machine: Machine) -> dict[str, Timing]:
    if not path.exists():
        return {}
    try:
        kept = FILE.load(path)
        if kept.machine == machine:
            return kept.ops
        why = f"{path}: of another machine"
    except UsageError as error:
        why = str(error)
    warnings.warn(f"kept op times cannot be used ({why}); they will be measured again", stacklevel=3)
    return {}
