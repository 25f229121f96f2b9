"""One damage of a file, drawn at random: as a disk does it, as an editor, as one who means harm."""

from __future__ import annotations

import json
import random
import re

NUMBERS = (
    *(0, -1, 1, 3, 10**6, 10**9, 2**31, 2**63 - 1, 2**63, 10**30, "1" + "0" * 5000, 1e308, -1e-300, 0.5),
    *("NaN", "Infinity", "-Infinity", "1e999", "0x10", "007"),
)
TEXTS = (
    *("", ".", "..", "../../../etc/passwd", "/etc/passwd", "a/../../b", "~/x", "nul\\u0000l", "\\ud800"),
    *("__import__('os').system('touch ran')", "cos\nsystem\n", "${HOME}", "%s%n", "é" * 300, "x" * 70_000),
    *("aten.from_file.default", "torch.load", "file:///etc/passwd", "-1", "inf", "nan", "²", "ﬁ"),
)
OTHERS = ("null", "true", "[]", "{}", "[" * 50_000, "[" * 20 + "]" * 20, '{"a":1,"a":2}')


def _value(draw: random.Random) -> str:
    """The text of a value that is not expected."""
    kind = draw.randrange(3)
    if kind == 0:
        return str(draw.choice(NUMBERS))
    if kind == 1:
        return json.dumps(draw.choice(TEXTS)) if draw.random() < 0.8 else '"' + draw.choice(TEXTS) + '"'
    return draw.choice(OTHERS)


def _bytes(draw: random.Random, data: bytes) -> bytes:
    """As a disk, a cable or an editor damages any file."""
    content, how = bytearray(data), draw.randrange(8)
    at = draw.randrange(len(content) or 1)
    length = min(draw.choice((1, 7, 300)), len(content) - at)
    if how == 0 and content:
        content[at] ^= 1 << draw.randrange(8)
    elif how == 1:
        del content[at:]
    elif how == 2:
        del content[at : at + length]
    elif how == 3:
        content[at:at] = content[at : at + length] * draw.choice((1, 2, 50))
    elif how == 4:
        content[at : at + length] = draw.randbytes(length)
    elif how == 5:
        content[at:at] = draw.choice(
            (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\x1b[2J", b"\xed\xa0\x80")
        )
    elif how == 6:
        content[at : at + length] = bytes(length)
    else:
        content = bytearray(draw.choice((b"", b"\n", bytes(4096), b"PK\x03\x04", b"\x80\x05.")))
    return bytes(content)


_WORD = re.compile(rb'-?\b\d[\d.e+-]*|"[^"\n]*"|\b(?:true|false|null)\b')
_LINE = re.compile(rb"[^\n]*\n")


def _text(draw: random.Random, data: bytes) -> bytes:
    """As one who edits damages a text: a value or a key is another, a line is gone, twice, or elsewhere."""
    if draw.random() < 0.25:
        lines = _LINE.findall(data) or [data]
        line, at = draw.choice(lines), draw.randrange(len(lines))
        return b"".join([*lines[:at], *[line] * draw.choice((0, 1, 1, 3)), *lines[at + 1 :]])
    words = list(_WORD.finditer(data))
    if not words:
        return _bytes(draw, data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        one = draw.choice(words)
        put = draw.choice(words)[0] if draw.random() < 0.4 else _value(draw).encode("utf-8", "surrogatepass")
        data = data[: one.start()] + put + data[one.end() :]
        words = list(_WORD.finditer(data)) or words[:0]
        if not words:
            break
    return data


_CELLS = (
    "0F0",
    "99F0",
    "0F999999999",
    "123456789012345678F1",
    "-1F0",
    "(0F0;0F0)OVERLAP_F_B",
    "0B0",
    "1W7",
    "²F0",
)


def _cells(draw: random.Random, data: bytes) -> bytes:
    rows = [row.split(b",") for row in data.splitlines()]
    row = draw.choice(rows)
    row[draw.randrange(len(row))] = draw.choice(_CELLS).encode()
    return b"\n".join(b",".join(row) for row in rows)


def damaged(draw: random.Random, name: str, data: bytes) -> bytes:
    """One damage of a file."""
    if name.endswith(".csv") and draw.random() < 0.5:
        return _cells(draw, data)
    text = name.endswith((".json", ".toml", ".csv", ".txt", ".jsonl", "latest"))
    return _text(draw, data) if text and draw.random() < 0.7 else _bytes(draw, data)
