"""Modules around those that a plan names, as adapters are: which parameters in them a style is about.

A plan speaks of the model as it was written. A wrapper has the place and the name of what it wraps:

    the matrix   a wrapper's largest one. There may be a copy of it that trains beside it.
    the others   what has as many output features (of a colwise matrix) or input features (of a rowwise one)
                 is sharded alike: of a low-rank adapter B and its magnitudes, or A

Sizes say so, and no names. What is not found stays replicated: a step is slower then, and the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from stretto.errors import meant


def named_by(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a plan's pattern matches."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return list(filter(expression.fullmatch, names))


def no_module(pattern: str, names: Iterable[str]) -> str:
    """What to say of a pattern that no module or parameter has: the nearest that some have."""
    patterns = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name): None for name in names if name}
    return f"the model has no module of that name{meant(pattern, patterns, '; {}')}"


def own_plan(
    model: nn.Module, key: str, built_in: Callable[[nn.Module], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The plan of the model, pattern of its names -> style: the attribute `key` of it, or of the first module
    in it whose plan names a module there is (a wrapper lends out what is of names within); or the one that is
    built in. Empty without one."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found: list[Mapping[str, Any]] = []
    for name, module in model.named_modules():
        own = getattr(module, key, None) or built_in(module)
        if own:
            found.append({f"{name}.{pattern}" if name else pattern: style for pattern, style in own.items()})
            if any(named_by(pattern, names) for pattern in found[-1]):
                return found[-1]
    return found[0] if found else {}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A module's matrix: its features, and whether an embedding has it."""

    inputs: int
    outputs: int
    is_embedding: bool


def matrix_of(module: nn.Module) -> Matrix | None:
    """The one that a style of the module is about; None where there is none, or several could be meant."""
    found = [(p, sides) for _, p, sides in _parameters(module) if p.dim() == 2]
    if not found:
        return None
    largest = max(p.numel() for p, _ in found)
    these = [(p, sides) for p, sides in found if p.numel() == largest]
    is_one = len({(p.shape, sides) for p, sides in these}) == 1
    if not is_one or len({p.requires_grad for p, _ in these}) < len(these):
        return None
    matrix, (outputs, inputs) = these[0]
    owners = (m for m in module.modules() if any(p is matrix for p in m.parameters()))
    embeds = any(isinstance(m, nn.Embedding) for m in owners)
    return Matrix(matrix.shape[inputs], matrix.shape[outputs], embeds)


def along(module: nn.Module, count: int, *, of_inputs: bool) -> Iterator[tuple[str, int]]:
    """(name of a parameter in a module, its dim of these features); `count` of them."""
    for name, parameter, sides in _parameters(module):
        dim = sides[1 if of_inputs else 0] if parameter.dim() > 1 else 0
        fits = parameter.dim() == 2 or (parameter.dim() == 1 and not of_inputs)
        if fits and parameter.shape[dim] == count:
            yield name, dim


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, tuple[int, int]]]:
    """(name, parameter, its dims of output and input features)."""
    kept_transposed: set[str] = set()  # (in, out): embeddings, and the Conv1D of `transformers`
    for name, one in module.named_modules():
        if isinstance(one, nn.Embedding) or type(one).__name__.endswith("Conv1D"):
            kept_transposed.add(f"{name}." if name else "")
    for name, parameter in module.named_parameters():
        transposed = any(name.startswith(prefix) for prefix in kept_transposed)
        yield name, parameter, ((1, 0) if transposed else (0, 1))
