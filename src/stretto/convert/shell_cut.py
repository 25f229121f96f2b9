"""Shell text cut into commands, and those into words as they are written, with their quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from stretto.errors import UsageError

BLANK = "\ue002"
"""Stands for the backslash of a continued line, and for blanks that do not split a word."""
ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")


@dataclass(frozen=True, slots=True)
class Array:
    """`NAME=( ... )`, its words as they are written."""

    name: str
    append: bool
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """A command as it is written: its words with their quotes, and its line."""

    line: int
    words: tuple[str | Array, ...]


def commands(text: str, one: bool) -> Iterator[Raw]:
    """The text cut into commands, words as they are written."""
    text = text.replace("\r\n", "\n").replace("\\\n", f"{BLANK}\n")
    reader = _Reader(text)
    words: list[str | Array] = []
    begun = 1
    skip_next = False
    heredocs: list[str] = []
    while reader.at < len(text):
        char = text[reader.at]
        if char == BLANK:  # a continued line
            reader.at += 2
        elif char == "\n" or char in ";&|()":
            ends = not (one and char == "\n")
            reader.at += 1
            if char == "\n" and heredocs:
                reader.skip_lines_to(heredocs)
            if char == "&" and text[reader.at : reader.at + 1] == ">":
                continue
            if ends and words:
                yield Raw(begun, tuple(words))
                words = []
            skip_next = skip_next and not ends
        elif char.isspace():
            reader.at += 1
        elif char == "#":
            reader.skip_comment()
        elif char in "<>":
            operator = re.match(r"<<<|<<-?|[<>]&|>>|>\||[<>]", text[reader.at :])
            assert operator is not None
            reader.at += operator.end()
            if operator[0] in ("<<", "<<-"):
                while text[reader.at : reader.at + 1] in (" ", "\t"):
                    reader.at += 1
                heredocs.append(reader.word().strip("'\"\\"))
            else:
                skip_next = True
        else:
            line = reader.line()
            word = reader.array() or reader.word()
            if isinstance(word, str) and word.isdigit() and text[reader.at : reader.at + 1] in ("<", ">"):
                continue
            if skip_next:
                skip_next = False
                continue
            begun = begun if words else line
            words.append(word)
    if words:
        yield Raw(begun, tuple(words))


class _Reader:
    """A place in shell text."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.counted, self.lines = 0, 1

    def line(self) -> int:
        """Of the place, from 1."""
        self.lines += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.lines

    def skip_comment(self) -> None:
        """To the end of the line."""
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def skip_lines_to(self, ends: list[str]) -> None:
        """Past the texts of `<<END`."""
        while ends and self.at < len(self.text):
            end = self.text.find("\n", self.at)
            end = len(self.text) if end < 0 else end
            if self.text[self.at : end].strip() == ends[0]:
                ends.pop(0)
            self.at = min(end + 1, len(self.text))

    def array(self) -> Array | None:
        found = ARRAY.match(self.text, self.at)
        if found is None:
            return None
        line = self.line()
        self.at = found.end()
        items: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            char = self.text[self.at]
            if char.isspace() or char == BLANK:
                self.at += 1
            elif char == "#":
                self.skip_comment()
            else:
                items.append(self.word() or self.take())
        if self.at >= len(self.text):
            raise UsageError(f"line {line}: the bracket of {found[1]}=( is not closed; close it with )")
        self.at += 1
        return Array(found[1], bool(found[2]), tuple(items))

    def take(self) -> str:
        self.at += 1
        return self.text[self.at - 1]

    def word(self) -> str:
        """A word with its quotes, up to a blank or an operator."""
        start = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            if char.isspace() or char in ";&|()<>":
                break
            if char == BLANK:  # the word goes on in the next line
                if self.text[self.at + 2 : self.at + 3].strip() == "":
                    break
                self.at += 2
            elif char == "\\":
                self.at += 2
            elif char in "'\"`":
                self.at = closing(self.text, self.at, char)
            elif self.text.startswith("$(", self.at):
                self.at = closing(self.text, self.at + 1, "(")
            elif self.text.startswith("${", self.at):
                self.at = closing(self.text, self.at + 1, "{")
            else:
                self.at += 1
        return self.text[start : self.at].replace(f"{BLANK}\n", "")


def closing(text: str, at: int, opened: str) -> int:
    """The place after what closes the quote or bracket that is opened at `at`. Raises UsageError."""
    begun, close = at, {"(": ")", "{": "}"}.get(opened, opened)
    at += 1
    while at < len(text):
        char = text[at]
        if char == close:
            return at + 1
        if opened == "'":
            at += 1
        elif char == "\\":
            at += 2
        elif (opened != '"' and char in "'\"`") or (char in "({" and (text[at - 1] == "$" or char == opened)):
            at = closing(text, at, char)
        else:
            at += 1
    line = text.count("\n", 0, begun) + 1
    what = "bracket" if opened in "({" else "quote"
    raise UsageError(f"line {line}: the {what} {opened} is not closed; close it with {close}")
