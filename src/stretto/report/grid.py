"""Numbers in words, and a table as text: made once for terminal and page, so that the two cannot differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.bounds.step import format_us as format_us

KIB = 1024


def format_bytes(nbytes: float) -> str:
    """Bytes in binary units: `512 B`, `12.0 MiB`, `1.50 GiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < KIB - 0.5 or unit == "GiB":
            # Three digits, and never the exponent that `g` would write for a thousand.
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 999.5 else f"{size:.3g} {unit}"
        size /= KIB
    raise AssertionError("unreachable")


def format_flops(flops: float) -> str:
    """Floating-point operations: `3.1 GFLOP`."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= 0.9995 * size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops:.0f} FLOP"


def source_word(source: str) -> str:
    """What a timeline of this source shows: predicted, measured."""
    return "predicted" if source == "simulated" else source


def counted(number: int, noun: str) -> str:
    """`1 stage`, `3 microbatches`."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def format_share(share: float) -> str:
    """A share of all: `6.5%`."""
    return f"{100 * share:.1f}%"


WIDTH = 120
"""Columns of the tables of commands, wherever they are printed."""

Row = Mapping[str, Any]
Columns = Mapping[str, tuple[str | Callable[[Row], Any], str | Callable[[Any], str]]]
"""Head -> (the row's key, or what is made of the row; the format of that)."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A title, column heads, and rows. words: the columns of words, at the left, which may be broken; the
    others are numbers."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    caption: str = ""

    def rich(self) -> Table:
        """The table for the terminal."""
        table = Table(
            title=self.title or None,
            caption=self.caption or None,
            title_justify="left",
            title_style="bold",
            header_style="bold",
        )
        for at, column in enumerate(self.head):
            if at in self.words:
                table.add_column(column, overflow="fold")
            else:
                table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def print(self, console: Console | None = None) -> None:
        """Print it, by default on a console of `WIDTH` columns."""
        (console or Console(width=WIDTH)).print(self.rich())


def grid_of(
    title: str,
    columns: Columns,
    rows: Iterable[Row],
    *,
    words: Sequence[str] = (),
    absent: str = "",
) -> Grid:
    """A table of rows of data. words: the heads of the columns of words, by default the first; absent: the
    cell of what is None or not there."""

    def cell(row: Row, of: str | Callable[[Row], Any], form: str | Callable[[Any], str]) -> str:
        value = row.get(of) if isinstance(of, str) else of(row)
        if value is None:
            return absent
        return form.format(value) if isinstance(form, str) else form(value)

    heads = tuple(columns)
    columns_of_words = [heads.index(head) for head in words] or [0]
    cells = [[cell(row, of, form) for of, form in columns.values()] for row in rows]
    return Grid(title, heads, cells, columns_of_words)
