"""Values that code makes of constants alone (positions, masks): known while a model is captured.

1. Of each call of a PyTorch function whose tensors are all known, a recipe is kept: the function, its
   arguments, and the recipes of its tensors. Equal recipes have equal numbers.
2. What is written to later, under whatever name, is known no more (its version counter shows it), unless
   the call that writes is itself such a call. Where a name is made that is not counted (UNCOUNTED), and
   where an op of another library writes, nothing is known any more of what was made before.
3. To answer a question, the calls are made again on real tensors. None may draw, or leave elements unset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from stretto.capturing.calls_adapter import (
    NotConstantError,
    of_constants,
    tree_flatten,
    tree_unflatten,
    writes_uncounted,
)

Answer = TypeVar("Answer")

MOST_BYTES = 1 << 30
"""Bytes of the tensors that one question may make, above which there is no answer: all masks of 8,192 tokens
in float32, and of 16,384 as truth values. Assumed: what a machine that plans has to spare."""

PLAIN = (
    *(bool, int, float, complex, str, type(None), type(...), torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Arguments that no one changes afterwards."""

LIKE = frozenset(("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "new_tensor"))
"""Functions that read shape and dtype of their first tensor alone."""

TURNED = frozenset(("T", "mT", "H", "mH"))

UNCOUNTED = frozenset(
    ("data", "set_", "untyped_storage", "storage", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
)
"""Attributes and functions that give elements another name with a version counter of its own, or none: what
is written to that is counted nowhere else."""

_DEVICE = re.compile(r"(cpu|cuda|meta|xpu|mps|npu)(:\d+)?")


@dataclass(frozen=True, slots=True, eq=False)
class KnownRecipe:
    """How a value is made. number: equal recipes have equal ones. function, leaves, form: the call and its
    arguments, flat, with recipes in the places of tensors. at: which of the results it is; None: the first
    argument, which the call writes. writes: whether it writes to its arguments. nbytes: of the value."""

    number: int
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    form: Any
    at: int | None
    writes: bool
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"#{self.number}"


@dataclass(frozen=True, slots=True)
class _Blank:
    shape: tuple[int, ...]
    dtype: torch.dtype


class Known:
    """What is known of the tensors of one trace, whose exporter may run the forward several times."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._tensors: dict[int, tuple[Tensor, int, KnownRecipe]] = {}
        self._kept: dict[int, tuple[Tensor, KnownRecipe | None]] = {}
        self._answers: dict[tuple[int, Any], Any] = {}

    def begin(self, others: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        """Before each run of the forward. others: (a tensor of this run, one of an earlier run that has its
        elements)."""
        substitutes = []
        for new, old in others:
            self._kept.setdefault(id(old), (old, self.recipe(old)))
            substitutes.append((new, self._kept[id(old)][1]))
        self._tensors.clear()
        for new, recipe in substitutes:
            self._is(new, recipe)

    def recipe(self, x: Tensor) -> KnownRecipe | None:
        """How a tensor is made of constants; None where it is not."""
        result = self._tensors.get(id(x))
        return result[2] if result is not None and result[1] == _version(x) else None

    def number(self, x: Tensor) -> int | None:
        """Equal for tensors that equal calls made of constants; None for all others."""
        recipe = self.recipe(x)
        return None if recipe is None else recipe.number

    def same(self, x: Tensor, other: Tensor) -> None:
        """The first tensor has the elements of the other."""
        self._is(x, self.recipe(other))

    def ask(self, x: Tensor, question: Callable[[Tensor], Answer]) -> Answer | None:
        """The answer to a question about a tensor's elements (a function that gets a real tensor, on a
        processor); None where they are not known."""
        recipe = self.recipe(x)
        if recipe is None:
            return None
        key = recipe.number, question
        if key not in self._answers:
            try:
                with of_constants():
                    self._answers[key] = question(_made_again(recipe, {}))
            except Exception:  # of a call that real tensors refuse, nothing is known
                self._answers[key] = None
        answer: Answer | None = self._answers[key]
        return answer

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the call gives; step 1 for it."""
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(function, "__self__", None), "__name__", "")
            if name not in TURNED:
                if name in UNCOUNTED:
                    self._tensors.clear()
                return function(*args, **kwargs)
        elif name in UNCOUNTED or writes_uncounted(function):
            self._tensors.clear()
        leaves, form = tree_flatten((tuple(args), dict(kwargs)))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        frozen = self._frozen(leaves, name in LIKE)
        if frozen is None:
            return function(*args, **kwargs)
        before = [_version(x) for x in given]
        made = function(*args, **kwargs)
        writes = any(_version(x) != version for x, version in zip(given, before, strict=True))
        call = (function, frozen, form)
        if name == "__setitem__" and isinstance(args[0], Tensor):
            self._is(args[0], self._new(call, None, writes, args[0]))
        for at, out in enumerate(made if isinstance(made, (tuple, list)) else (made,)):
            if isinstance(out, Tensor):
                self._is(out, self._new(call, at, writes, out))
        return made

    def _is(self, x: Tensor, recipe: KnownRecipe | None) -> None:
        version = _version(x)
        if recipe is not None and version is not None:
            self._tensors[id(x)] = x, version, recipe
        else:
            self._tensors.pop(id(x), None)

    def _new(
        self, call: tuple[Callable[..., Any], tuple[Any, ...], Any], at: int | None, writes: bool, x: Tensor
    ) -> KnownRecipe:
        number = self._numbers.setdefault((call[0], repr(call[1:]), at), len(self._numbers))
        return KnownRecipe(number, *call, at, writes, x.numel() * x.element_size(), tuple(x.shape), x.dtype)

    def _frozen(self, leaves: Sequence[Any], like: bool) -> tuple[Any, ...] | None:
        frozen: list[Any] = []
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                blank = like and at == 0
                leaf = _Blank(tuple(leaf.shape), leaf.dtype) if blank else self.recipe(leaf)
                if leaf is None:
                    return None
            elif isinstance(leaf, slice):
                if not all(isinstance(n, PLAIN) for n in (leaf.start, leaf.stop, leaf.step)):
                    return None
            elif not isinstance(leaf, PLAIN):
                return None
            frozen.append(leaf)
        return tuple(frozen)


def _version(x: Tensor) -> int | None:
    """How often a tensor's storage was written to; None of a tensor that does not count."""
    try:
        return x._version
    except (RuntimeError, NotImplementedError):
        return None


def _made_again(recipe: KnownRecipe, values: dict[int, Tensor]) -> Tensor:
    """Step 3. values: what has been made, by number. Raises NotConstantError where that makes too much, or
    something else."""
    if recipe.number not in values:
        leaves = [_real(leaf, values, recipe.writes) for leaf in recipe.leaves]
        if recipe.nbytes + sum(value.nbytes for value in values.values()) > MOST_BYTES:
            raise NotConstantError
        args, kwargs = tree_unflatten(leaves, recipe.form)
        made = recipe.function(*args, **kwargs)
        value = args[0] if recipe.at is None else made if isinstance(made, Tensor) else made[recipe.at]
        if tuple(value.shape) != recipe.shape or value.dtype != recipe.dtype or value.device.type != "cpu":
            raise NotConstantError
        values[recipe.number] = value
    return values[recipe.number]


def _real(leaf: Any, values: dict[int, Tensor], copies: bool) -> Any:
    if isinstance(leaf, KnownRecipe):
        known = _made_again(leaf, values)
        return known.clone() if copies else known
    if isinstance(leaf, _Blank):
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return "cpu" if isinstance(leaf, str) and _DEVICE.fullmatch(leaf) else leaf
