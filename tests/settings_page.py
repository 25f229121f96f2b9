"""docs/settings.md: every setting of a run, from its field's own docstring.

python -m tests.settings_page    # writes the page again
"""

from __future__ import annotations

from pathlib import Path

from stretto.config.fields import Row, Section, section_of, sections
from stretto.price.cluster import Cluster

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """# Settings of a run

All that a settings file may say, and its default; `stretto train CONFIG optimizer.lr=1e-3` changes one
of them ([training](training.md)). `stretto settings` prints the same in a terminal, `stretto settings
parallel` one table, `stretto settings parallel.zero` one key. In code, `stretto.Parallel` has the keys of
`[parallel]`. At the end are those of [`stretto.Cluster`](clusters.md), a description in code of machines to
plan for.
"""


def page() -> str:
    """The page as it should be."""
    parts = [_table(section, _head(section)) for section in sections()]
    return "\n".join([HEAD, *parts, _table(section_of("", Cluster), "## `stretto.Cluster(...)`")])


def _head(section: Section) -> str:
    head = f"## `[{section.name}]`" if section.name else "## At the top"
    return f'{head}, kind = "{section.kind}"' if section.kind else head


def _table(section: Section, head: str) -> str:
    rows = [f"| `{row.key}` | {_default(row)} | {row.text} |" for row in section.rows]
    return "\n".join(
        [head, "", section.text, "", "| key | default | what it is |", "| --- | --- | --- |", *rows, ""]
    )


def _default(row: Row) -> str:
    shown = {None: "none", "": "-"}.get(row.default, f"`{row.default}`")
    others = ", ".join(f"`{one}`" for one in row.others)
    return f"{shown}, or {others}" if others else shown


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
