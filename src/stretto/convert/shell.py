"""Shell text as the commands that it would run, as far as that can be said without running anything.

Read are words, quotes, comments, continued lines, variables and arrays that the text sets, defaults
(`${N:-8}`), whole-number arithmetic, `eval` and `bash -c`. What follows `if`, `for`, `while` and `case` may
or may not run: its commands are listed and its assignments are not made. What a function contains is read
where it is written. What cannot be known (a variable that is set nowhere, the output of a command) stays in
its word, marked, and `unresolved` names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from stretto.convert.shell_arithmetic import whole_number
from stretto.convert.shell_cut import BLANK, Array, closing, commands
from stretto.errors import UsageError

OPEN, CLOSE = "\ue000", "\ue001"
"""Around what is not resolved; its blanks are `BLANK`, so that splitting into words keeps it whole."""

MOST_WITHIN = 8
MOST_CHARACTERS = 1_000_000
"""Of a variable: far above any command line that a system would start (128 KiB a word on Linux)."""

BEGIN = {"if", "while", "until", "for", "case", "select"}
END = {"fi", "done", "esac"}
BETWEEN = {"then", "else", "elif", "do", "!", "{", "}", "time"}
DECLARE = {"export", "declare", "local", "readonly", "typeset"}

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
MARKED = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")


@dataclass(frozen=True, slots=True)
class Call:
    """A command as it would run. sometimes: it is in an `if` or a loop."""

    line: int
    words: tuple[str, ...]
    sometimes: bool


@dataclass(slots=True)
class Shell:
    """variables: by name, a text or the words of an array. fixed: those that the text does not change. maybe:
    of those that an `if` or a loop sets, the line. used: all that were asked for."""

    variables: dict[str, str | list[str]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    maybe: dict[str, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


def unresolved(word: str) -> list[str]:
    """What is not known in a word, as it is written."""
    return [found.replace(BLANK, " ") for found in MARKED.findall(word)]


def shown(word: str) -> str:
    """A word for people, what is not known as it is written."""
    return word.replace(OPEN, "").replace(CLOSE, "").replace(BLANK, " ")


def run(text: str, shell: Shell, *, one: bool = False, within: int = 0) -> list[Call]:
    """The commands of a text, in order; `shell` keeps the variables. one: line ends are blanks, as in a list
    of arguments. within: how many texts of `eval` it is in. Raises UsageError for a quote or bracket that is
    not closed, and for what grows without end."""
    if within > MOST_WITHIN:
        raise UsageError(f"eval within eval, {within} times: write the command itself")
    calls: list[Call] = []
    depth = 0
    for raw in commands(text, one):
        words = list(raw.words)
        while words and isinstance(words[0], str) and words[0] in BEGIN | END | BETWEEN:
            depth += (words[0] in BEGIN) - (words[0] in END)
            words.pop(0)
        depth = max(depth, 0)
        if words and words[0] in DECLARE:
            words = [word for word in words[1:] if isinstance(word, Array) or not word.startswith("-")]
        while words and (isinstance(words[0], Array) or ASSIGNED.match(words[0])):
            _assign(words.pop(0), shell, raw.line if depth else None)
        found = [one for word in words if isinstance(word, str) for one in expand(word, shell)]
        inner = _inner(found)
        if inner is not None:
            calls += [
                Call(raw.line, c.words, c.sometimes or depth > 0)
                for c in run(inner, shell, within=within + 1)
            ]
        elif found:
            calls.append(Call(raw.line, tuple(found), depth > 0))
    return calls


def _inner(words: list[str]) -> str | None:
    """The text that `eval` or `bash -c` would read anew."""
    if words and words[0] == "eval":
        return " ".join(words[1:])
    for at in range(len(words) - 2):
        if words[at].rpartition("/")[2] in ("bash", "sh") and words[at + 1] in ("-c", "-lc"):
            return words[at + 2]
    return None


def _assign(word: str | Array, shell: Shell, maybe: int | None) -> None:
    if isinstance(word, Array):
        name, append = word.name, word.append
        value: str | list[str] = [one for item in word.items for one in expand(item, shell)]
    else:
        found = ASSIGNED.match(word)
        assert found is not None
        name, append = found[1], bool(found[2])
        value = expand_whole(found[3], shell)
    if name in shell.fixed:
        return
    if maybe is not None:
        shell.maybe.setdefault(name, maybe)
        return
    before = shell.variables.get(name)
    if append and before is not None:
        if isinstance(before, list):
            value = before + (value if isinstance(value, list) else [value])
        else:
            value = before + (value if isinstance(value, str) else " ".join(value))
    if sum(map(len, value)) > MOST_CHARACTERS:
        raise UsageError(f"the value of {name} has more than {MOST_CHARACTERS} characters")
    shell.variables[name] = value


def expand_whole(raw: str, shell: Shell) -> str:
    """As the value of an assignment, which is not split."""
    return "".join(text for text, _ in _pieces(raw, shell, quoted=False))


def expand(raw: str, shell: Shell) -> list[str]:
    """The words that one written word becomes: none, one or more."""
    words: list[str] = []
    current: str | None = None
    for text, how in _pieces(raw, shell, quoted=False):
        if how == "end":  # between the words of an array
            if current is not None:
                words.append(current)
            current = None
        elif how == "whole":
            current = (current or "") + text
        else:
            parts = text.split()
            if text[:1].isspace() and current is not None:
                words.append(current)
                current = None
            for number, part in enumerate(parts):
                if number:
                    words.append(current or "")
                    current = None
                current = (current or "") + part
            if text[-1:].isspace() and current is not None:
                words.append(current)
                current = None
    return words if current is None else [*words, current]


def _pieces(raw: str, shell: Shell, quoted: bool) -> Iterator[tuple[str, str]]:
    """Texts, and how each is taken: "whole", "split" into words, or "end" of a word."""
    at = 0
    while at < len(raw):
        char = raw[at]
        if char == "\\" and at + 1 < len(raw):
            kept = "\\" if quoted and raw[at + 1] not in '$`"\\' else ""
            yield kept + raw[at + 1], "whole"
            at += 2
        elif char == "'" and not quoted:
            end = closing(raw, at, "'")
            yield raw[at + 1 : end - 1], "whole"
            at = end
        elif char == '"' and not quoted:
            end = closing(raw, at, '"')
            inside = list(_pieces(raw[at + 1 : end - 1], shell, quoted=True))
            if inside or end == at + 2:
                yield "", "whole"
            yield from inside
            at = end
        elif char == "`":
            end = closing(raw, at, "`")
            yield _mark(raw[at:end]), "whole"
            at = end
        elif not quoted and raw.startswith('$"', at):  # a text that may be translated
            at += 1
        elif not quoted and raw.startswith("$'", at):  # with escapes as in C
            end = closing(raw, at + 1, "'")
            yield (_mark(raw[at:end]) if "\\" in raw[at:end] else raw[at + 2 : end - 1]), "whole"
            at = end
        elif char == "$" and (found := _dollar(raw, at)) is not None:
            name, end = found
            yield from _value(raw[at:end], name, shell, quoted)
            at = end
        else:
            yield char, "split" if char.isspace() and not quoted else "whole"
            at += 1


def _dollar(raw: str, at: int) -> tuple[str, int] | None:
    """(what stands in or after the $, the place after it); None for a $ that is only itself."""
    follows = raw[at + 1 : at + 2]
    if follows in ("{", "(") and follows:
        end = closing(raw, at + 1, follows)
        return raw[at + 1 : end], end
    if name := NAME.match(raw, at + 1):
        return "{" + name[0] + "}", name.end()
    if follows and follows in "0123456789@*#?$!":
        return "{" + follows + "}", at + 2
    return None


def _value(written: str, what: str, shell: Shell, quoted: bool) -> Iterator[tuple[str, str]]:
    how = "whole" if quoted else "split"
    if what.startswith("(("):
        number = whole_number(what[2:-2], {name: _as_text(v) for name, v in shell.variables.items()})
        shell.used |= set(NAME.findall(what))
        yield (_mark(written) if number is None else str(number)), how
        return
    form = re.fullmatch(r"(\w+|[@*])(\[[@*\w]+\])?(?:(:?[-=+])(.*))?", what[1:-1], re.DOTALL)
    if what.startswith("(") or form is None:
        yield _mark(written), "whole"
        return
    name, index, operator, other = form.groups()
    shell.used.add(name)
    if name in ("@", "*"):  # a script's own arguments: none are given
        return
    value: str | list[str] | None = shell.variables.get(name)
    if isinstance(value, list) and index not in ("[@]", "[*]"):
        number = int(index[1:-1]) if index and index[1:-1].isdigit() else 0
        value = value[number] if number < len(value) else None
    empty = value is None or (operator is not None and operator[0] == ":" and not value)
    if operator is not None and empty != (operator[-1] == "+"):
        if operator[-1] == "=":
            shell.variables.setdefault(name, expand_whole(other, shell))
        yield from _pieces(other, shell, quoted)
    elif operator is not None and empty:  # ${X:+other}
        return
    elif value is None:
        yield _mark(written), "whole"
    elif isinstance(value, list) and index == "[*]" and quoted:
        yield " ".join(value), "whole"
    elif isinstance(value, list):
        for number, one in enumerate(value):
            if number:
                yield "", "end"
            yield one, how
    else:
        yield value, how


def _mark(written: str) -> str:
    inside = re.sub(r"\s", BLANK, shown(written))
    return f"{OPEN}{inside}{CLOSE}"


def _as_text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value[:1])
