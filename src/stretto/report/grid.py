"""Numbers in words, and a table as text: made once for terminal and page, so that the two cannot differ."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, JustifyMethod
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
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
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
"""Columns of the tables of commands, at most; and where they are printed into a file or a pipe."""


def console_of(most: int = WIDTH, **given: Any) -> Console:
    """A console as wide as the terminal, up to `most` columns; of `most` where the output is none."""
    console = Console(**given)
    if not console.is_terminal or console.width > most:
        console.width = most
    return console


UNBROKEN = 1_000
"""Columns that no line has, of what is printed into a file or a pipe."""
BEHIND = 19
"""Columns of a line's name, below whose text the rest of it is printed (`Plan.__str__`)."""


def fitted(text: str) -> str:
    """Lines of names and texts, broken where the terminal ends; as they are where the output is none."""
    columns = console_of(UNBROKEN).width
    names = (BEHIND if line.startswith("  ") else 2 for line in text.splitlines())
    pairs = zip(text.splitlines(), names, strict=True)
    return "\n".join(textwrap.fill(line, columns, subsequent_indent=" " * name) for line, name in pairs)


FRAME = 3
"""Columns that a table needs for each of its own, and one more in all."""
LONG_WORD = 18
"""Columns that a word of a column of words needs at most, before it is broken. Assumed."""

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

    def print(self, console: Console | None = None) -> None:
        """Print it, by default on `console_of()`: as one table, or as several that have the first column each
        where one would be wider than the console."""
        shown = console or console_of()
        parts = self._fitting(shown.width)
        for number, columns in enumerate(parts, start=1):
            title = self.title if number == 1 else f"{self.title}, further columns"
            if self.title:
                shown.print(title, style="bold", highlight=False)
            shown.print(self._table(columns, shown.width))
        if self.caption:
            shown.print(self.caption, style="italic", highlight=False)

    def _fitting(self, width: int) -> list[list[int]]:
        """The columns of each table. The first column may need so much that nothing fits beside it: then that
        table is wider."""
        least = [self._least(at) + FRAME for at in range(len(self.head))]
        parts, used = [[0]], least[0] + 1
        for at in range(1, len(least)):
            if used + least[at] > width and len(parts[-1]) > 1:
                parts.append([0])
                used = least[0] + 1
            parts[-1].append(at)
            used += least[at]
        return parts

    def _cells(self, at: int) -> Iterator[str]:
        return (str(row[at]) for row in self.rows)

    def _least(self, at: int) -> int:
        """Columns without which a number, or a word of usual length, would be broken."""
        words = [word for text in (self.head[at], *self._cells(at)) for word in text.split()]
        if at in self.words:
            return min(LONG_WORD, max(map(len, words), default=1))
        in_head = max(map(len, self.head[at].split()), default=1)
        return max(in_head, *map(len, self._cells(at)), 1)

    def _table(self, columns: Sequence[int], width: int) -> Table:
        table = Table(header_style="bold")
        natural = {at: max(len(self.head[at]), *map(len, self._cells(at)), 1) for at in columns}
        wide = {at: min(natural[at], self._least(at)) for at in columns}
        spare = width - 1 - sum(wide.values()) - FRAME * len(columns)
        for at in sorted(columns, key=lambda at: at in self.words):  # what cannot be broken well comes first
            more = max(0, min(spare, natural[at] - wide[at]))
            wide[at], spare = wide[at] + more, spare - more
        for at in columns:
            side: JustifyMethod = "left" if at in self.words else "right"
            table.add_column(self.head[at], overflow="fold", justify=side, width=wide[at])
        for row in self.rows:
            table.add_row(*(str(row[at]) for at in columns))
        return table


def grid_of(
    title: str,
    columns: Columns,
    rows: Iterable[Row],
    *,
    words: Sequence[str] = (),
    caption: str = "",
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
    return Grid(title, heads, cells, columns_of_words, caption)
