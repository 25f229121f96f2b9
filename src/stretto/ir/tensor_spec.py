"""What is known of a tensor without its elements, and its text form. Touches nothing."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

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
