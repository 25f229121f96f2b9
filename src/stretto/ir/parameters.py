"""Tensors without their elements, and what a model has of them: parameters and how they are sharded over
axes, buffers, constants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from stretto.files.codec import WHERE_SET, Fits, Natural
from stretto.ir.action import Phase

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and layout of a tensor. `stride` is None when the tensor is contiguous."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES.get(self.dtype, 4)

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return text if self.stride is None else f"{text}{{{','.join(map(str, self.stride))}}}"

    @staticmethod
    def parse(text: str) -> TensorSpec:
        match = re.match(r"^(\w+)\[([\d,]*)\](?:\{([\d,]*)\})?$", text)
        if match is None:
            raise ValueError(f"cannot read tensor {text!r}: expected dtype[shape] or dtype[shape]{{stride}}")

        def numbers(part: str) -> tuple[int, ...]:
            return tuple(int(n) for n in part.split(",")) if part else ()

        stride = None if match[3] is None else numbers(match[3])
        return TensorSpec(numbers(match[2]), match[1], stride)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def strides_of(spec: TensorSpec) -> tuple[int, ...]:
    """The strides, also of a contiguous tensor."""
    return dense_strides(spec.shape) if spec.stride is None else spec.stride


OptimizerKind = Literal["adamw", "momentum", "sgd"]
"""Whose state memory is counted for: "adamw" and its like keep two averages, "momentum" (SGD with momentum,
Lion) one, "sgd" none."""

STATES: Mapping[OptimizerKind, int] = {"adamw": 2, "momentum": 1, "sgd": 0}
"""Tensors that an optimizer keeps for each parameter, of its shape and own dtype. Counters are left out."""


Zero = Literal[0, 1, 2, 3, "auto"]
"""What of a step ranks that have copies of parameters keep in parts: the optimizer's state and the values
that it changes (1), gradients too (2), what ops read too (3)."""


def scatters(zero: Zero) -> bool:
    """Whether every microbatch scatters its gradients, else a step does so once."""
    return zero in (2, 3)


def gathers(zero: Zero) -> bool:
    """Whether every microbatch gathers the parameters that it reads, else a step does so once."""
    return zero == 3


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter's rows or columns are sharded over an axis. Along `dim` the full tensor is `blocks` equal
    blocks (the query, key and value of a fused matrix); a rank has its equal part of each, in order.

    copies: consecutive ranks that have the same part (a head of keys that they share). Each has a partial
    sum of the part's gradient, and the axis is in `Parameter.partial`.
    """

    axis: str
    dim: int
    blocks: int = 1
    copies: int = 1

    def parts(self, size: int) -> int:
        """Different parts over an axis of `size` ranks."""
        return size // self.copies

    def part(self, coordinate: int) -> int:
        """Which of them the rank at a coordinate of the axis has."""
        return coordinate // self.copies


FromZero = Annotated[int, Fits(lambda value: value >= 0, "an integer from 0")]


@dataclass(frozen=True, slots=True)
class BucketSlot:
    """Where a parameter lies that one rank keeps in full (`stretto.passes.owners`).

    bucket: the first name of the first parameter of those that travel together. Each rank keeps one part of
        the bucket, of `length` elements.
    part: which of the parts the parameter lies in; `first`: its first element there.
    """

    bucket: str
    part: FromZero
    first: FromZero
    length: Natural


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: where it is used, the values that its gradient is the sum of, and its tie. `spec` is what
    one rank has.

    grads: (stage, phase, value name) of each part of the gradient, of which a stage may make several; the
        gradient is the sum of the parts over stages and microbatches.
    tied_to: the first name of a group of names for one tensor (its own name when it has only one).
    own_dtype: the dtype of the model's parameter where ops read a copy of `spec`'s dtype, else None.
    shards: how it is sharded over axes; a rank along any other axis has the same values.
    partial: axes along which every rank's gradient is a partial sum (a norm that sees a slice of
        the sequence); the partial sums are summed once a step. Along an axis over which the parameter is
        sharded, those of the ranks that have the same part.
    frozen: it required no gradient when the step was captured; without `grads` and not frozen, it is one
        that the loss does not depend on.
    kept: axes over whose ranks the rows of `spec` are kept (`stretto.ir.kept`), of the parameter, its
        gradient and the optimizer's state alike; in the order in which a gradient is scattered over them.
    scattered: whether what `grads` names is this rank's rows already, summed over the axes of `kept`.
    slot: where one of the ranks along `kept` keeps all of it, and the others nothing.
    """

    name: str
    spec: TensorSpec
    stages: tuple[int, ...]
    grads: tuple[tuple[int, Phase, str], ...]
    tied_to: str
    own_dtype: str | None = None
    shards: tuple[Shard, ...] = ()
    partial: tuple[str, ...] = ()
    frozen: bool = False
    kept: tuple[str, ...] = field(default=(), metadata=WHERE_SET)
    scattered: bool = field(default=False, metadata=WHERE_SET)
    slot: BucketSlot | None = field(default=None, metadata=WHERE_SET)

    @property
    def is_made(self) -> bool:
        """Whether ops read something else than what a rank keeps, so that a program has to make it."""
        return bool(self.kept) or self.own_dtype is not None

    @property
    def kept_as(self) -> str:
        """The name under which programs know what is kept: of its tie, or of the bucket in which it lies."""
        return self.tied_to if self.slot is None else self.slot.bucket

    @property
    def leads(self) -> bool:
        """Whether its gradient becomes that of all that is kept under `kept_as`."""
        return self.kept_as == self.tied_to

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the accumulated gradient."""
        return self.grad_spec.nbytes

    @property
    def grad_spec(self) -> TensorSpec:
        """The accumulated gradient."""
        return TensorSpec(self.spec.shape, self.grad_dtype)

    @property
    def grad_dtype(self) -> str:
        """That of the accumulated gradient: the parameter's own."""
        return self.own_dtype or self.spec.dtype

    def is_sharded(self, axis: str) -> bool:
        """Whether ranks along the axis have parts of it, of which each has the full gradient."""
        return any(shard.axis == axis for shard in self.shards)

    def slots(self, axis: str, size: int) -> int:
        """Gradients that lie side by side while this one is summed over an axis of `size` ranks: 1, or where
        only copies add up, as many as there are different parts, so that one sum serves all of them."""
        return next((s.parts(size) for s in self.shards if s.axis == axis and s.copies > 1), 1)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer: where it is read, and (stage, phase, value) of its update if the model writes it."""

    name: str
    spec: TensorSpec
    stages: tuple[int, ...]
    updates: tuple[tuple[int, Phase, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant tensor of the model's code, with its elements in row-major order."""

    name: str
    spec: TensorSpec
    data: tuple[float | int | bool, ...] = field(repr=False)
