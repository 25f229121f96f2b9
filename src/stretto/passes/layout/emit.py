"""One rank's ops as they come to be, each with what it makes.

What an op makes of local operands is asked of PyTorch once for equal calls, with tensors on "meta".

Collectives of layouts work along any dim, so that another axis may shard the others; `lower` makes of them
the program's own, at the end:

    layout.gather(x, dim, blocks, axis, size)     the full value, of slices
    layout.scatter(x, dim, blocks, axis, size)    a slice of the sum
    layout.slice(x, dim, blocks, axis, size)      a slice of what all have
    layout.reduce(x, "sum" | "max", axis, size)
    layout.exchange(x, before, after, axis, size) a slice along dim `after`, of one along dim `before`

Attention that ranks or chunks share is one op until `context_steps`: "layout." before the kernel's target,
of what a rank has, with the keyword `over`: (axis, size, kind, whether in two halves, rows of chunks).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from stretto.backend.dispatch_adapter import overload, returns_view
from stretto.backend.specs import decoded, empty_of, spec_of
from stretto.ir.collectives import BY_TARGET
from stretto.ir.program import CHUNK, GETITEM, INDEX, VIEW, VIEWS, WAIT, Arg, Const, Op, Ref, TensorSpec
from stretto.passes.layout.kernels import KERNELS, SHARED_OP, arguments, call, kernel_of
from stretto.passes.layout.placement import REPLICATED, AxisPlacement, in_one, local_shape
from stretto.passes.layout.program import Origin
from stretto.passes.rewrite import spec_with, strides_of

GATHER, SCATTER, SLICE, REDUCE, EXCHANGE = LAYOUT_OPS = (
    *("layout.gather", "layout.scatter", "layout.slice", "layout.reduce", "layout.exchange"),
)
AS_IT_COMES = "as_it_comes"
"""The keyword of a gather or scatter whose rows may be in the order in which ranks have them."""
CONTIGUOUS = {"memory_format": Const("memory_format", "contiguous_format")}

Outputs = tuple[TensorSpec | None, ...]

MOST_CALLS = 20_000
"""Different calls whose results are kept. Assumed: some models' worth."""

_known: dict[str, Outputs] = {}


class MisfitError(Exception):
    """The op cannot be called so, or makes another shape than its placement says."""


class Emitter:
    """axis, size: of the ranks. given: specs of what no op makes. origin, module: of the next ops."""

    def __init__(
        self,
        axis: str,
        size: int,
        given: Mapping[str, TensorSpec],
        names: Collection[str] = (),
        mirrored: bool = False,
    ) -> None:
        """names: of ops that are to come. mirrored: of two blocks, ranks have slices of the second in reverse
        order."""
        self.axis, self.size, self.mirrored = axis, size, mirrored
        self.ops: list[tuple[Op, Origin]] = []
        self.specs: dict[str, TensorSpec] = dict(given)
        self.outputs: dict[str, Outputs] = {}
        self.made: dict[str, Op] = {}
        self.origin, self.module = Origin(None, False), ""
        self._alike: Counter[str] = Counter()
        self._names = {*given, *names}
        self._several_views: set[str] = set()

    def fresh(self, like: str) -> str:
        """A name that no value has yet; a slash is for what no op makes."""
        name = like = like.replace("/", "_")
        while name in self._names:
            self._alike[like] += 1
            name = f"{like}_{self._alike[like]}"
        return name

    def emit(
        self,
        target: str,
        *args: Arg,
        name: str,
        kwargs: Mapping[str, Arg] | None = None,
        flops: int = 0,
        random: bool = False,
        like: Outputs = (),
    ) -> str:
        """Append an op; returns its name, which begins with `name`. like: results at full shapes, of which a
        device may make some empty. Raises MisfitError."""
        given = tuple((kwargs or {}).items())
        outputs = self._made(target, args, given)
        if len(like) == len(outputs) > 1:
            pairs = zip(outputs, like, strict=True)
            outputs = tuple(None if full is None else own if full.numel else full for own, full in pairs)
        name = self.fresh(name)
        is_view = _is_view(target) or (target == GETITEM and args[0].name in self._several_views)
        alias = args[0].name if is_view else None
        if is_view:  # of a list even where it has one item
            self._several_views.add(name)
        op = Op(name, target, args, given, outputs, alias, random, flops, self.module)
        self._names.add(name)
        self.made[name] = op
        self.ops.append((op, self.origin))
        self.outputs[name] = outputs
        if len(outputs) == 1 and outputs[0] is not None:
            self.specs[name] = outputs[0]
        return name

    def keep(self, op: Op, origin: Origin) -> None:
        """Append an op as it is."""
        self.made[op.name] = op
        self._names.add(op.name)
        self.ops.append((op, origin))
        self.outputs[op.name] = op.outputs
        if len(op.outputs) == 1 and op.outputs[0] is not None:
            self.specs[op.name] = op.outputs[0]

    def again(self, op: Op, origin: Origin) -> str:
        """Append an op of a program, which makes what PyTorch says now."""
        self.keep(replace(op, outputs=self._made(op.target, op.args, op.kwargs)), origin)
        return op.name

    def _made(self, target: str, args: Sequence[Arg], kwargs: Sequence[tuple[str, Arg]]) -> Outputs:
        if target == GETITEM:
            return (self.outputs[args[0].name][args[1]],)
        if target == INDEX:
            return (TensorSpec((), "int64"),)
        if target == WAIT:
            return (self.specs[args[0].name],)
        if target in LAYOUT_OPS or target in BY_TARGET or target == CHUNK:
            return (_communicated(target, self.specs[args[0].name], args),)
        if target.startswith(SHARED_OP):
            made = self._attended(Op("", target, tuple(args), tuple(kwargs), ()))
            return made if "_backward" in target else (made[0], lse_of(made), *made[2:])
        key = f"{target}{self._text(tuple(args))}{self._text(tuple(kwargs))}"
        if key not in _known:
            if len(_known) >= MOST_CALLS:
                _known.clear()
            _known[key] = self._called(target, args, kwargs)
        return _known[key]

    def _attended(self, op: Op) -> Outputs:
        """Without a mask, which is of all keys, where a rank has its own. Each chunk calls the kernel: what
        they were joined to counts as being in memory as they are."""
        given = arguments(op) | {KERNELS[kernel_of(op)].mask: None}
        for what, arg in given.items():
            joined = (
                self.made.get(arg.name) if isinstance(arg, Ref) and what not in ("key", "value") else None
            )
            if joined is not None and joined.target == "aten.cat.default":
                spec, strides = self.specs[joined.name], strides_of(self.specs[joined.args[0][0].name])
                order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
                dense = [
                    math.prod(spec.shape[k] for k in order[order.index(dim) + 1 :]) for dim in sorted(order)
                ]
                given[what] = Ref(f"{joined.name} of chunks")
                self.specs[given[what].name] = spec_with(spec.shape, spec.dtype, dense)
        kernel = op.target.removeprefix("layout.")
        args, kwargs = call(kernel, given)
        return self._made(kernel, args, tuple(kwargs.items()))

    def _text(self, arg: Arg) -> str:
        if isinstance(arg, Ref):
            return str(self.specs[arg.name])
        return f"({', '.join(map(self._text, arg))})" if isinstance(arg, tuple) else repr(arg)

    def _called(self, target: str, args: Sequence[Arg], kwargs: Sequence[tuple[str, Arg]]) -> Outputs:
        given = [decoded(arg, self._empty, "meta") for arg in args]
        named = {key: decoded(arg, self._empty, "meta") for key, arg in kwargs}
        function: Any = torch.Tensor.view if target in VIEWS else overload(target)
        try:
            with torch.no_grad():
                made = function(*given, **named)
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            raise MisfitError(f"{target}: {error}") from error
        several = made if isinstance(made, (tuple, list)) else (made,)
        return tuple(spec_of(one) if isinstance(one, torch.Tensor) else None for one in several)

    def _empty(self, name: str) -> torch.Tensor:
        return empty_of(self.specs[name], "meta")

    # --- what changes a placement ---------------------------------------------------------------------------

    def view(self, x: str, shape: Sequence[int], name: str = "") -> str:
        """The value in another shape; a copy of it where it is not contiguous."""
        if self.specs[x].shape == tuple(shape):
            return x
        return self.emit(VIEW, Ref(self.contiguous(x)), tuple(shape), name=name or f"{x}_viewed")

    def contiguous(self, x: str) -> str:
        if self.specs[x].stride is None:
            return x
        return self.emit("aten.clone.default", Ref(x), name=f"{x}_copy", kwargs=CONTIGUOUS)

    def viewable(self, x: str, shape: Sequence[int]) -> bool:
        """Whether a view can give the value that shape."""
        try:
            self._made(VIEW, (Ref(x), tuple(shape)), ())
        except MisfitError:
            return False
        return True

    def converted(self, x: str, before: AxisPlacement, after: AxisPlacement, shape: Sequence[int]) -> str:
        """The value with another placement. shape: of the full value."""
        axis = (self.axis, self.size)
        if before.within is not None:
            at, merged = in_one(before, shape)
            x = self.view(x, local_shape(at, merged, self.size))
            return self.view(self.converted(x, at, REPLICATED, merged), shape)
        if after.within is not None:
            at, merged = in_one(after, shape)
            x = self.view(x, local_shape(before, merged, self.size))
            return self.view(self.converted(x, before, at, merged), local_shape(after, shape, self.size))
        match before.kind, after.kind:
            case "partial", "replicated":
                return self.emit(REDUCE, Ref(x), before.reduction, *axis, name=f"{x}_sum")
            case "partial", "sharded":
                return self.emit(
                    SCATTER,
                    Ref(self._turned(x, after)),
                    after.dim,
                    after.blocks,
                    *axis,
                    name=f"{x}_scattered",
                )
            case "sharded", "replicated":
                full = self.emit(GATHER, Ref(x), before.dim, before.blocks, *axis, name=f"{x}_gathered")
                return self._turned(full, before)
            case "replicated", "sharded":
                turned = Ref(self._turned(x, after))
                return self.emit(SLICE, turned, after.dim, after.blocks, *axis, name=f"{x}_part")
            case "sharded", "sharded":
                full = self.converted(x, before, REPLICATED, shape)
                return self.converted(full, REPLICATED, after, shape)
        raise AssertionError(f"{before} -> {after}")

    def _turned(self, x: str, at: AxisPlacement) -> str:
        """The full value with slices of each second block in reverse order, or back."""
        if not self.mirrored or at.blocks % 2:
            return x
        shape, dim = self.specs[x].shape, at.dim
        ranks = self.size
        each = shape[dim] // at.blocks // ranks
        x = self.view(x, (*shape[:dim], at.blocks // 2, 2, ranks, each, *shape[dim + 1 :]), f"{x}_blocks")
        first, second = (self.emit("aten.select.int", Ref(x), dim + 1, k, name=f"{x}_{k}") for k in range(2))
        second = self.emit("aten.flip.default", Ref(second), (dim + 1,), name=f"{x}_back")
        both = self.emit("aten.stack.default", (Ref(first), Ref(second)), dim + 1, name=f"{x}_turned")
        return self.view(both, shape)

    def cost_bytes(self, before: AxisPlacement, after: AxisPlacement, nbytes: int) -> float:
        """Bytes that a rank sends for it. A copy counts a little; what cannot be done counts without end."""
        if before == after:
            return 0.0
        if any(at.copies > 1 and at.within is None for at in (before, after)):
            return math.inf  # ranks that share a slice have no collective of their own
        if before.within is not None and after.is_sharded:
            return math.inf
        if before.is_sharded and after.within is not None:
            return math.inf
        ring = nbytes * (self.size - 1) / self.size
        match before.kind, after.kind:
            case "partial", "replicated":
                return 2 * ring
            case "partial", "sharded":
                return ring if before.reduction == "sum" else math.inf
            case "sharded", "replicated":
                return ring
            case "sharded", "sharded":
                return ring + 1
            case "replicated", "sharded":
                return 1e-3 * nbytes
        return math.inf


def lse_of(made: Outputs) -> TensorSpec:
    """The log-sum-exp of an attention's rows, (batch, heads, queries), as steps give it."""
    assert made[0] is not None
    assert made[1] is not None
    return TensorSpec(made[0].shape[:3], made[1].dtype)


def _communicated(target: str, spec: TensorSpec, args: Sequence[Arg]) -> TensorSpec:
    shape, size = list(spec.shape), args[-1]
    if target in BY_TARGET:
        kind = BY_TARGET[target]
        made = kind.shape(shape, size, args[1] if kind.reductions else "")
        assert made is not None, f"{target} of {spec}"
        return TensorSpec(made, spec.dtype)
    if target == EXCHANGE:
        before, after = args[1:3]
        shape[before], shape[after] = shape[before] * size, shape[after] // size
    elif target != REDUCE:
        n = shape[args[1]]
        shape[args[1]] = n * size if target == GATHER else n // size
    if target == CHUNK:
        return spec_with(shape, spec.dtype, strides_of(spec))
    return TensorSpec(tuple(shape), spec.dtype)


@lru_cache(maxsize=4096)
def _is_view(target: str) -> bool:
    if target in VIEWS or target in (CHUNK, WAIT):
        return True
    function = overload(target)
    return function is not None and returns_view(function)
