"""`stretto settings` and `stretto init`: what a settings file may say, and examples of such files. Thin.

Both read what is installed with the package: the fields' own docstrings, and the folder `examples`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.common import command
from stretto.config.fields import Row, Section, section_of, sections
from stretto.errors import UsageError, meant
from stretto.files.whole_file import saving
from stretto.price.cluster import Cluster

COLUMNS = 80


@command
def settings(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A table (parallel), one of its keys (parallel.zero), or cluster for `stretto.Cluster`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print what a settings file may say: every key, its default, and what it is."""
    known = [*sections(), replace(section_of("cluster", Cluster), text="`stretto.Cluster(...)`")]
    for one in known if name is None else _named(name, known):
        typer.echo("\n".join(_lines(one)))


def _named(name: str, known: list[Section]) -> Iterator[Section]:
    """The sections of a table, or with one of their rows. Raises UsageError for a name that none has."""
    within = [one.name for one in known if f"{name}.".startswith(f"{one.name}.")]
    table = max(within, key=len, default=name.partition(".")[0])
    key = name[len(table) + 1 :]
    tops = {row.key: "" for row in known[0].rows}
    table, key = (table, key) if table not in tops else (tops[table], table)
    chosen = [section for section in known if section.name == table]
    if key:
        kept = (replace(one, rows=tuple(row for row in one.rows if row.key == key)) for one in chosen)
        chosen = [section for section in kept if section.rows]
    if not chosen:
        tables = [one.name for one in known if one.name]
        keys = [".".join(filter(None, (one.name, row.key))) for one in known for row in one.rows]
        near = meant(name, keys if key else [*tables, *keys]).strip()
        hint = near or f"tables are {', '.join(dict.fromkeys(tables))}"
        raise UsageError(f"there is no setting {name!r}; {hint}")
    yield from chosen


def _lines(section: Section) -> Iterator[str]:
    head = f"[{section.name}]" if section.name else "At the top"
    yield f"{head}, kind = {section.kind!r}".replace("'", '"') if section.kind else head
    yield from textwrap.wrap(section.text, COLUMNS)
    yield ""
    for row in section.rows:
        yield f"  {row.key}{_default(row)}"
        yield from textwrap.wrap(row.text, COLUMNS, initial_indent=" " * 6, subsequent_indent=" " * 6)
    yield ""


def _default(row: Row) -> str:
    shown = {None: " (none)", "": " (must be given)"}.get(row.default, f" = {row.default}")
    return ", or ".join([shown, ", ".join(row.others)]) if row.others else shown


# --- examples ------------------------------------------------------------------------------------------


@command
def init(
    name: Annotated[
        str | None, typer.Argument(help="An example; without it, they are listed.", show_default=False)
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Write all of them, and all scripts, into the folder `examples`.")
    ] = False,
) -> None:
    """Write an example's settings file into this folder, to start from; list the examples.

    A file that is there is never written over."""
    root = files("stretto") / "examples"
    known = {Path(one.name).stem: one for one in root.iterdir() if one.name.endswith(".toml")}
    if everything:
        if name is not None:
            raise UsageError(f"{name} or --all: give one of them")
        _write({Path("examples") / path: one.read_bytes() for path, one in _below(root)})
    elif name is None:
        _list(known)
    elif (stem := name.removeprefix("examples/").removesuffix(".toml")) in known:
        text = known[stem].read_text(encoding="utf-8")
        # An example names its files as they are in the folder `examples`; here they are beside it.
        beside = [one for _, one in _below(root) if f"examples/{one.name}" in text and one.name[-3:] == ".py"]
        made = {Path(f"{stem}.toml"): text.replace("examples/", "").encode()}
        _write(made | {Path(one.name): one.read_bytes() for one in beside})
        typer.echo(f"train with: stretto train {stem}.toml")
    else:
        raise UsageError(f"there is no example {name!r}; {meant(stem, known)}`stretto init` lists them")


def _list(known: dict[str, Traversable]) -> None:
    for stem, one in sorted(known.items()):
        comment = " ".join(_comment(one))
        first = re.split(r"[.:,] ", comment, maxsplit=1)[0]
        typer.echo(textwrap.fill(first, COLUMNS, initial_indent=f"{stem:18}", subsequent_indent=" " * 18))
    typer.echo("\n`stretto init NAME` writes one into this folder, `stretto init --all` all into examples/.")


def _comment(settings_file: Traversable) -> Iterator[str]:
    """The lines of the comment that it begins with."""
    for line in settings_file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            return
        yield line.removeprefix("# ")


def _below(folder: Traversable, path: Path = Path()) -> Iterator[tuple[Path, Traversable]]:
    """The files of a folder and of those in it, by their paths."""
    for one in sorted(folder.iterdir(), key=lambda one: one.name):
        if one.is_dir() and one.name != "__pycache__":
            yield from _below(one, path / one.name)
        elif one.is_file():
            yield path / one.name, one


def _write(made: dict[Path, bytes]) -> None:
    """All or none, and none over a file that is there. Raises UsageError, StrettoError."""
    if there := [str(path) for path in made if path.exists()]:
        raise UsageError(f"{', '.join(there)}: there already; nothing was written, take another folder")
    for path, data in made.items():
        with saving(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                file.write(data)
    typer.echo("\n".join(f"wrote {path}" for path in made))
