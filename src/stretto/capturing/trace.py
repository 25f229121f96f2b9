"""From a model and a loss to the ops of a full training step, as plain data.

    1. The model's parameters and buffers, and one microbatch, become fake tensors (no storage, no device).
    2. Forward, loss and backward are exported as one functional graph of dispatcher calls.
    3. Every node becomes an `Op`; what it means (parameter, gradient, buffer update, loss) goes beside it.
    4. Of a program on meshes it is proved that each rank computes what the plain model computes.
    5. Passes improve the graph (`stretto.passes`).

The result knows no stages: `stretto.capturing.split` chooses them, `stretto.capturing.stages` cuts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.backend.process_memory import rarely_collected
from stretto.backend.specs import dtype_name, spec_of
from stretto.batch import tree
from stretto.batch.loss import Loss
from stretto.capturing import torch_adapter
from stretto.capturing.convert import convert
from stretto.capturing.equal import NotRepeatedError, equal_layers
from stretto.capturing.expand import expand, named
from stretto.capturing.explain import check_batch, check_model, explained
from stretto.capturing.graph import JointGraph, Traced, TracedStep, passed
from stretto.capturing.mesh_program import OnMeshes
from stretto.capturing.outputs import count_of, mean_over, observed_of, with_partial
from stretto.capturing.proof import Proof
from stretto.capturing.read import Reads
from stretto.capturing.repeat import layers_of
from stretto.capturing.split import layer_names
from stretto.capturing.substitutes import (
    HALF,
    PyTorchCalls,
    attention_on_cuda,
    batch_norms_in_ops,
    with_cuda_results,
)
from stretto.errors import CaptureError, UsageError
from stretto.ir.program import Constant, TensorSpec
from stretto.parallelize.expert_op import as_one_op
from stretto.parallelize.layout import Layout, part_shapes
from stretto.passes import check_names

_log = logging.getLogger(__name__)

PLAIN = Layout()


@dataclass(frozen=True, slots=True)
class _TraceSetup:
    """What one attempt traces, after step 1.

    leaves: of the microbatch, fake, by name. at: the device of fake tensors; absent: whether that replaces a
    CUDA that this machine lacks; device: the kind of device that the step is for.
    """

    model: nn.Module
    loss: Loss
    rebuild: Callable[[Sequence[Tensor]], Any]
    leaves: Mapping[str, Tensor]
    mode: Any
    at: torch.device
    absent: bool
    device: str
    param_dtype: torch.dtype | None
    layout: Layout
    meshes: OnMeshes | None
    repeats: bool

    def fake_state(self, parts: Mapping[int, tuple[int, ...]] | None = None) -> AbstractContextManager[None]:
        """As `torch_adapter.fake_state`, for this model."""
        return torch_adapter.fake_state(self.model, self.mode, self.at, self.param_dtype, parts)


@dataclass(frozen=True, slots=True)
class _ExportedStep:
    """After step 3. specs: of parameters and buffers, by name; given: of all values that no op makes."""

    joint: JointGraph
    reads: Reads
    step: TracedStep
    constants: Sequence[Constant]
    specs: Mapping[str, TensorSpec]
    given: Mapping[str, TensorSpec]


@rarely_collected()
def trace(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    microbatches: int = 1,
    param_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    layout: Layout = PLAIN,
    equal_layers: bool = True,
    skip_passes: Collection[str] = (),
    meshes: OnMeshes | None = None,
) -> Traced:
    """Trace `loss(model, microbatch)` and its backward without running it.

    batch: the full batch or its like (only shapes and dtypes are read); a microbatch is its
    `microbatches`-th part along the first dim. param_dtype: compute with parameters (and floating-point
    inputs) of this dtype. device: where the step will run; the model's own by default, "cpu" for "meta"; for
    "cuda" there need not be one here (`substitutes` has the choices). layout: of a model on meshes, or what
    a model is traced with (`Layout.traced`). equal_layers: whether layers that are equal are traced twice and
    repeated (`repeat`), for the same result. skip_passes: passes to leave out. meshes: where a program on
    several meshes lies (`stretto.capturing.meshes`).

    Raises CaptureError that names the source line and the reason; UsageError for a batch that does not fit.
    """
    check_names(skip_passes)
    traced = partial(
        _trace, model, batch, loss, microbatches, param_dtype, device, layout, skip_passes, meshes
    )
    with batch_norms_in_ops(model):
        # Layers that are repeated would number the borders of meshes again.
        if equal_layers and meshes is None:
            try:
                return traced(repeats=True)
            except (NotRepeatedError, CaptureError) as reason:
                # Whether a model can be captured is for the trace of all layers to decide.
                _log.debug("all layers are traced: %s", reason)
        return traced(repeats=False)


def _trace(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    microbatches: int,
    param_dtype: torch.dtype | None,
    device: torch.device | str | None,
    layout: Layout,
    skip_passes: Collection[str],
    meshes: OnMeshes | None,
    repeats: bool,
) -> Traced:
    """Steps 1 to 5; with `repeats`, raises NotRepeatedError where only the trace of all layers is right."""
    fixed, full = tuple(tree.fixed(batch).items()), tree.replicated_leaves(batch)
    setup = _set_up(model, batch, loss, microbatches, param_dtype, device, layout, meshes, repeats)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own_dtypes = {name: dtype_name(p.dtype) for name, p in parameters.items()}
    first: dict[int, str] = {}
    ties = {name: first.setdefault(id(p), name) for name, p in parameters.items()}
    exported = _exported(setup)
    joint, given = exported.joint, exported.given
    read, watch = exported.reads.kept()

    ops, seen = observed_of(exported.step.ops)
    grads, kept = dict(exported.step.grads), dict(exported.step.kept)
    count = count_of(ops, kept["loss"], kept.pop("count", joint.count), full)
    divided = mean_over(ops, kept["loss"], full, given) if count is None else None
    partial_along: Mapping[str, tuple[str, ...]] = {}
    sharded: frozenset[str] = frozenset()
    tensor = layout.tensor
    if tensor is not None:
        proof = Proof(ops, given, tensor.shards, grads, tensor.size)
        partial_along, sharded = proof.partial(), proof.sharded()
        seen = tuple(with_partial(one, proof.of(one.value), one.value) for one in seen)
    roots = {value for value in grads.values() if value is not None} | {*kept.values()}
    ops, now = passed(ops, roots | {one.value for one in seen}, given, sharded, skip_passes)
    grads = {name: value and now.get(value, value) for name, value in grads.items()}
    kept = {what: now.get(value, value) for what, value in kept.items()}

    counting = [op for counted in (count, divided) if counted is not None for op in counted.ops]
    used = {name for op in (*(traced.op for traced in ops), *counting) for name in op.uses}
    inputs = [(kind, str(name)) for kind, name in joint.inputs.values()]
    return Traced(
        name=type(model).__name__,
        ops=tuple(ops),
        segments=tuple(joint.segments),
        parameters={
            name: (exported.specs[name], ties[name], grads.get(name))
            for kind, name in inputs
            if kind == "param"
        },
        buffers={
            name: (exported.specs[name], kept.get(f"buffer/{name}"))
            for kind, name in inputs
            if kind == "buffer"
        },
        constants=tuple(c for c in exported.constants if f"const/{c.name}" in used),
        batch=tuple((name, spec_of(leaf)) for name, leaf in setup.leaves.items()),
        loss=kept["loss"],
        param_dtype=None if param_dtype is None else dtype_name(param_dtype),
        own_dtypes=own_dtypes,
        device=setup.device,
        fixed=fixed,
        shards=layout.shards,
        partial=partial_along,
        borders=joint.borders,
        full=full,
        count=count,
        mean_over=divided,
        frozen=frozenset(name for name, p in parameters.items() if not p.requires_grad),
        seen=tuple(replace(one, value=now.get(one.value, one.value)) for one in seen),
        layers=layer_names(model),
        read=read,
        watch=watch,
    )


def _set_up(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    microbatches: int,
    param_dtype: torch.dtype | None,
    device: torch.device | str | None,
    layout: Layout,
    meshes: OnMeshes | None,
    repeats: bool,
) -> _TraceSetup:
    leaves = tree.flatten(batch)
    check_batch(leaves)
    shapes = tree.microbatch_shapes(batch, microbatches)
    check_model(model)
    if repeats and not equal_layers(model):
        raise NotRepeatedError("no layers are equal")
    at = torch.device(device) if device is not None else _device_of(model)
    absent = at.type == "cuda" and not torch.cuda.is_available()
    mode = torch_adapter.fake_mode()
    here = torch.device("cpu") if absent else at
    fakes = {}
    for name, leaf in leaves.items():
        # A number in bfloat16 is another number, and does not make a result of finer dtype anyway.
        converted = param_dtype is not None and leaf.dtype.is_floating_point and leaf.dim()
        with mode:
            fakes[name] = torch.empty(
                shapes[name], dtype=param_dtype if converted else leaf.dtype, device=here
            )
    rebuild = tree.rebuilder(batch)
    return _TraceSetup(
        model, loss, rebuild, fakes, mode, here, absent, at.type, param_dtype, layout, meshes, repeats
    )


def _exported(setup: _TraceSetup) -> _ExportedStep:
    model, layout = setup.model, setup.layout
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    with (
        setup.fake_state(part_shapes(model, layout.tensor)),
        PyTorchCalls(attention_on_cuda) if setup.absent else nullcontext(),
        as_one_op(model, layout.mixtures),
    ):
        specs = {name: spec_of(p) for name, p in model.named_parameters(remove_duplicate=False)}
        specs |= {name: spec_of(b) for name, b in model.named_buffers(remove_duplicate=False)}
        layers = layers_of(model) if setup.repeats else None
        with explained(model, passed=(NotRepeatedError,), loss=setup.loss):
            joint, reads = torch_adapter.export_joint(
                model,
                setup.loss,
                setup.rebuild,
                tuple(setup.leaves.values()),
                setup.mode,
                layers,
                setup.meshes,
                setup.param_dtype in HALF,
            )
    leaf_names = list(setup.leaves)
    names: dict[torch.fx.Node, str] = {}
    for node, (kind, key) in joint.inputs.items():
        name = leaf_names[int(key)] if kind == "batch" else str(key)
        names[node] = "tangent" if kind == "tangent" else f"{kind}/{name}"
    given = {names[node]: spec_of(node.meta["val"]) for node in joint.inputs if "val" in node.meta}
    ops, constants = convert(joint, names, 1 if setup.meshes is None else setup.meshes.size)
    if setup.absent:
        made = with_cuda_results((traced.op for traced in ops), given)
        ops = [replace(traced, op=op) for traced, op in zip(ops, made, strict=True)]
    grads: dict[str, str | None] = {}
    kept: dict[str, str] = {}
    for kind, key, out in joint.outputs:
        if kind == "grad" and key not in frozen:
            grads[key] = None if out is None else names[out]
        elif kind in ("loss", "count", "update") and out is not None:
            kept[f"buffer/{key}" if kind == "update" else kind] = names[out]
    step = TracedStep(tuple(ops), grads, kept)
    step = named(step) if layers is None else expand(step, layers.calls, joint.segments, constants)
    return _ExportedStep(joint, reads, step, constants, specs, given)


def _device_of(model: nn.Module) -> torch.device:
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise UsageError(
            f"the model's parameters are on several devices ({', '.join(sorted(map(str, devices)))}); "
            "capture wants a model on one device, or on 'meta'"
        )
    device = next(iter(devices), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device
