"""From a model and a loss to the ops of a whole training step, as plain data.

    1. The model's parameters and buffers, and one microbatch, become fake tensors (no storage, no device).
    2. Forward, loss and backward are exported as one functional graph of dispatcher calls.
    3. Every node becomes an `Op`; what it means (parameter, gradient, buffer update, loss) goes beside it.
    4. Passes improve the graph (`stretto.passes`).

The result knows no stages: `stretto.capturing.split` chooses them, `stretto.capturing.stages` cuts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stretto.backend.observe_adapter import watched
from stretto.backend.process_memory import rarely_collected
from stretto.batch import tree
from stretto.batch.loss import Loss
from stretto.batch.values import Path, Watch
from stretto.capturing import torch_adapter
from stretto.capturing.absent_cuda import CudaChoices, with_cuda_results
from stretto.capturing.accepts import check_batch, check_model
from stretto.capturing.convert import convert, dtype_name, spec_of
from stretto.capturing.count import count_of, mean_over
from stretto.capturing.equal import equal_layers, renamed
from stretto.capturing.expand import Step, TracedOp, expand, named
from stretto.capturing.explain import explained
from stretto.capturing.float32_losses import HALF, LossesInFloat32
from stretto.capturing.known import Known
from stretto.capturing.layers import layer_names
from stretto.capturing.masks import masks_recognised
from stretto.capturing.mesh_program import OnMeshes
from stretto.capturing.norms import batch_norms_in_ops
from stretto.capturing.observed import Seen, taken_out
from stretto.capturing.proof import Proof
from stretto.capturing.repeat import NotRepeatedError, layers_of
from stretto.capturing.state import State
from stretto.capturing.torch_state_adapter import tracing_state
from stretto.errors import CaptureError, UsageError
from stretto.ir.program import Constant, Count, Shard, TensorSpec
from stretto.parallelize.alone import (
    Beside,
    Key,
    PlainCall,
    with_gathered_logits,
)
from stretto.parallelize.layout import Layout
from stretto.parallelize.lower_right_adapter import as_on_cuda
from stretto.parallelize.split_logits import WrittenError
from stretto.parallelize.unseen import alone
from stretto.passes import check_names, on_graph
from stretto.passes.graph import Graph

_log = logging.getLogger(__name__)

PLAIN = Layout()


@dataclass(frozen=True, slots=True)
class Traced:
    """One microbatch's forward and backward. segments: the module that runs in each segment.

    parameters: name -> (spec, first name of its tie, value name of its gradient or None).
    buffers: name -> (spec, value name of its update or None).
    whole, count, mean_over: as in `ir.program.Job`.
    shards, partial, frozen: of parameters, as in `ir.program.Parameter`.
    layers: names of the model's repeated modules (`stretto.capturing.layers`).
    read, watch: as in `ir.program.Job`.
    borders: as in `graphs.JointGraph`.
    """

    name: str
    ops: tuple[TracedOp, ...]
    segments: tuple[str, ...]
    parameters: Mapping[str, tuple[TensorSpec, str, str | None]]
    buffers: Mapping[str, tuple[TensorSpec, str | None]]
    constants: tuple[Constant, ...]
    batch: tuple[tuple[str, TensorSpec], ...]
    loss: str
    param_dtype: str | None
    own_dtypes: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    fixed: tuple[tuple[str, str], ...] = ()
    shards: Mapping[str, tuple[Shard, ...]] = field(default_factory=dict)
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    borders: Mapping[int, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    count: Count | None = None
    mean_over: Count | None = None
    frozen: frozenset[str] = frozenset()
    seen: tuple[Seen, ...] = ()
    layers: frozenset[str] = frozenset()
    read: tuple[tuple[Path, str], ...] = ()
    watch: Watch = field(default_factory=Watch, compare=False, repr=False)


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

    batch: the whole batch or its like (only shapes and dtypes are read); a microbatch is its
    `microbatches`-th part along the first dim. param_dtype: compute with parameters (and floating-point
    inputs) of this dtype. device: where the step will run; the model's own by default, "cpu" for "meta"; for
    "cuda" there need not be one here (`absent_cuda` says what is chosen then). layout: trace one rank's part
    of a model that is laid out so. equal_layers: whether layers that are equal are
    traced twice and repeated (`repeat`); False traces every layer, for the same result. skip_passes: names of
    passes to leave out. meshes: where a program on several meshes lies (`stretto.capturing.meshes`).

    Raises CaptureError that names the source line and the reason; UsageError for a batch that does not fit.
    """
    check_names(skip_passes)

    def attempt(how: Layout) -> Traced:
        traced = partial(
            _trace, model, batch, loss, microbatches, param_dtype, device, how, skip_passes, meshes
        )
        # Layers that are repeated would number the borders of meshes anew.
        if equal_layers and meshes is None and layout.chunks is None:
            try:
                return traced(repeats=True)
            except (NotRepeatedError, CaptureError) as reason:
                # Whether a model can be captured is for the trace of all of it to say.
                _log.debug("all layers are traced: %s", reason)
        return traced(repeats=False)

    with batch_norms_in_ops(model):
        try:
            return attempt(layout)
        except WrittenError:
            assert layout.tensor is not None, "without, no logits are split"
            return attempt(replace(layout, tensor=with_gathered_logits(model, layout.tensor)))


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
    """Steps 1 to 4; with `repeats`, raises NotRepeatedError where only the trace of all layers is right."""
    tensor = layout.tensor
    constants_of_batch = tuple(tree.fixed(batch).items())
    leaves, given_whole = tree.flatten(batch), tree.whole_leaves(batch)
    check_batch(leaves)
    shapes = tree.microbatch_shapes(batch, microbatches)
    check_model(model)
    if repeats and not equal_layers(model):
        raise NotRepeatedError("no layers are equal")
    at = torch.device(device) if device is not None else _device_of(model)
    device_kind = at.type
    absent = device_kind == "cuda" and not torch.cuda.is_available()
    if absent:
        at = torch.device("cpu")
    mode = torch_adapter.fake_mode()

    def fake_leaf(name: str, leaf: torch.Tensor) -> torch.Tensor:
        dtype = leaf.dtype
        # A number in bfloat16 is another number, and does not make a result of finer dtype anyway.
        if param_dtype is not None and dtype.is_floating_point and leaf.dim():
            dtype = param_dtype
        with mode:
            return torch.empty(shapes[name], dtype=dtype, device=at)

    fakes = [fake_leaf(name, leaf) for name, leaf in leaves.items()]
    ties = _ties(model)
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    own_dtypes = {n: dtype_name(p.dtype) for n, p in model.named_parameters(remove_duplicate=False)}
    beside = None
    if tensor is not None and meshes is None:
        leaves_at = layout.leaves()
        calls = Beside(model, leaves_at, tensor.size)
        found = _alone(model, loss, tree.rebuilder(batch), fakes, mode, at, param_dtype, calls, repeats)
        beside = Beside(model, leaves_at, tensor.size, found, torch_adapter.mark_call)
    with (
        torch_adapter.fake_state(model, mode, at, param_dtype, layout.part_shapes(model)),
        CudaChoices() if absent else nullcontext(),
        as_on_cuda() if absent else nullcontext(),
        layout.applied(model),
    ):
        state = {
            **{n: spec_of(p) for n, p in model.named_parameters(remove_duplicate=False)},
            **{n: spec_of(b) for n, b in model.named_buffers(remove_duplicate=False)},
        }
        layers = layers_of(model) if repeats else None
        with explained(model, tensor, (NotRepeatedError, WrittenError), loss):
            joint, reads = torch_adapter.export_joint(
                model, loss, tree.rebuilder(batch), fakes, mode, layers, meshes, beside, param_dtype in HALF
            )

    names: dict[torch.fx.Node, str] = {}
    parameters: dict[str, tuple[TensorSpec, str, str | None]] = {}
    buffers: dict[str, tuple[TensorSpec, str | None]] = {}
    leaf_names = list(leaves)
    for node, (kind, key) in joint.inputs.items():
        name = leaf_names[int(key)] if kind == "batch" else str(key)
        names[node] = "tangent" if kind == "tangent" else f"{kind}/{name}"
        if kind == "param":
            parameters[name] = (state[name], ties[name], None)
        elif kind == "buffer":
            buffers[name] = (state[name], None)

    given = {names[node]: spec_of(node.meta["val"]) for node in joint.inputs if "val" in node.meta}
    read, watch = reads.kept()
    matched = () if beside is None else beside.matched
    ops, constants = convert(joint, names, matched, 1 if tensor is None else tensor.size)
    if absent:
        made = with_cuda_results((traced.op for traced in ops), given)
        ops = [replace(traced, op=op) for traced, op in zip(ops, made, strict=True)]
    gradients: dict[str, str | None] = {}
    kept: dict[str, str] = {}
    for kind, key, out in joint.outputs:
        if kind == "grad" and key not in frozen:
            gradients[key] = None if out is None else names[out]
        elif kind in ("loss", "count", "update") and out is not None:
            kept[f"buffer/{key}" if kind == "update" else kind] = names[out]
    step = Step(tuple(ops), gradients, kept)
    step = named(step) if layers is None else expand(step, layers.calls, joint.segments, constants)
    ops, seen = taken_out(step.ops)
    gradients, kept = dict(step.grads), dict(step.kept)
    count = count_of(ops, kept["loss"], kept.pop("count", joint.count), given_whole)
    divided = mean_over(ops, kept["loss"], given_whole, given) if count is None else None
    shards = layout.shards
    parts: dict[str, tuple[str, ...]] = {}
    spread: frozenset[str] = frozenset()
    if tensor is not None:
        values = tuple(one.value for one in seen)
        proof = Proof(ops, given, tensor.shards, gradients, kept, tensor.size, meshes is not None, values)
        proved = proof.proved()
        ops, parts, spread = list(proved.ops), dict(proved.partial), _spread(proof)
        gradients = {key: value and proved.renamed[value] for key, value in gradients.items()}
        kept = {what: proved.renamed[value] for what, value in kept.items()}
        seen = tuple(one.renamed(proved.renamed, proved.seen) for one in seen)
    roots = {*(value for value in gradients.values() if value is not None), *kept.values()}
    roots |= {one.value for one in seen}
    ops, renamed = _passed(ops, roots, given, spread, skip_passes)
    for key, value in gradients.items():
        now = value if value is None else renamed.get(value, value)
        parameters[key] = (*parameters[key][:2], now)
    kept = {what: renamed.get(value, value) for what, value in kept.items()}
    for key in buffers:
        buffers[key] = (buffers[key][0], kept.get(f"buffer/{key}"))
    counting = (op for counted in (count, divided) if counted is not None for op in counted.ops)
    used = {name for op in (*(traced.op for traced in ops), *counting) for name in op.uses}
    return Traced(
        name=type(model).__name__,
        ops=tuple(ops),
        segments=tuple(joint.segments),
        parameters=parameters,
        buffers=buffers,
        constants=tuple(c for c in constants if f"const/{c.name}" in used),
        batch=tuple((name, spec_of(fake)) for name, fake in zip(leaf_names, fakes, strict=True)),
        loss=kept["loss"],
        param_dtype=None if param_dtype is None else dtype_name(param_dtype),
        own_dtypes=own_dtypes,
        device=device_kind,
        fixed=constants_of_batch,
        shards=shards,
        partial=parts,
        borders=joint.borders,
        whole=given_whole,
        count=count,
        mean_over=divided,
        frozen=frozenset(frozen),
        seen=tuple(one.renamed(renamed) for one in seen),
        layers=layer_names(model),
        read=read,
        watch=watch,
    )


def _alone(
    model: nn.Module,
    loss: Loss,
    rebuild: Callable[[Sequence[torch.Tensor]], Any],
    fakes: Sequence[torch.Tensor],
    mode: Any,
    at: torch.device,
    param_dtype: torch.dtype | None,
    calls: Beside,
    repeats: bool,
) -> Mapping[Key, PlainCall]:
    """The calls of the model alone; those of equal layers are those of the first."""
    layers, known = layers_of(model) if repeats else None, Known()
    if layers is not None:
        layers.begin(SimpleNamespace(names=[""], follow=lambda names: None), known)
    with (
        torch_adapter.fake_state(model, mode, at, param_dtype),
        alone(),
        mode,
        tracing_state(),
        torch.enable_grad(),
        calls.installed(),
        nullcontext() if layers is None else layers.installed(),
        calls.forward(),
        watched(),  # it calls what the spread model calls
        LossesInFloat32() if param_dtype in HALF else nullcontext(),
        masks_recognised(known),
    ):
        before = State(("", model), ("the loss", loss))
        try:
            with explained(model, passed=(NotRepeatedError,), loss=loss):
                loss(model, rebuild(fakes))
        finally:
            before.restore()
    found = dict(calls.found)
    first: dict[int, str] = {}
    for call in () if layers is None else layers.calls:
        like = first.setdefault(call.kind, call.layer)
        if not call.template:
            inside = [key for key in calls.found if renamed(key[0], like, "") != key[0]]
            found.update({(renamed(k[0], like, call.layer), *k[1:]): calls.found[k] for k in inside})
    return found


def _spread(proof: Proof) -> frozenset[str]:
    """Values whose first dim ranks share, once it is proved."""
    made = [item.op.name for item in proof.made]
    placers = [placer for _, placer in proof.placers]
    return frozenset(name for name in made if any(not dim for one in placers for dim, _ in one.of(name).at))


def _passed(
    ops: list[TracedOp],
    roots: set[str],
    given: Mapping[str, TensorSpec],
    spread: frozenset[str],
    skip: Collection[str],
) -> tuple[list[TracedOp], Mapping[str, str]]:
    """Step 4: after all passes, with what roots are called now. What a pass made stands where the op stood
    that it replaces."""
    known = {traced.op.name: traced for traced in ops}
    backward = frozenset(name for name, traced in known.items() if traced.backward)
    graph = Graph(
        tuple(traced.op for traced in ops), frozenset(roots), backward=backward, given=given, spread=spread
    )
    graph = on_graph(graph, skip)
    made = [replace(known[graph.origin.get(op.name, op.name)], op=op) for op in graph.ops]
    return made, graph.renamed


def _device_of(model: nn.Module) -> torch.device:
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise UsageError(
            f"the model's parameters are on several devices ({', '.join(sorted(map(str, devices)))}); "
            "capture wants a model on one device, or on 'meta'"
        )
    device = next(iter(devices), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _ties(model: nn.Module) -> dict[str, str]:
    """Parameter name -> the first name of the same tensor."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}
