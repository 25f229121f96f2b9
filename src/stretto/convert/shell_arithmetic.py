"""Whole-number arithmetic of shell text, `$(( 8 * $NODES ))`, without running anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    # As in C: towards 0.
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}
VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)|\b([A-Za-z_]\w*)\b")
WRITTEN = re.compile(r"[0-9\s()+*/%-]+")
LARGEST = 1 << 63
"""Shells compute with 64 bits."""


def whole_number(text: str, variables: Mapping[str, str]) -> int | None:
    """The value of an expression of whole numbers, variables, + - * / % and brackets; None for any other."""

    def named(found: re.Match[str]) -> str:
        value = variables.get(found[1] or found[2] or found[3])
        return f"({value.strip()})" if value is not None and value.strip() else "?"

    written = VARIABLE.sub(named, text).strip()
    if not WRITTEN.fullmatch(written):
        return None
    try:
        value = _value(ast.parse(written, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if abs(value) < LARGEST else None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no whole number")
