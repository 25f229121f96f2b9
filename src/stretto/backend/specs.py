"""Specs of PyTorch's tensors, and tensors without values of specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stretto.ir.program import Arg, Const, Job, Ref, TensorSpec


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor, fake or real."""
    stride = None if tensor.is_contiguous() else tuple(int(n) for n in tensor.stride())
    return TensorSpec(tuple(int(n) for n in tensor.shape), dtype_name(tensor.dtype), stride)


def empty_of(spec: TensorSpec, device: torch.device | str) -> torch.Tensor:
    """A tensor of a spec, whose elements are anything."""
    dtype = getattr(torch, spec.dtype)
    if spec.stride is None:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device)


def decoded(arg: Arg, value: Callable[[str], Any], device: torch.device | str) -> Any:
    """An op's argument as PyTorch takes it. value: of a name."""
    if isinstance(arg, Ref):
        return value(arg.name)
    if isinstance(arg, tuple):
        return [decoded(item, value, device) for item in arg]
    if isinstance(arg, Const):
        return torch.device(device) if arg.kind == "device" else getattr(torch, arg.text)
    return arg


def constants_of(job: Job, device: torch.device) -> dict[str, torch.Tensor]:
    """The job's constants, by the names that ops have for them."""
    result = {}
    for constant in job.constants:
        built = torch.tensor(constant.data, dtype=getattr(torch, constant.spec.dtype), device=device)
        result[f"const/{constant.name}"] = built.reshape(constant.spec.shape)
    return result
