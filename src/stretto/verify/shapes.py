"""Proves that ops give what the plan says that they give: shapes and dtypes follow again from their inputs.

A file may name the arguments of a product in the wrong order; every value is then there, and the step fails
in the middle. So each op of PyTorch's own is called once with tensors that have a shape, the plan's device
and no elements, and what it gives is compared with what the plan says.

    1. Equal calls (op, shapes, dtypes and strides of inputs, all else) are made once in a process.
    2. Called are ops of `torch.ops.aten` with tensors among their arguments, and no text: they compute. What
       PyTorch cannot say without elements, or has no rule for, is left alone, and so is attention on
       accelerators, of which results beside the first depend on the device.
    3. A part of a tuple, and a gradient, are of the shape of what they are taken from, or belong to.

Communication is for `stretto.verify.communication`. Touches `stretto.ir`, and PyTorch's ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from stretto.ir.action import Phase
from stretto.ir.dims import operands
from stretto.ir.plan import Plan
from stretto.ir.prices import Specs, signature, specs_of
from stretto.ir.program import DTYPE_BYTES, GETITEM, Arg, Const, Job, Op, Ref, TensorSpec
from stretto.verify.fake_adapter import no_elements
from stretto.verify.fault import Fault

Given = tuple[TensorSpec | None, ...]

MOST_CALLS = 20_000
"""Different calls whose results are kept. Assumed: some plans' worth."""

_known: dict[str, tuple[Given | None, str]] = {}

DEVICE_ATTENTION = ("attention",)
"""Words in the names of ops whose further results are the device's own."""


def shape_faults(plan: Plan) -> list[Fault]:
    """Every op that cannot be called so, or gives something else. References must be sound."""
    specs = specs_of(plan.job)
    return [*_ops(plan.job, specs), *_gradients(plan.job, specs)]


def _ops(job: Job, specs: Specs) -> Iterator[Fault]:
    made = {op.name: op.outputs for stage in job.stages for ops in stage.ops.values() for op in ops}
    seen: set[str] = set()
    for stage in job.stages:
        for phase, ops in stage.ops.items():
            for op in ops:
                if op.name in seen:
                    continue  # what several stages compute
                seen.add(op.name)
                trouble = _part(op, made) if op.target == GETITEM else _trouble(op, specs, job.device)
                if trouble:
                    yield _fault(stage.index, phase, op.name, trouble)


def _part(op: Op, made: Mapping[str, Given]) -> str:
    """Why a part of a tuple is not what the plan says; "" if it is."""
    parts, at = made.get(op.args[0].name, ()), op.args[1]
    if at >= len(parts):
        return f"takes part {at} of {op.args[0].name}, which has {len(parts)}"
    return "" if _alike(parts[at], op.outputs[0]) else f"is {op.outputs[0]}, but the part is {parts[at]}"


def _trouble(op: Op, specs: Specs, device: str) -> str:
    """Why the op does not give what the plan says; "" if it does, or nobody knows."""
    space, _, name = op.target.partition(".")
    if space != "aten" or (device != "cpu" and any(word in name for word in DEVICE_ATTENTION)):
        return ""
    given = operands(op)
    if any(value not in specs for value in given):
        return ""
    key = f"{device} {signature(op, specs)}"
    if key not in _known:
        if len(_known) >= MOST_CALLS:
            _known.clear()
        _known[key] = _called(op, [specs[value] for value in given], specs, device)
    made, reason = _known[key]
    told = ", ".join(str(specs[value]) for value in given)
    if reason:
        return f"{op.target} cannot take {told}: {reason}"
    if made is None or len(made) != len(op.outputs):
        return ""
    for at, (found, said) in enumerate(zip(made, op.outputs, strict=True)):
        if said is not None and found is not None and at:
            found = TensorSpec(found.shape, said.dtype)  # of statistics, kernels choose what they compute in
        if said is not None and found is not None and not _alike(found, said):
            return f"{op.target} of {told} gives {_brief(found)}, but the plan says {_brief(said)}"
    return ""


def _gradients(job: Job, specs: Specs) -> Iterator[Fault]:
    """Step 3 of what a step leaves: gradients and buffers."""
    for parameter in job.parameters:
        for stage, phase, value in parameter.grads:
            found = specs.get(value)
            if found is not None and found.shape != parameter.spec.shape:
                of = f"the gradient of {parameter.name!r}, which is {_brief(parameter.spec)}"
                yield _fault(stage, phase, value, f"is {_brief(found)}, but {of}")
    for buffer in job.buffers:
        for stage, phase, value in buffer.updates:
            found = specs.get(value)
            if found is not None and not _alike(found, buffer.spec):
                of = f"updates the buffer {buffer.name!r}, which is {_brief(buffer.spec)}"
                yield _fault(stage, phase, value, f"is {_brief(found)}, but {of}")


def _fault(stage: int, phase: Phase, value: str, what: str) -> Fault:
    return Fault(None, f"stage {stage}, {phase.value}, {value}", what, "Capture the step again")


def _alike(one: TensorSpec | None, other: TensorSpec | None) -> bool:
    return one is None or other is None or (one.shape, one.dtype) == (other.shape, other.dtype)


def _brief(spec: TensorSpec) -> str:
    return str(TensorSpec(spec.shape, spec.dtype))


def _called(op: Op, given: list[TensorSpec], specs: Specs, device: str) -> tuple[Given | None, str]:
    """Steps 1 and 2: what the op gives, None if nobody knows; and why it cannot be called, else ""."""
    packet, _, overload = op.target.removeprefix("aten.").partition(".")
    function = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    # Attributes of the namespace itself have names, too, and are no ops.
    if function is None or type(function).__name__ != "OpOverload" or not given:
        return None, ""
    arguments = [*op.args, *(value for _, value in op.kwargs)]
    if any(isinstance(value, str) for value in arguments) or any(s.dtype not in DTYPE_BYTES for s in given):
        return None, ""
    try:
        with torch.no_grad(), no_elements():
            args = _real(op.args, specs, device)
            kwargs = {key: _real(value, specs, device) for key, value in op.kwargs}
            made = function(*args, **kwargs)
    except (NotImplementedError, AttributeError):
        return None, ""
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        words = ("meta", "Meta", "fake", "data-dependent", "not implemented")
        unknown = text == op.target or any(word in text for word in words)  # an op alone: it has no rule
        return None, "" if unknown else text
    except Exception:
        return None, ""  # of the rules that decide without elements, which have exceptions of their own
    parts = made if isinstance(made, (tuple, list)) else (made,)
    return tuple(_spec(part) if isinstance(part, torch.Tensor) else None for part in parts), ""


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(int(n) for n in tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _real(arg: Arg, specs: Specs, device: str) -> Any:
    """An argument of a call, with tensors that have no elements."""
    if isinstance(arg, Ref):
        spec = specs[arg.name]
        dtype = getattr(torch, spec.dtype)
        if spec.stride is None:
            return torch.empty(spec.shape, dtype=dtype, device=device)
        return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device)
    if isinstance(arg, tuple):
        return [_real(item, specs, device) for item in arg]
    if isinstance(arg, Const):
        return torch.device(device) if arg.kind == "device" else getattr(torch, arg.text)
    return arg
