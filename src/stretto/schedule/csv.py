"""PyTorch's compute-only pipeline CSV: from a schedule to its text, and back.

One row a rank, one token a cell (`0F0`, `1I3`, `1W3`, `2B0`, `(2F5;5B1)OVERLAP_F_B`); empty cells are idle
time steps and carry no meaning here. PyTorch's readers and writers of the format are private
(`torch.distributed.pipelining`), so this file has its own, and a test compares the two. Reading checks
that a schedule can be read, not that it is legal: that is for `stretto.verify`.
"""

from __future__ import annotations

import csv
import io
import os

from stretto.errors import UsageError
from stretto.files.typed_file import read_text
from stretto.ir.action import Overlap, Schedule, Slot, parse_slot
from stretto.ir.limits import MOST_MICROBATCHES


def read_csv(path: str | os.PathLike[str]) -> Schedule:
    """The schedule of a file. Raises UsageError as `from_csv` does, and where it cannot be read."""
    return from_csv(read_text(path, "schedule"), os.fspath(path))


def from_csv(text: str, name: str = "schedule text") -> Schedule:
    """The schedule of a text. name: what messages call it.

    Blank lines at the end are skipped; a blank line before that is a rank without actions, as PyTorch reads
    it. Stages, microbatches and the stages' ranks are inferred from the tokens; the family is "csv".

    Raises UsageError, with file, line, column (cells count from 1) and token, for a cell that cannot be read
    and for a stage that is on two ranks; and for a text with no action, or with a gap in its stages.
    """
    cells = csv.reader(io.StringIO(text, newline=""))
    rows: list[tuple[int, list[str]]] = []
    try:
        for row in cells:
            rows.append((cells.line_num, row))
    except csv.Error as error:
        raise UsageError(f"{name}, line {cells.line_num}: not readable as CSV ({error})") from None
    while rows and not rows[-1][1]:
        rows.pop()

    orders: list[tuple[Slot, ...]] = []
    homes: dict[int, tuple[int, int, int]] = {}  # stage -> rank, line, column of its first token
    microbatches = 0
    for rank, (line, row) in enumerate(rows):
        order: list[Slot] = []
        for column, token in enumerate(row, start=1):
            if not token.strip():
                continue
            cell = f"{name}, line {line}, column {column}"
            slot = _parse(token, cell)
            order.append(slot)
            for action in slot.actions:
                if action.microbatch >= MOST_MICROBATCHES:
                    raise UsageError(
                        f"{cell}: {token.strip()!r} is beyond {MOST_MICROBATCHES:,} microbatches; number "
                        "them from 0 without a gap"
                    )
                microbatches = max(microbatches, action.microbatch + 1)
                home, *there = homes.setdefault(action.stage, (rank, line, column))
                if home != rank:
                    raise UsageError(
                        f"{cell}: {token.strip()!r} puts stage {action.stage} on rank {rank}, but line "
                        f"{there[0]}, column {there[1]} puts it on rank {home}. Keep each stage on one rank"
                    )
        orders.append(tuple(order))
    if not homes:
        raise UsageError(f"{name}: has no action. Write one row a rank, with cells such as 0F0,0B0")
    for expected, stage in enumerate(sorted(homes)):
        if stage != expected:
            _, line, column = homes[stage]
            raise UsageError(
                f"{name}, line {line}, column {column}: stage {stage} is used, but no rank runs stage "
                f"{expected}. Number the stages from 0 without a gap"
            )
    stage_ranks = tuple(homes[stage][0] for stage in sorted(homes))
    return Schedule("csv", len(stage_ranks), microbatches, stage_ranks, tuple(orders))


def to_csv(schedule: Schedule) -> str:
    """The schedule as CSV text: one row a rank, one token a cell, lines end with a line feed."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    for order in schedule.orders:
        # An empty order becomes one empty cell: a blank line at the end would not be read back.
        writer.writerow([str(slot) for slot in order] or [""])
    return out.getvalue()


def _parse(token: str, cell: str) -> Slot:
    try:
        slot = parse_slot(token)
    except ValueError as error:
        hint = ""
        if any(word in token for word in ("SEND_", "RECV_", "SHARD", "REDUCE_GRAD")):
            hint = ". The file has communication actions: dump it with PyTorch's format='compute_only'"
        raise UsageError(f"{cell}: {error}{hint}") from None
    if isinstance(slot, Overlap) and len(set(slot.actions)) < len(slot.actions):
        raise UsageError(f"{cell}: {token.strip()!r} overlaps an action with itself")
    return slot
