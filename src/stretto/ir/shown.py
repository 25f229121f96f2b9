"""How jobs and plans show themselves: in one line where an interpreter prints them, as a page in a notebook.

What draws the page is far above: `stretto.report` registers it here, as it does for timelines' files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PAGES: dict[type, Callable[[Any], str]] = {}
"""Type -> what makes the HTML of one, a picture and tables."""


class Shown:
    """What is shown by its `line`, and in a notebook by its page."""

    __slots__ = ()

    @property
    def line(self) -> str:
        """What it is, in some 80 letters."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.line}>"

    def _repr_html_(self) -> str | None:
        """For notebooks; None, and so the line, where nothing draws it."""
        page = PAGES.get(type(self))
        return None if page is None else page(self)
