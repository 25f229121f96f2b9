"""PyTorch's operators, as a program's ops call them: by name, and what their schemas state of them.

A program's ops compute tensors from their arguments, and nothing else: a plan file may come from anyone. So a
function is an op only if, by its schema,

    1. it writes into none of its arguments;
    2. it returns tensors, and maybe numbers;
    3. it takes tensors, numbers, texts and devices alone, or has defaults for all else;
    4. it takes text only together with tensors, as a mode of their computation. A text alone names something
       outside of the program: a file to read, a record to begin;
    5. no argument of it names a group of processes: what communicates has ops of its own in programs.

Uses private names: the `_schema` of an overload, and `FakeTensorMode` of `torch._subclasses.fake_tensor`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stretto.backend import copies_adapter as copies_adapter  # ops of these are known from here on
from stretto.backend import ctc_adapter as ctc_adapter
from stretto.backend import grouped_adapter as grouped_adapter
from stretto.errors import RunError
from stretto.ir.program import VIEWS, Op

INSTEAD = dict.fromkeys(VIEWS, "aten.reshape.default")
"""What is called instead: a view where strides allow one, else a copy. Some kernels lay out their result in
another way than by their shape functions (measured: softplus_backward of a transposed gradient on CPU,
PyTorch 2.13), so what was a view in the capture may be none when it runs. Measured cost: 0.1 us."""


def resolve(target: str) -> Callable[..., Any]:
    """The function that computes an op of a name such as `aten.mm.default`. Raises RunError for a name that
    is none of this PyTorch's operators, and for an operator that does other things than compute tensors."""
    function = overload(target)
    if function is None:
        raise RunError(
            f"PyTorch {torch.__version__} has no operator {target!r}: load what defines it before the plan, "
            "or capture and plan again with this PyTorch"
        )
    if why := refused(function):
        raise RunError(f"{target!r} is no op of a plan: {why}. Capture and plan again")
    return function


def overload(target: str) -> Callable[..., Any] | None:
    """The dispatcher's function of that name; None where this PyTorch has none."""
    result: Any = torch.ops
    parts = INSTEAD.get(target, target).split(".")
    try:
        for part in parts:
            result = getattr(result, part)
    except (AttributeError, RuntimeError, ImportError):
        result = None
    # An overload knows its operator; nothing else that can be reached from `torch.ops` does.
    if len(parts) != 3 or getattr(result, "overloadpacket", None) is None or not callable(result):
        return None
    function: Callable[..., Any] = result
    return function


@contextmanager
def no_elements() -> Iterator[None]:
    """While the context lasts, ops compute shapes and dtypes as kernels of the tensors' device give them.

    No kernel runs: an op without a rule of its own raises an error that names it. PyTorch writes no log of
    what is raised: anyone who calls an op that may not fit says so.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_fallback_kernels=False):
            yield
    finally:
        log.disabled = before


def op_key(name: str) -> int:
    """A number for an op by its name, equal in every process and for every schedule."""
    return zlib.crc32(name.encode())


NUMBERS = ("int", "float", "bool", "number")
DATA = (*NUMBERS, "complex", "str", "Tensor", "Device")
"""Types of arguments that a plan can name, besides lists of them, and none. Dtypes and layouts are "int"."""

GROUP = "group_name"


def refused(function: Any) -> str:
    """Why the function may be no op of a program, in words; "" where it may."""
    schema = function._schema
    kinds = {argument.name: _kind(str(argument.type)) for argument in schema.arguments}
    needed = [argument.name for argument in schema.arguments if not argument.has_default_value()]
    built = [str(result.type) for result in schema.returns]
    texts = [name for name, kind in kinds.items() if kind == "str"]
    if schema.is_mutable:
        return "it writes into its arguments"
    if not any("Tensor" in kind for kind in built):
        return "it makes no tensor"
    if not all(kind in NUMBERS or "Tensor" in kind for kind in built):
        return "it makes something that is no tensor"
    if GROUP in kinds:
        return "it communicates in a way of its own"
    if other := next((name for name in needed if kinds[name] not in DATA), ""):
        return f"its {other!r} is neither tensor, number, text nor device"
    if texts and "Tensor" not in kinds.values():
        return f"its {texts[0]!r} is a text that names something outside of the program"
    return ""


def _kind(text: str) -> str:
    """The type of what a type's text is optional, or a list, of."""
    return text.replace("Optional[", "").replace("List[", "").rstrip("]")


def draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op draws at random; one that may drop some draws where the chance of it is not 0."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    for at, argument in enumerate(function._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value))
    return True


def returns_view(function: Any) -> bool:
    """Whether the function's results share storage with its first argument."""
    if function is torch.ops.aten._unsafe_view.default:
        return True
    returns = function._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def named(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, those left out at their defaults, and lists as tuples."""
    taken = function._schema.arguments
    result = {argument.name: argument.default_value for argument in taken if argument.has_default_value()}
    result.update((argument.name, value) for argument, value in zip(taken, args))
    result.update(kwargs)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in result.items()}


def arguments_of(op: Op) -> dict[str, Any]:
    """Those of a program's op by name; none of a function that this PyTorch does not have."""
    function = overload(op.target)
    return {} if function is None else named(function, op.args, dict(op.kwargs))


def positional(function: Any, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of arguments by name those that the function takes: by position, and by keyword where it wants that."""
    taken = function._schema.arguments
    args = tuple(given[argument.name] for argument in taken if not argument.kwarg_only)
    return args, {a.name: given[a.name] for a in taken if a.kwarg_only and given.get(a.name) is not None}


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(N, K) and (K, M) to (N, M), or (B, N, K) and (B, K, M) to (B, N, M)."""
    return torch.mm(left, right) if left.dim() == 2 else torch.bmm(left, right)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`total`, to which the product is added: BLAS reads and writes it once, and there is no other tensor."""
    added = torch.addmm if left.dim() == 2 else torch.baddbmm
    return added(total, left, right, out=total)
