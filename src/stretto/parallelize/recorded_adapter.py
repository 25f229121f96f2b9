"""The ops that a call makes, as `stretto.ir` writes them, without a graph being traced.

What it uses of PyTorch beside public names, with a test: torch.utils._python_dispatch.TorchDispatchMode,
and the trees of torch.utils._pytree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

from stretto.ir.program import Const, Op, Ref, TensorSpec


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
        return self._names.setdefault(id(tensor), f"t{len(self._names)}")

    def _ref(self, tensor: Tensor) -> Ref:
        name = self.name(tensor)
        self.specs.setdefault(name, spec_of(tensor))
        return Ref(name)

    def _arg(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._ref(value)
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
        self.writes |= _in_place(function)
        target = str(function)
        random = torch.Tag.nondeterministic_seeded in function.tags
        specs = tuple(spec_of(out) if isinstance(out, Tensor) else None for out in outs)
        if len(outs) == 1 and isinstance(outs[0], Tensor):
            self.ops.append(Op(self._ref(outs[0]).name, target, *given, specs, random=random))
            return made
        full = f"all{len(self.ops)}"
        self.ops.append(Op(full, target, *given, specs, random=random))
        for at, out in enumerate(outs):
            if isinstance(out, Tensor):
                self.ops.append(Op(self._ref(out).name, "getitem", (Ref(full), at), (), (spec_of(out),)))
        return made


def _in_place(function: Any) -> bool:
    return str(function).split(".")[1].endswith("_") and not str(function).split(".")[1].endswith("__")


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape and dtype; strides do not matter here."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
