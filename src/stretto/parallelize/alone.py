"""The model alone beside the sharded one: its calls must be the same, on tensors of the shapes that it would
have.

A user's code may make numbers of shapes: divide by `x.shape[-1]`, view as so many heads, branch. No rule for
ops can see that such a number counts a part. So the model alone is run first, on tensors without storage:

    1. Each call of a PyTorch function in it is recorded: which, with what numbers, giving what shapes.
    2. The sharded model must make the same calls, in each module and visit of it. Numbers may differ where
       they are sizes and bounds (`view`, `expand`, slices), for the shapes that come of them are compared:
    3. each result's shape in the model alone goes to the op that makes it (`Matched.full`). The proof of
       placements (`stretto.capturing.proof`) must come to it from the rank's shape and what is sharded.

Modules that are sharded by a style are one call each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stretto.parallelize.split_logits import SplitLogits
from stretto.parallelize.styles import COLWISE, ROWWISE, Style
from stretto.parallelize.tensor import TensorParallel
from stretto.parallelize.unseen import HIDDEN, is_now, now

Shape = tuple[int, ...]

SIZES = (
    *("view", "reshape", "_unsafe_view", "expand", "unflatten", "split", "split_with_sizes", "chunk"),
    *("tensor_split", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("broadcast_to", "repeat", "repeat_interleave"),
)
"""Functions whose integers are sizes of what they make: they may be those of a part."""

CONVERSIONS = (
    *("float", "double", "half", "bfloat16", "int", "long", "char", "byte", "bool"),
    *("cpu", "cuda", "type", "type_as", "to"),
)
"""Functions that change the type of elements alone. While a graph is exported, some call another of them."""

NUMBERS = (
    *("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("element_size", "__len__"),
)
"""Functions that give no tensor: what they give is compared where it is used."""

TENSORS = frozenset(["T", "H", "mT", "mH", "data", "grad", "real", "imag"])
"""Attributes that are tensors."""

OPERATORS = ("OpOverload", "OpOverloadPacket")
"""Ops of the dispatcher, which few call themselves: the proof looks at their own shapes."""


@dataclass(frozen=True, slots=True)
class PlainCall:
    """One call; shapes are those of its results."""

    function: str
    numbers: tuple[Any, ...]
    shapes: tuple[Shape, ...]


Key = tuple[str, int, int]
"""(module, how often it was called before, number of the call in it)"""


@dataclass(slots=True)
class Matched:
    """A call of the sharded model. local, unsharded: shapes of its results on a rank, and in the model alone.
    scaled: its bounds count a rank's part. repeated: heads of keys were repeated before, which a rank left
    out."""

    local: tuple[Shape, ...]
    full: tuple[Shape, ...]
    scaled: bool = False
    repeated: bool = False


@dataclass(slots=True)
class _Frame:
    name: str
    visit: int
    calls: int = 0
    repeats: bool = False


class Beside(TorchFunctionMode):
    """Records the calls of a model that runs, or compares them with those of `alone`. leaves: names of
    modules that are one call each. mark: gets the number of the call that runs, then None."""

    def __init__(
        self,
        model: nn.Module,
        leaves: Collection[str],
        size: int,
        alone: Mapping[Key, PlainCall] | None = None,
        mark: Callable[[int | None], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.found: dict[Key, PlainCall] = {}
        self.matched: list[Matched] = []
        self._names = {id(module): name for name, module in reversed(list(model.named_modules()))}
        self._model = model
        self._leaves = {id(m) for n, m in model.named_modules(remove_duplicate=False) if n in leaves}
        self._size = size
        self._alone = alone
        self._mark = mark
        self._frames: list[_Frame] = []
        self._visits: dict[str, int] = {}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """One run of the model and its loss (the exporter makes two; the last counts)."""
        self.found.clear()
        self.matched.clear()
        self._visits.clear()
        self._frames = [_Frame("", -1)]
        with self:
            yield
        if self._alone and not self.matched:
            raise ValueError("the model makes no call of what it makes alone")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While the context lasts, modules show when they are entered and left."""
        handles = []
        open_leaves: list[Any] = []

        def enter(module: nn.Module, _args: Any) -> None:
            if is_now(HIDDEN) or not self._frames:
                return
            if id(module) in self._leaves:
                context = now(HIDDEN)
                context.__enter__()
                self._mark(len(self.matched))
                open_leaves.append((id(module), context))
                return
            name = self._names[id(module)]
            visit = self._visits.get(name, 0)
            self._visits[name] = visit + 1
            self._frames.append(_Frame(name, visit))

        def leave(module: nn.Module, _args: Any, output: Any) -> None:
            if open_leaves and open_leaves[-1][0] == id(module):
                open_leaves.pop()[1].__exit__(None, None, None)
                self._mark(None)
                self._note("module", (), output)
            elif not is_now(HIDDEN) and len(self._frames) > 1:
                self._frames.pop()

        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for _, context in reversed(open_leaves):
                context.__exit__(None, None, None)
            self._frames = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in NUMBERS or is_now(HIDDEN) or not self._frames or func.__class__.__name__ in OPERATORS:
            return func(*args, **given)
        if name == "__get__":
            name = getattr(func.__self__, "__name__", name)
            if name not in TENSORS:
                return func(*args, **given)
        self._mark(len(self.matched))
        try:
            output = func(*args, **given)
        finally:
            self._mark(None)
        if name in CONVERSIONS:
            self._note("to", (), output)
            return output
        # Whether heads share keys says no more than shapes do, and is left out where a rank has one of each.
        named = [value for key, value in given.items() if key != "enable_gqa"]
        self._note(name, tuple(_numbers((args, named))), output)
        return output

    def _note(self, function: str, numbers: tuple[Any, ...], output: Any) -> None:
        shapes = _shapes(output)
        if not shapes and function != "__setitem__":
            return  # a number, which is compared where it is used
        frame = self._frames[-1]
        key = (frame.name, frame.visit, frame.calls)
        if self._alone is None:
            frame.calls += 1
            self.found[key] = PlainCall(function, numbers, shapes)
            self.matched.append(Matched(shapes, shapes))
            return
        full = self._alone.get(key)
        while full is not None and full.function != function and (left_out := self._repeats_left_out(key)):
            frame.calls += left_out
            frame.repeats = True
            key = (frame.name, frame.visit, frame.calls)
            full = self._alone.get(key)
        frame.calls += 1
        where = f"in {frame.name!r}" if frame.name else "in the model or the loss"
        if full is None or full.function != function or len(full.shapes) != len(shapes):
            single = "nothing more" if full is None else f"{full.function!r}"
            raise ValueError(
                f"tp: the code calls {function!r} {where} on a rank's part, where it calls {single} on the "
                "full tensor: it looks at the shape of what is sharded. Leave the modules that it works on "
                "out of tp_plan"
            )
        scaled = self._compare(function, numbers, full.numbers, where)
        self.matched.append(Matched(shapes, full.shapes, scaled, frame.repeats))

    def _repeats_left_out(self, key: Key) -> int:
        """Calls that repeat each head of keys in the model alone, and that a rank with as many heads of keys
        as of queries leaves out: an unsqueeze behind the heads, `expand`, and a view that puts both dims
        together, or `repeat_interleave`."""
        assert self._alone is not None
        name, visit, at = key
        calls = [self._alone.get((name, visit, at + k)) for k in range(3)]
        if calls[0] is not None and calls[0].function == "repeat_interleave":
            return 1
        shapes = [call.shapes[0] for call in calls if call is not None and len(call.shapes) == 1]
        functions = [call.function for call in calls if call is not None]
        if len(shapes) < 3 or functions[0] not in ("__getitem__", "unsqueeze") or functions[1] != "expand":
            return 0
        one, repeated, put = shapes
        changed = [d for d, (a, b) in enumerate(zip(one, repeated, strict=False)) if a != b]
        if len(one) != len(repeated) or len(changed) != 1 or one[changed[0]] != 1 or changed[0] == 0:
            return 0
        dim = changed[0]
        merged = (*repeated[: dim - 1], repeated[dim - 1] * repeated[dim], *repeated[dim + 1 :])
        return 3 if put == merged else 0

    def _compare(self, function: str, here: tuple[Any, ...], alone: tuple[Any, ...], where: str) -> bool:
        """Whether bounds differ as parts do. Raises ValueError for numbers that may not differ."""
        if _same(here, alone) or function in SIZES:
            return False
        if function in ("__getitem__", "narrow", "select") and len(here) == len(alone):
            parts = [(a, b) for a, b in zip(here, alone, strict=True) if not _same((a,), (b,))]
            if all(type(a) is int and type(b) is int and a * self._size == b for a, b in parts):
                return True
        raise ValueError(
            f"tp: {function!r} {where} is called with {_first(here, alone)}, where the model alone calls it "
            f"with {_first(alone, here)}: the number comes from the shape of what is sharded. Give the "
            "module a number of its own, or leave the modules around it out of tp_plan"
        )


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))


def _first(here: tuple[Any, ...], other: tuple[Any, ...]) -> Any:
    return next((a for a, b in zip(here, other, strict=False) if not _same((a,), (b,))), here)


def _numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, (bool, int, float, complex)):
        yield value
    elif isinstance(value, slice):
        yield from _numbers((value.start, value.stop, value.step))
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)


def _shapes(output: Any) -> tuple[Shape, ...]:
    items = output if isinstance(output, (tuple, list)) else (output,)
    kept = (item.kept if isinstance(item, SplitLogits) else item for item in items)
    return tuple(tuple(int(n) for n in item.shape) for item in kept if isinstance(item, Tensor))


def with_gathered_logits(model: nn.Module, how: TensorParallel) -> TensorParallel:
    """The same parts of parameters, with output heads that give unsharded logits."""
    modules = dict(model.named_modules(remove_duplicate=False))
    heads = {
        name: Style("colwise_gather_output")
        for name, style in how.modules.items()
        if style.kind == "vocabulary" and not isinstance(modules[name], nn.Embedding)
    }
    return replace(how, modules={**how.modules, **heads})


def leaves_of(how: TensorParallel) -> frozenset[str]:
    """Names of the modules that are one call each."""
    kinds = (*COLWISE, *ROWWISE, "vocabulary", "experts")
    return frozenset(name for name, style in how.modules.items() if style.kind in kinds)
