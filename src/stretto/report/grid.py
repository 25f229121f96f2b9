"""A table as text, made once for terminal and page, so that the two cannot differ. May touch `rich`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

WIDTH = 120
"""Columns of the tables of commands, wherever they are printed."""


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
