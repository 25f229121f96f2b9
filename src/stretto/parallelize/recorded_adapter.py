"""What a call makes of chunks, as if these were ranks: cut, a partial, equal, or none of it.

The call is made on the first chunk and on the full tensor, without values. Both must give the same ops, which
are placed in order (`stretto.ir.placements`). Of the cuts that a view of a chunk may be, those stay that make
the shape of the full tensor.

What it uses of PyTorch besides public names, with a test: torch.utils._python_dispatch.TorchDispatchMode, the
trees of torch.utils._pytree, schemas of ops, and torch.Tensor._make_wrapper_subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from stretto.ir.placement import EqualReducedError, NeedsEqualError, Placement, RefusedError, part
from stretto.ir.placements import Placer
from stretto.ir.program import Const, Op, Ref, TensorSpec
from stretto.tensor.dtensor_adapter import without_values

OF_SHAPE = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(
            Tensor.is_floating_point,
            torch.is_floating_point,
            Tensor.is_complex,
            torch.is_complex,
            torch.numel,
        ),
    )
)
"""What a tensor without elements answers itself."""


def without_elements(kind: type[Tensor], shape: Sequence[int], like: Tensor) -> Any:
    """A tensor of class `kind` with a shape, and the dtype and device of `like`; no gradient."""
    make: Any = Tensor._make_wrapper_subclass
    return make(kind, tuple(shape), dtype=like.dtype, device=like.device, requires_grad=False)


class Recorded(TorchDispatchMode):
    """While the context lasts, every call of the dispatcher is written down. specs: of all tensors, by
    name. writes: whether one changes what it is given; names are those of tensors, not of values, then."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.writes = False
        self.specs: dict[str, TensorSpec] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no two have one id

    def name(self, tensor: Tensor) -> str:
        """What the tensor is called."""
        self._kept.append(tensor)
        name = self._names.setdefault(id(tensor), f"t{len(self._names)}")
        self.specs.setdefault(name, _spec(tensor))
        return name

    def _arg(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self.name(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(self._arg, value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return Const("other", str(value))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        made = function(*args, **named)
        given = tuple(map(self._arg, args)), tuple((key, self._arg(value)) for key, value in named.items())
        outs = made if isinstance(made, (tuple, list)) else (made,)
        if not any(isinstance(out, Tensor) for out in outs):
            return made
        self.writes |= function._schema.is_mutable
        specs = tuple(_spec(out) if isinstance(out, Tensor) else None for out in outs)
        single = len(outs) == 1 and isinstance(outs[0], Tensor)
        name = self.name(outs[0]) if single else f"all{len(self.ops)}"
        random = torch.Tag.nondeterministic_seeded in function.tags
        self.ops.append(Op(name, str(function), *given, specs, random=random))
        for at, out in enumerate(() if single else outs):
            if isinstance(out, Tensor):
                self.ops.append(Op(self.name(out), "getitem", (Ref(name), at), (), (_spec(out),)))
        return made


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def placements_of(
    call: Callable[[Sequence[Any]], Any],
    chunk_leaves: Sequence[Any],
    replicated_leaves: Sequence[Any],
    kept: Sequence[Placement | None],
    count: int,
    ratio: Fraction,
) -> list[Placement] | None:
    """Of each tensor that the call returns; None where one has no placement, or something is no tensor. kept:
    how those of `chunk_leaves` that are cut are. ratio: of the full tensor's length to the first chunk's."""
    chunk, full = Recorded(), Recorded()
    try:
        with without_values():
            parts, full_values = [_like(x) for x in chunk_leaves], [_like(x) for x in replicated_leaves]
            with chunk:
                outs = tree_leaves(call(parts))
            with full:
                others = tree_leaves(call(full_values))
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return None  # what is wrong with the full tensor, the full tensor will say
    if not outs or not all(isinstance(out, Tensor) for out in outs):
        return None
    same = [op.target for op in chunk.ops] == [op.target for op in full.ops]
    if not same or chunk.writes or any(op.random for op in chunk.ops):
        return None
    given = {chunk.name(p): of_it for p, of_it in zip(parts, kept, strict=True) if of_it is not None}
    placer = Placer("chunks", count, given)
    try:
        for op, other in zip(chunk.ops, full.ops, strict=True):
            placer.place(op, chunk.specs)
            if placer.of(op.name).kind == "local":
                return None
            if len(op.outputs) == 1 and op.outputs[0] is not None and other.outputs[0] is not None:
                fit = _fitting(placer.of(op.name), op.outputs[0].shape, other.outputs[0].shape, ratio)
                if fit is None:
                    return None
                placer.values[op.name] = fit
    except (RefusedError, NeedsEqualError, EqualReducedError):
        return None
    result = [
        _fitting(placer.of(chunk.name(out)), out.shape, other.shape, ratio)
        for out, other in zip(outs, others, strict=True)
    ]
    return None if None in result else [p for p in result if p is not None]


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _fitting(
    placement: Placement, chunk: Sequence[int], full: Sequence[int], ratio: Fraction
) -> Placement | None:
    """The placement with the cuts by which chunks of this make a full tensor of that shape, or None."""
    if len(chunk) != len(full):
        return None
    unlike = [dim for dim, (n, m) in enumerate(zip(chunk, full, strict=True)) if n != m]
    if placement.kind in ("equal", "sum") and not unlike:
        return placement
    if len(unlike) != 1 or full[unlike[0]] != chunk[unlike[0]] * ratio:
        return None
    if placement.kind == "equal" and unlike[0] in placement.uniform:
        return part(unlike[0])
    at = tuple(cut for cut in placement.at if cut[0] == unlike[0])
    return Placement("part", at) if placement.kind == "part" and at else None
