"""docs/commands.md: every command and what it takes, from the command line's own help.

python -m tests.commands_page    # writes the page again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from stretto.cli.main import COMMANDS, app

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"

HEAD = """# Commands

Every command, and what it takes; `stretto COMMAND --help` says the same. `stretto --install-completion`
lets bash, zsh, fish or PowerShell complete commands and options (`--show-completion` prints the script).

A command ends with status 0, or says in one message on standard error what is wrong, where, and what to do:

| status | what it means |
| --- | --- |
| 1 | the work failed or was refused: a faulty plan, a lost rank, a full disk, a step that differs |
| 2 | a setting, an argument or an input file is wrong; nothing was begun |
| 130, 143, 129 | Ctrl-C, SIGTERM, a terminal that goes: what was measured, found or saved by then is kept |

`stretto lab run` ends with its hosts' own status ([the lab](lab.md)).
"""


def page() -> str:
    """The page as it should be."""
    root: Any = typer.main.get_command(app)
    parts = [HEAD]
    for name in COMMANDS:
        for title, command in _leaves(name, root.get_command(None, name)):
            parts.append(_section(title, command))
    return "\n".join(parts)


def _leaves(title: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The command, or those of a group."""
    inside: Mapping[str, Any] = getattr(command, "commands", {})
    if not inside:
        yield title, command
    for name, one in inside.items():
        yield from _leaves(f"{title} {name}", one)


def _section(title: str, command: Any) -> str:
    taken = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    arguments = [p for p in taken if p.param_type_name == "argument"]
    options = [p for p in taken if p.param_type_name == "option"]
    call = " ".join([f"stretto {title}", *map(_argument, arguments)])
    lines = [f"## `{call}`", "", " ".join((command.help or "").split()), ""]
    if taken:
        lines += ["| takes | default | what it is |", "| --- | --- | --- |"]
    for one in arguments:
        lines.append(f"| `{_argument(one)}` | {_default(one)} | {_words(one.help)} |")
    for one in options:
        names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
        lines.append(f"| {names} | {_default(one)} | {_words(one.help)} |")
    return "\n".join([*lines, ""] if taken else lines)


def _argument(one: Any) -> str:
    name = one.metavar or one.name.upper()
    return (
        f"{name}{'...' if one.nargs != 1 else ''}"
        if one.required
        else f"[{name}{'...' if one.nargs != 1 else ''}]"
    )


def _default(one: Any) -> str:
    if one.required:
        return "-"
    value = one.default
    if value is None or value in ([], ()):
        return "none"
    return f"`{value}`" if not isinstance(value, bool) else "on" if value else "off"


def _words(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
