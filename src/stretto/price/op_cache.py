"""Op times that were measured once and kept: on disk, by op and shapes, for each device and PyTorch.

A key is an op's signature (`stretto.ir.prices`). What else decides a time is the file: device, PyTorch's
version, threads. Files lie in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`) under
`stretto/ops`; they are written whole or not at all, and a damaged one is told of and made anew.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stretto.errors import StrettoError, UsageError
from stretto.files.whole_file import write_file
from stretto.ir.reading import Cursor, read_json

VERSION = 2

KINDS = ("cpu", "cuda")
"""Of devices that ops are captured for."""
"""Of the cache's files."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured op. spread: range of the faster half of the rounds over their mean; flops, nbytes: its
    arithmetic, and the bytes that it reads and writes."""

    us: float
    spread: float
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What op times belong to. kind: as `Job.device` says it."""

    device: str
    torch: str
    threads: int
    kind: str = "cpu"

    def __str__(self) -> str:
        return f"{self.device}, PyTorch {self.torch}, {self.threads} thread{'s' if self.threads != 1 else ''}"


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
        document = {"version": VERSION, "machine": encode_machine(self.machine), "ops": encode_ops(self.ops)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StrettoError(f"cannot keep op times in {self.path.parent}: {error.strerror}") from None
        write_whole(self.path, json.dumps(document, indent=1))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old one or the new one. Raises StrettoError."""
    try:
        write_file(path, text)
    except OSError as error:
        raise StrettoError(f"cannot write {path}: {error.strerror}") from None


def _read(path: Path, machine: Machine) -> dict[str, Timing]:
    try:
        root = read_json(path.read_text(encoding="utf-8"), str(path))
        fields = root.fields(("version", "machine", "ops"))
        if fields["version"].integer() != VERSION or decode_machine(fields["machine"]) != machine:
            raise root.error("of another version or machine")
        return decode_ops(fields["ops"])
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, UsageError) as error:
        warnings.warn(
            f"the op times kept in {path} cannot be used ({error}); they will be measured again",
            stacklevel=3,
        )
        return {}


def encode_machine(machine: Machine) -> dict[str, str | int]:
    return {
        "kind": machine.kind,
        "device": machine.device,
        "torch": machine.torch,
        "threads": machine.threads,
    }


def decode_machine(cursor: Cursor) -> Machine:
    parts = cursor.fields(("kind", "device", "torch", "threads"))
    kind = parts["kind"].text()
    if kind not in KINDS:
        raise parts["kind"].error(f"expected {' or '.join(KINDS)}, found {kind!r}")
    return Machine(parts["device"].text(), parts["torch"].text(), parts["threads"].integer(), kind)


def encode_ops(ops: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    return {
        key: {
            "us": round(ops[key].us, 3),
            "spread": round(ops[key].spread, 3),
            "flops": ops[key].flops,
            "bytes": ops[key].nbytes,
        }
        for key in sorted(ops)
    }


def decode_ops(cursor: Cursor) -> dict[str, Timing]:
    found: dict[str, Timing] = {}
    for key, entry in cursor.members().items():
        parts = entry.fields(("us", "spread", "flops", "bytes"))
        us, spread = (parts[name].amount() for name in ("us", "spread"))
        found[key] = Timing(us, spread, parts["flops"].integer(), parts["bytes"].integer())
    return found
