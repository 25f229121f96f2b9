"""Where a forward is in slices of the sequence, with sequence parallelism.

    1. A block that is given the full sequence cuts it; residuals are slices from there on.
    2. Attention and MLPs gather their input (`sequence.full_inside`), and scatter their output.
    3. A norm beside the blocks that is given slices puts the sequence together again.

A tensor's length says whether it is a slice: that of the full tensor is known from the first cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from stretto.parallelize import ops
from stretto.parallelize.recorded_adapter import tree_flatten, tree_unflatten
from stretto.parallelize.tensor import AXIS, TensorParallel

SEQUENCE_DIM = 1
"""The dim of the sequence in activations (batch, sequence, hidden)."""

OUT = (
    "give the blocks a forward of their own that calls it, call the blocks themselves, or leave "
    "sequence_parallel out"
)


@dataclass(slots=True)
class Slices:
    """One forward. length: of the full sequence, once it was cut; sliced:
    whether no norm has put slices together; inside: modules with a gathered input that run now."""

    how: TensorParallel
    length: int | None = None
    sliced: bool = False
    inside: list[str] = field(default_factory=list)

    def begin(self) -> None:
        self.length, self.sliced = None, False
        self.inside.clear()

    def end(self) -> None:
        """Raises ValueError for slices that stay slices."""
        if self.sliced:
            raise ValueError(
                f"sequence_parallel: the sequence was cut at {self.how.first}, and none of "
                f"{', '.join(self.how.tails)} put it together again after the last block: call one of them "
                "there, or leave sequence_parallel out"
            )

    def is_slice(self, x: Any) -> bool:
        return self._length(x) * self.how.size == (self.length or 0)

    def _is_full(self, x: Any) -> bool:
        return self.length is not None and self._length(x) == self.length

    def _length(self, x: Any) -> int:
        return int(x.shape[SEQUENCE_DIM]) if isinstance(x, Tensor) and x.dim() > SEQUENCE_DIM else -1

    def scatter(self, x: Tensor) -> Tensor:
        """Slices of the sum of partials."""
        return ops.scatter(x, SEQUENCE_DIM, AXIS, self.how.size)

    def collect(self, x: Tensor) -> Tensor:
        """The full tensor of slices, for what all ranks do alike."""
        return ops.collect(x, SEQUENCE_DIM, AXIS, self.how.size)

    def block(self, name: str, module: nn.Module) -> Callable[..., Any]:
        own = module.forward

        def cut(x: Tensor) -> Tensor:
            if x.dim() < 3:
                raise ValueError(
                    f"sequence_parallel: {name} is given a tensor of shape {list(x.shape)}; (batch, "
                    "sequence, hidden) is expected"
                )
            self.sliced = True
            if self.is_slice(x):
                return x
            if self.length is not None and not self._is_full(x):
                raise ValueError(
                    f"sequence_parallel: {name} is given a sequence of {self._length(x)}, where blocks "
                    f"before it had one of {self.length}: keep its length, or leave sequence_parallel out"
                )
            self.length = self._length(x)
            return ops.chunk(x, SEQUENCE_DIM, AXIS, self.how.size)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return own(*first_changed(args, kwargs, cut, name), **kwargs)

        return forward

    def norm_after(self, module: nn.Module) -> Callable[..., Any]:
        """A norm beside the blocks: one that is given slices puts the sequence together again."""
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            if self.length is None or not self.is_slice(result):
                return result
            self.sliced = False
            return self.collect(result)

        return forward

    def norm_inside(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """A norm of a block, which works on slices."""
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            for x in (*args, *kwargs.values()):
                if self.length is None or (isinstance(x, Tensor) and x.dim() > 2 and self._is_full(x)):
                    raise ValueError(self._not_sliced(name))
            return own(*args, **kwargs)

        return forward

    def full_inside(
        self, name: str, module: nn.Module, gather: Callable[[Tensor], Tensor]
    ) -> Callable[..., Any]:
        """Attention or an MLP: its input is gathered."""
        own = module.forward

        def gathered(x: Tensor) -> Tensor:
            if not self.is_slice(x) or x.dim() < 3:
                raise ValueError(self._not_sliced(name))
            return gather(x)

        def forward(*args: Any, **kwargs: Any) -> Any:
            args = first_changed(args, kwargs, gathered, name)
            self.inside.append(name)
            try:
                return own(*args, **kwargs)
            finally:
                self.inside.pop()

        return forward

    def mixture(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """Experts and what is around them: its input is gathered, and of its output (the first, where there
        are several) the sum is scattered. What is in it leaves partials."""
        inner = self.full_inside(name, module, self.collect)

        def forward(*args: Any, **kwargs: Any) -> Any:
            (first, *rest), tree = tree_flatten(inner(*args, **kwargs))
            self.check_full(name, first)
            return tree_unflatten([self.scatter(first), *rest], tree)

        return forward

    def check_inside(self, name: str) -> None:
        """Raises ValueError if a module runs whose input was to be gathered by the module around it."""
        if not any(name.startswith(f"{parent}.") for parent in self.inside):
            parent = name.rpartition(".")[0]
            raise ValueError(
                f"sequence_parallel: {name} is called, and {parent}, which gathers the sequence for it, is "
                f"not: let the forward of {parent} call it, or leave sequence_parallel out"
            )

    def check_full(self, name: str, x: Any) -> None:
        """Raises ValueError if what is to be scattered is not of the full sequence."""
        if not self._is_full(x):
            raise ValueError(self._not_sliced(name))

    def _not_sliced(self, name: str) -> str:
        return (
            f"sequence_parallel: {name} is called where the sequence is not cut; that is done at the door of "
            f"a block, as {self.how.first}: {OUT}"
        )


def first_changed(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor], name: str
) -> tuple[Any, ...]:
    """The arguments with the activation changed: the first, or the keyword `hidden_states` (in place)."""
    if args:
        return (change(args[0]), *args[1:])
    if "hidden_states" not in kwargs:
        raise ValueError(
            f"sequence_parallel: {name} is called without a first argument and without hidden_states: give "
            "the hidden states as one of these"
        )
    kwargs["hidden_states"] = change(kwargs["hidden_states"])
    return ()
