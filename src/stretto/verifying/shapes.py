"""Proves that ops give what the plan says that they give: shapes and dtypes follow again from their inputs.

A file may name the arguments of a product in the wrong order; every value is then there, and the step fails
in the middle. So each op is called once with tensors that have a shape, the plan's device
and no elements, and what it gives is compared with what the plan says.

    1. Equal calls (op, shapes, dtypes and strides of inputs, all else) are made once in a process.
    2. Called are PyTorch's ops and Stretto's own that compute, by their schemas.
       What PyTorch cannot say without elements, or has no rule for, is left alone, and so is attention on
       accelerators, of which results other than the first depend on the device.
    3. A part of a tuple, and a gradient, are of the shape of what they are taken from, or belong to.
    4. A view has the strides that its source gives it. Of other values kernels choose them, but none has
       several elements in one place, which could not be added to.

Communication is for `stretto.verifying.communication`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from stretto.backend.dispatch_adapter import no_elements, refused
from stretto.backend.specs import decoded, empty_of, spec_of
from stretto.ir.action import Phase
from stretto.ir.dims import operands
from stretto.ir.flow import given_specs
from stretto.ir.kept import added_spec
from stretto.ir.parameters import strides_of
from stretto.ir.placements import KNOWN_OPS
from stretto.ir.plan import Plan
from stretto.ir.prices import Specs, signature, specs_of
from stretto.ir.program import GETITEM, Job, Op, TensorSpec
from stretto.ir.storage import is_expanded
from stretto.verifying.fault import Fault

Given = tuple[TensorSpec | None, ...]

MOST_CALLS = 20_000
"""Different calls whose results are kept. Assumed: some plans' worth."""

_known: dict[str, tuple[Given | None, str]] = {}

DEVICE_ATTENTION = ("attention",)
"""Words in the names of ops whose further results are the device's own."""


def shape_faults(plan: Plan) -> list[Fault]:
    """Every op that cannot be called so, or gives something else. References must be sound."""
    specs = specs_of(plan.job)
    return [*_ops(plan.job, specs), *_counts(plan.job), *_gradients(plan.job, specs)]


def _ops(job: Job, specs: Specs) -> Iterator[Fault]:
    made = {op.name: op.outputs for stage in job.stages for ops in stage.ops.values() for op in ops}
    seen: dict[str, Op] = {}
    for stage in job.stages:
        now = dict(specs)
        for phase, ops in stage.ops.items():
            for op in ops:
                if seen.setdefault(op.name, op) is not op and seen[op.name] == op:
                    continue  # what several stages compute
                if op.target == GETITEM:
                    trouble = _part(op, made)
                else:
                    trouble = _trouble(op, now, job.device)
                if trouble:
                    yield _fault(stage.index, phase, op.name, trouble)
                now.update(op.written)


def _part(op: Op, made: Mapping[str, Given]) -> str:
    """Why a part of a tuple is not what the plan says; "" if it is."""
    parts, at = made.get(op.args[0].name, ()), op.args[1]
    if at >= len(parts):
        return f"takes part {at} of {op.args[0].name}, which has {len(parts)}"
    part = parts[at] or "no tensor"
    return "" if parts[at] == op.outputs[0] else f"is {op.outputs[0]}, but the part is {part}"


def _trouble(op: Op, specs: Specs, device: str) -> str:
    """Why the op does not give what the plan says; "" if it does, or no one knows."""
    known = op.target.startswith(KNOWN_OPS)
    if not known or (device != "cpu" and any(word in op.target for word in DEVICE_ATTENTION)):
        return ""
    given = operands(op)
    if any(value not in specs for value in given):
        return ""
    key = f"{device} {signature(op, specs)}"
    if key not in _known:
        if len(_known) >= MOST_CALLS:
            _known.clear()
        _known[key] = _called(op, specs, device)
    made, reason = _known[key]
    described = ", ".join(str(specs[value]) for value in given)
    if reason:
        return f"{op.target} cannot take {described}: {reason}"
    if made is None or len(made) != len(op.outputs):
        return ""
    for at, (result, said) in enumerate(zip(made, op.outputs, strict=True)):
        if said is None:
            continue
        if result is None:
            return f"{op.target} of {described} gives nothing as part {at}, but the plan says {_brief(said)}"
        if at:
            result = replace(result, dtype=said.dtype)  # of statistics, kernels choose what they compute in
        if not _alike(result, said):
            return f"{op.target} of {described} gives {_brief(result)}, but the plan says {_brief(said)}"
        if said.numel:
            view = op.alias is not None
            if (
                strides_that_count(result) != strides_that_count(said)
                if view
                else is_expanded(said) > is_expanded(result)
            ):
                return f"{op.target} of {described} gives {result}, but the plan says {said}"
    return ""


def strides_that_count(spec: TensorSpec) -> tuple[int, ...]:
    """The strides of the dims that have several elements; those of others mean nothing."""
    return tuple(step for length, step in zip(spec.shape, strides_of(spec)) if length > 1)


def _counts(job: Job) -> Iterator[Fault]:
    """Ops of counts."""
    for key, count in (("count", job.count), ("mean_over", job.mean_over)):
        specs = given_specs(job)
        for op in count.ops if count is not None else ():
            if trouble := _trouble(op, specs, job.device):
                yield Fault(None, f"job.{key}, {op.name}", trouble, "Capture the step again")
            if len(op.outputs) == 1 and op.outputs[0] is not None:
                specs[op.name] = op.outputs[0]


def _gradients(job: Job, specs: Specs) -> Iterator[Fault]:
    """Step 3 of what a step leaves: gradients and buffers."""
    for parameter in job.parameters:
        for stage, phase, value in parameter.grads:
            result = specs.get(value)
            wanted = added_spec(job, parameter)
            if result is not None and result.shape != wanted.shape:
                of = f"the gradient of {parameter.name!r}, which is {_brief(wanted)}"
                yield _fault(stage, phase, value, f"is {_brief(result)}, but {of}")
    for buffer in job.buffers:
        for stage, phase, value in buffer.updates:
            result = specs.get(value)
            if result is not None and not _alike(result, buffer.spec):
                of = f"updates the buffer {buffer.name!r}, which is {_brief(buffer.spec)}"
                yield _fault(stage, phase, value, f"is {_brief(result)}, but {of}")


def _fault(stage: int, phase: Phase, value: str, what: str) -> Fault:
    return Fault(None, f"stage {stage}, {phase.value}, {value}", what, "Capture the step again")


def _alike(one: TensorSpec | None, other: TensorSpec | None) -> bool:
    return one is None or other is None or (one.shape, one.dtype) == (other.shape, other.dtype)


def _brief(spec: TensorSpec) -> str:
    return str(TensorSpec(spec.shape, spec.dtype))


def _called(op: Op, specs: Specs, device: str) -> tuple[Given | None, str]:
    """Steps 1 and 2: what the op gives, None if no one knows; and why it cannot be called, else ""."""
    space, packet, overload = (*op.target.split("."), "", "")[:3]
    function = getattr(getattr(getattr(torch.ops, space), packet, None), overload or "default", None)
    # Attributes of the namespace itself have names, too, and are no ops.
    if function is None or type(function).__name__ != "OpOverload" or refused(function):
        return None, ""
    taken = {argument.name for argument in function._schema.arguments}
    if any(isinstance(value, str) and key not in taken for key, value in op.kwargs):
        return None, ""  # a note, and no function of this name that PyTorch has

    def empty(name: str) -> torch.Tensor:
        return empty_of(specs[name], device)

    try:
        with torch.no_grad(), no_elements():
            args = decoded(op.args, empty, device)
            kwargs = {key: decoded(value, empty, device) for key, value in op.kwargs}
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
    return tuple(spec_of(part) if isinstance(part, torch.Tensor) else None for part in parts), ""
