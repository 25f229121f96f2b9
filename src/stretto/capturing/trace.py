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
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
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
from stretto.capturing.graph import COUNT, GRAD, LOSS, SEEN, UPDATE, JointGraph, Traced
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
from stretto.capturing.torch_state_adapter import ONE_TRACE
from stretto.errors import CaptureError, UsageError
from stretto.ir.program import Buffer, Constant, Job, Parameter
from stretto.parallelize.expert_op import as_one_op
from stretto.parallelize.layout import RankLayout, part_shapes
from stretto.passes import check_names, on_graph
from stretto.passes.layout.program import StepProgram

_log = logging.getLogger(__name__)

PLAIN = RankLayout()


@dataclass
class _TraceSetup:
    """What is traced, after step 1; arguments of `trace` have their names.

    leaves: of the microbatch, fake, by name. at: the device of fake tensors; absent: whether that replaces
    a CUDA that this machine lacks.
    """

    model: nn.Module
    batch: Any
    loss: Loss
    microbatches: int
    param_dtype: torch.dtype | None
    device: torch.device
    layout: RankLayout
    skip_passes: Collection[str]
    meshes: OnMeshes | None

    def __post_init__(self) -> None:
        self.absent = self.device.type == "cuda" and not torch.cuda.is_available()
        self.mode = torch_adapter.fake_mode()
        self.at = torch.device("cpu") if self.absent else self.device
        self.leaves: dict[str, Tensor] = {}
        shapes = tree.microbatch_shapes(self.batch, self.microbatches)
        for name, leaf in tree.flatten(self.batch).items():
            # A number in bfloat16 is another number, and does not make a result of finer dtype anyway.
            converted = self.param_dtype is not None and leaf.dtype.is_floating_point and leaf.dim()
            dtype = self.param_dtype if converted else leaf.dtype
            with self.mode:
                self.leaves[name] = torch.empty(shapes[name], dtype=dtype, device=self.at)


@rarely_collected()
def trace(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    microbatches: int = 1,
    param_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    layout: RankLayout = PLAIN,
    equal_layers: bool = True,
    skip_passes: Collection[str] = (),
    meshes: OnMeshes | None = None,
) -> Traced:
    """Trace `loss(model, microbatch)` and its backward without running it.

    batch: the full batch or its like (only shapes and dtypes are read); a microbatch is its
    `microbatches`-th part along the first dim. param_dtype: compute with parameters (and floating-point
    inputs) of this dtype. device: where the step will run; the model's own by default, "cpu" for "meta"; for
    "cuda" there need not be one here (`substitutes` has the choices). layout: of a model on meshes, or what
    a model is traced with (its `traced`). equal_layers: whether layers that are equal are traced twice and
    repeated (`repeat`), for the same result. skip_passes: passes to leave out. meshes: where a program on
    several meshes lies (`stretto.capturing.meshes`).

    Raises CaptureError that names the source line and the reason; UsageError for a batch that does not fit.
    """
    check_names(skip_passes)
    check_batch(tree.flatten(batch))
    check_model(model)
    at = torch.device(device) if device is not None else _device_of(model)
    setup = _TraceSetup(model, batch, loss, microbatches, param_dtype, at, layout, skip_passes, meshes)
    with ONE_TRACE, batch_norms_in_ops(model):
        # Layers that are repeated would number the borders of meshes again.
        if equal_layers and meshes is None:
            try:
                return _trace(setup, repeats=True)
            except (NotRepeatedError, CaptureError) as reason:
                # Whether a model can be captured is for the trace of all layers to decide.
                _log.debug("all layers are traced: %s", reason)
        return _trace(setup, repeats=False)


def _trace(setup: _TraceSetup, repeats: bool) -> Traced:
    """Steps 2 to 5; with `repeats`, raises NotRepeatedError where only the trace of all layers is right."""
    model, layout = setup.model, setup.layout
    joint, reads, program, constants = _exported(setup, repeats)
    read, watch = reads.kept()
    full = tree.replicated_leaves(setup.batch)

    ops, seen = observed_of(program.ops)
    roots = {**program.roots, **{f"{SEEN}{k}": one.value for k, one in enumerate(seen)}}
    made = {op.name: op for op, _ in ops}
    count = count_of(made, roots[LOSS], roots.pop(COUNT, joint.count), full)
    divided = mean_over(made, roots[LOSS], full, program.given) if count is None else None
    program = replace(program, ops=ops, roots=roots)
    partial_along: Mapping[str, tuple[str, ...]] = {}
    sharded: frozenset[str] = frozenset()
    tensor = layout.tensor
    if tensor is not None:
        proof = Proof(program, tensor.shards, tensor.size)
        partial_along, sharded = proof.partial(), proof.sharded()
        seen = tuple(with_partial(one, proof.of(one.value)) for one in seen)
    program = on_graph(program, sharded, setup.skip_passes)

    counting = [op for counted in (count, divided) if counted is not None for op in counted.ops]
    used = {name for op in (*(op for op, _ in program.ops), *counting) for name in op.uses}
    constants = tuple(constant for constant in constants if f"const/{constant.name}" in used)
    kept = {f"const/{constant.name}" for constant in constants}
    given = {n: spec for n, spec in program.given.items() if n in kept or not n.startswith("const/")}

    def parameter(name: str, own: nn.Parameter) -> Parameter:
        spec, dtype = given[f"param/{name}"], dtype_name(own.dtype)
        return Parameter(
            name,
            spec,
            stages=(),
            grads=(),
            tied_to=program.ties[name],
            own_dtype=None if dtype == spec.dtype else dtype,
            shards=layout.shards.get(name, ()),
            partial=partial_along.get(name, ()),
            frozen=not own.requires_grad,
        )

    parameters = model.named_parameters(remove_duplicate=False)
    buffers = (name for name, _ in model.named_buffers(remove_duplicate=False))
    job = Job(
        name=type(model).__name__,
        microbatches=1,
        stages=(),
        edges=(),
        parameters=tuple(parameter(name, own) for name, own in parameters),
        buffers=tuple(Buffer(name, given[f"buffer/{name}"], ()) for name in buffers),
        constants=constants,
        batch=tuple((name, spec_of(leaf)) for name, leaf in setup.leaves.items()),
        loss=(0, program.roots[LOSS]),
        param_dtype=None if setup.param_dtype is None else dtype_name(setup.param_dtype),
        device=setup.device.type,
        fixed=tuple(tree.fixed(setup.batch).items()),
        replicated=full,
        batch_dims=tree.said_dims(setup.batch),
        count=count,
        mean_over=divided,
        metrics=seen,
        read=read,
        watch=watch,
    )
    program = replace(program, given=given)
    return Traced(program, job, tuple(joint.segments), layer_names(model), joint.borders)


def _exported(
    setup: _TraceSetup, repeats: bool
) -> tuple[JointGraph, Reads, StepProgram, tuple[Constant, ...]]:
    """Steps 2 and 3: the graph, what of Python was read, and the graph's ops and constants."""
    model, layout = setup.model, setup.layout
    if repeats and not equal_layers(model):
        raise NotRepeatedError("no layers are equal")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    ties = {name: first.setdefault(id(p), name) for name, p in parameters.items()}
    parts = part_shapes(model, layout.tensor)
    with (
        torch_adapter.fake_state(model, setup.mode, setup.at, setup.param_dtype, parts),
        PyTorchCalls(attention_on_cuda) if setup.absent else nullcontext(),
        as_one_op(model, layout.mixtures),
    ):
        layers = layers_of(model) if repeats else None
        with explained(model, passed=(NotRepeatedError,), loss=setup.loss):
            joint, reads = torch_adapter.export_joint(
                model,
                setup.loss,
                tree.rebuilder(setup.batch),
                tuple(setup.leaves.values()),
                setup.mode,
                layers,
                setup.meshes,
                setup.param_dtype in HALF,
            )
    program, constants = convert(joint, list(setup.leaves))
    if setup.absent:
        made = with_cuda_results((op for op, _ in program.ops), program.given)
        ops = zip(made, (origin for _, origin in program.ops), strict=True)
        program = replace(program, ops=tuple(ops))
    program = named(program) if layers is None else expand(program, layers.calls, joint.segments, constants)
    trained = (f"{GRAD}{name}" for name, p in parameters.items() if p.requires_grad)
    updates = (f"{UPDATE}{name}" for name, _ in model.named_buffers(remove_duplicate=False))
    roots = {root: program.roots[root] for root in (LOSS, COUNT, *trained, *updates) if root in program.roots}
    return joint, reads, replace(program, roots=roots, ties=ties), constants


def _device_of(model: nn.Module) -> torch.device:
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise UsageError(
            f"the model's parameters are on several devices ({', '.join(sorted(map(str, devices)))}); "
            "capture wants a model on one device, or on 'meta'"
        )
    device = next(iter(devices), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device
