"""From a model and a loss to the ops of a whole training step, as plain data.

    1. The model's parameters and buffers, and one microbatch, become fake tensors (no storage, no device).
    2. Forward, loss and backward are exported as one functional graph of dispatcher calls.
    3. Every node becomes an `Op`; what it means (parameter, gradient, buffer update, loss) goes beside it.
    4. Passes improve the graph; ops that nothing needs are dropped.

The result knows no stages: `stretto.capture.split` chooses them, `stretto.capture.stages` cuts.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from stretto.capture import torch_adapter, tree
from stretto.capture.absent_cuda import CudaChoices, with_cuda_results
from stretto.capture.expand import Step, TracedOp, expand, named
from stretto.capture.explain import explain
from stretto.capture.repeat import NotRepeatedError, layers_of
from stretto.errors import CaptureError, UsageError
from stretto.ir.program import CHUNK, INDEX, WAIT, Arg, Const, Constant, Op, Ref, Shard, TensorSpec
from stretto.ir.varying import varying
from stretto.parallelize.ops import NAMESPACE
from stretto.parallelize.tensor import AXIS as TENSOR_AXIS
from stretto.parallelize.tensor import TensorParallel, local_shape, spread
from stretto.passes import Graph, run_passes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Traced:
    """One microbatch's forward and backward. segments: the module that runs in each segment.

    parameters: name -> (spec, first name of its tie, value name of its gradient or None).
    buffers: name -> (spec, value name of its update or None).
    shards, partial: of parameters, as in `ir.program.Parameter`.
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
    shards: Mapping[str, Shard] = field(default_factory=dict)
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor, fake or real."""
    stride = None if tensor.is_contiguous() else tuple(int(s) for s in tensor.stride())
    return TensorSpec(tuple(int(n) for n in tensor.shape), dtype_name(tensor.dtype), stride)


def trace(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    *,
    microbatches: int = 1,
    param_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    tensor: TensorParallel | None = None,
    equal_layers: bool = True,
) -> Traced:
    """Trace `loss(model, microbatch)` and its backward without running it.

    batch: the whole batch or its like (only shapes and dtypes are read); a microbatch is its
    `microbatches`-th part along the first dim. param_dtype: compute with parameters (and floating-point
    inputs) of this dtype. device: where the step will run; the model's own by default, "cpu" for "meta"; for
    "cuda" there need not be one here (`absent_cuda` says what is chosen then). tensor: trace one rank's part
    of a model that is spread so; None traces the whole. equal_layers: whether layers that are equal are
    traced twice and repeated (`repeat`); False traces every layer, for the same result.

    Raises CaptureError that names the source line and the reason; UsageError for a batch that does not fit.
    """
    attempt = partial(_trace, model, batch, loss, microbatches, param_dtype, device, tensor)
    if equal_layers:
        try:
            return attempt(repeats=True)
        except (NotRepeatedError, CaptureError) as reason:
            # Whether a model can be captured is for the trace of all of it to say.
            _log.debug("all layers are traced: %s", reason)
    return attempt(repeats=False)


def _trace(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    microbatches: int,
    param_dtype: torch.dtype | None,
    device: torch.device | str | None,
    tensor: TensorParallel | None,
    repeats: bool,
) -> Traced:
    """Steps 1 to 4; with `repeats`, raises NotRepeatedError where only the trace of all layers is right."""
    shapes = tree.microbatch_shapes(batch, microbatches)
    leaves = tree.flatten(batch)
    at = torch.device(device) if device is not None else _device_of(model)
    device_kind = at.type
    absent = device_kind == "cuda" and not torch.cuda.is_available()
    if absent:
        at = torch.device("cpu")
    mode = torch_adapter.fake_mode()

    def fake_leaf(name: str, leaf: torch.Tensor) -> torch.Tensor:
        dtype = leaf.dtype
        if param_dtype is not None and dtype.is_floating_point:
            dtype = param_dtype
        with mode:
            return torch.empty(shapes[name], dtype=dtype, device=at)

    fakes = [fake_leaf(name, leaf) for name, leaf in leaves.items()]
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise CaptureError(
            f"cannot capture {type(model).__name__}\n  it holds a TorchScript module: give the Python module "
            "that was scripted"
        )
    ties = _ties(model)
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    own_dtypes = {n: dtype_name(p.dtype) for n, p in model.named_parameters(remove_duplicate=False)}
    with (
        torch_adapter.fake_state(model, mode, at, param_dtype, _parts(model, tensor)),
        nullcontext() if tensor is None else spread(model, tensor),
    ):
        state = {
            **{n: spec_of(p) for n, p in model.named_parameters(remove_duplicate=False)},
            **{n: spec_of(b) for n, b in model.named_buffers(remove_duplicate=False)},
        }
        layers = layers_of(model) if repeats else None
        if repeats and layers is None:
            raise NotRepeatedError("no layers are equal")
        try:
            with CudaChoices() if absent else nullcontext():
                joint = torch_adapter.export_joint(model, loss, tree.rebuilder(batch), fakes, mode, layers)
        except NotRepeatedError:
            raise
        except Exception as error:
            raise explain(model, error) from error

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

    ops, constants = _convert(joint, names)
    if absent:
        made = with_cuda_results(traced.op for traced in ops)
        ops = [replace(traced, op=op) for traced, op in zip(ops, made, strict=True)]
    gradients: dict[str, str | None] = {}
    kept: dict[str, str] = {}
    for kind, key, out in joint.outputs:
        if kind == "grad" and key not in frozen:
            gradients[key] = None if out is None else names[out]
        elif kind in ("loss", "update") and out is not None:
            kept[kind if kind == "loss" else f"buffer/{key}"] = names[out]
    step = Step(tuple(ops), gradients, kept)
    step = named(step) if layers is None else expand(step, layers.calls, joint.segments, constants)
    ops, gradients, kept = list(step.ops), dict(step.grads), dict(step.kept)
    for key, value in gradients.items():
        parameters[key] = (*parameters[key][:2], value)
    for key in buffers:
        buffers[key] = (buffers[key][0], kept.get(f"buffer/{key}"))
    loss_value = kept["loss"]
    roots = {*(value for value in gradients.values() if value is not None), *kept.values()}
    ops = _live(_passed(_live(ops, roots), roots), roots)
    shards = {} if tensor is None else dict(tensor.shards)
    parts = _partial(ops, parameters, buffers, shards, loss_value) if tensor is not None else {}
    used = {name for traced in ops for name in traced.op.uses}
    return Traced(
        name=type(model).__name__,
        ops=tuple(ops),
        segments=tuple(joint.segments),
        parameters=parameters,
        buffers=buffers,
        constants=tuple(c for c in constants if f"const/{c.name}" in used),
        batch=tuple((name, spec_of(fake)) for name, fake in zip(leaf_names, fakes, strict=True)),
        loss=loss_value,
        param_dtype=None if param_dtype is None else dtype_name(param_dtype),
        own_dtypes=own_dtypes,
        device=device_kind,
        fixed=tuple(tree.fixed(batch).items()),
        shards=shards,
        partial=parts,
    )


def _parts(model: nn.Module, tensor: TensorParallel | None) -> dict[int, tuple[int, ...]]:
    """id of a parameter -> the shape of a rank's part."""
    if tensor is None:
        return {}
    return {
        id(p): local_shape(p.shape, tensor.shards[name], tensor.size)
        for name, p in model.named_parameters(remove_duplicate=False)
        if name in tensor.shards
    }


def _passed(ops: list[TracedOp], roots: set[str]) -> list[TracedOp]:
    """Step 4: after all passes; what a pass made stands where the op stood that it replaces."""
    known = {traced.op.name: traced for traced in ops}
    graph = run_passes(Graph(tuple(traced.op for traced in ops), frozenset(roots)))
    return [replace(known[graph.origin.get(op.name, op.name)], op=op) for op in graph.ops]


def _partial(
    ops: list[TracedOp],
    parameters: Mapping[str, tuple[TensorSpec, str, str | None]],
    buffers: Mapping[str, tuple[TensorSpec, str | None]],
    shards: Mapping[str, Shard],
    loss: str,
) -> dict[str, tuple[str, ...]]:
    """Parameter -> axes along which its gradient is a part of the sum (`ir.varying` says why).

    Raises CaptureError where a gradient is partly a part and partly the whole, or where the loss differs.
    """
    axis = TENSOR_AXIS
    differs = varying((t.op for t in ops), {f"param/{name}" for name in shards}, axis)
    if loss in differs:
        raise CaptureError(
            f"the loss differs between {axis} ranks: the loss function uses what only a part of the model "
            "made. Name the module whose output it takes 'colwise_gather_output', or leave it out of tp_plan"
        )
    by_name = {traced.op.name: traced.op for traced in ops}
    for name, (_, update) in buffers.items():
        if update in differs:
            raise CaptureError(
                f"buffer {name!r} would get other values on every {axis} rank: what is written to it was "
                "made from a part. Keep what writes it out of tp_plan, and do without sequence_parallel"
            )
    found: dict[str, tuple[str, ...]] = {}
    for name, (_, _, value) in parameters.items():
        if value is None or name in shards or value not in differs:
            continue
        whole = [leaf for leaf in _addends(value, by_name) if leaf not in differs]
        if whole:
            raise CaptureError(
                f"parameter {name!r} is used in parts by {axis} ranks in one place, and wholly in another: "
                "its gradient cannot be summed. Give all modules that use it one style in tp_plan"
            )
        found[name] = (axis,)
    _refuse_mixed(ops, by_name, differs)
    return found


SUMS = ("aten.add.Tensor", "aten.cat.default", "aten.stack.default")
"""Ops that put gradients of several uses of one value together."""


def _refuse_mixed(ops: list[TracedOp], by_name: Mapping[str, Op], differs: set[str]) -> None:
    """Raises CaptureError where a gradient is put together from a whole one and from a part of a sum: a value
    is used both wholly and, with no copy or gather between, beside what is spread."""
    gradients = {"tangent"}
    for traced in ops:
        op = traced.op
        if gradients.isdisjoint(op.uses):
            continue
        gradients.add(op.name)
        if op.target not in SUMS:
            continue
        addends = [name for name in op.uses if name in gradients]
        parts = [name for name in addends if name in differs]
        if parts and len(parts) < len(addends):
            module = next((by_name[p].module for p in parts if by_name[p].module), op.module)
            raise CaptureError(
                f"{module or 'the model'} uses a value that all {TENSOR_AXIS} ranks hold whole beside one "
                "that is spread over them, so its gradient is partly a part and partly the whole. Give the "
                "module that makes the one a style ('colwise'), or the other's 'colwise_gather_output'"
            )


def _addends(value: str, ops: Mapping[str, Op]) -> list[str]:
    """The values whose sum `value` is, through additions and views."""
    op = ops.get(value)
    if op is None:
        return [value]
    if op.target == "aten.add.Tensor" and not op.kwargs:
        return [leaf for name in op.uses for leaf in _addends(name, ops)]
    if op.alias is not None and len(op.uses) == 1 and op.target != "getitem":
        return _addends(op.uses[0], ops)
    return [value]


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


def _convert(
    joint: torch_adapter.JointGraph, names: dict[torch.fx.Node, str]
) -> tuple[list[TracedOp], list[Constant]]:
    """Step 3. Everything after the first op that depends on the tangent belongs to the backward."""
    ops: list[TracedOp] = []
    constants: list[Constant] = []
    roots: dict[str, str] = {}
    backward = False
    tainted = {node for node, (kind, _) in joint.inputs.items() if kind == "tangent"}
    for node in joint.module.graph.nodes:
        segment = torch_adapter.segment_of(node)
        module = joint.segments[segment] if segment is not None else ""
        try:
            if node.op == "get_attr":
                constants.append(_constant(joint.module, node))
                names[node] = f"const/{node.target}"
                continue
            if node.op != "call_function" or ("val" not in node.meta and not node.users):
                continue  # an assertion on values makes nothing that anyone needs
            names[node] = node.name
            op = _op(node, names, roots)
        except CaptureError as error:
            raise CaptureError(f"cannot capture {module or 'the model'}: {error}") from None
        backward = backward or any(source in tainted for source in node.all_input_nodes)
        roots[op.name] = op.alias if op.alias is not None else op.name
        ops.append(TracedOp(replace(op, module=module), segment, backward))
    return ops, constants


def _op(node: torch.fx.Node, names: Mapping[torch.fx.Node, str], roots: Mapping[str, str]) -> Op:
    args = tuple(_arg(a, names, node) for a in node.args)
    kwargs = tuple((key, _arg(value, names, node)) for key, value in node.kwargs.items())
    value = node.meta["val"]
    parts = value if isinstance(value, (tuple, list)) else (value,)
    outputs = tuple(spec_of(part) if isinstance(part, torch.Tensor) else None for part in parts)
    first = next((a.name for a in args if isinstance(a, Ref)), None)
    if node.target is operator.getitem:
        # A part of a tuple of views is a view; a part of a tuple of new tensors owns its bytes.
        assert first is not None
        root = roots[first]
        alias = root if root != first else None
        return Op(node.name, "getitem", args, kwargs, outputs, alias)
    if str(node.target).startswith(f"{NAMESPACE}."):
        return _communication(node, args, outputs, roots)
    if not torch_adapter.is_dispatched(node.target):
        raise CaptureError(
            f"the model calls {node.target}, which is not an op of the dispatcher; "
            "control flow operators and compiled regions cannot be captured: call their body directly"
        )
    alias = None
    if first is not None and torch_adapter.returns_view(node.target):
        alias = roots.get(first, first)
    return Op(
        name=node.name,
        target=str(node.target),
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        alias=alias,
        random=torch_adapter.draws_random(node.target, node.args, node.kwargs),
        flops=_flops(node),
    )


def _communication(
    node: torch.fx.Node,
    args: tuple[Arg, ...],
    outputs: tuple[TensorSpec | None, ...],
    roots: Mapping[str, str],
) -> Op:
    """An op of `stretto.parallelize.ops` in the words of programs."""
    word = str(node.target).split(".")[1]
    if word == "axis_index":
        return Op(node.name, INDEX, args[1:], (), outputs)
    if word == "axis_chunk":
        return Op(node.name, CHUNK, args, (), outputs, roots.get(args[0].name, args[0].name))
    if word == "wait":
        return Op(node.name, WAIT, args, (), outputs, args[0].name)
    return Op(node.name, f"comm.{word}", args, (), outputs)


def _arg(value: Any, names: Mapping[torch.fx.Node, str], node: torch.fx.Node) -> Arg:
    if isinstance(value, torch.fx.Node):
        return Ref(names[value])
    if isinstance(value, (tuple, list)):
        return tuple(_arg(item, names, node) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return Const("dtype", dtype_name(value))
    if isinstance(value, torch.device):
        # Plans are free of any machine: "job" stands for the device on which the rank computes.
        return Const("device", "job")
    if isinstance(value, torch.layout):
        return Const("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Const("memory_format", str(value).removeprefix("torch."))
    if isinstance(value, torch.SymInt):
        raise CaptureError("an op's argument depends on data; shapes must be known")
    raise CaptureError(f"cannot write down the argument {value!r} of {node.target}")


def _constant(module: torch.fx.GraphModule, node: torch.fx.Node) -> Constant:
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    tensor = torch_adapter.constant_value(found) if isinstance(found, torch.Tensor) else None
    if tensor is None:
        raise CaptureError("the model's code holds a constant whose elements are not known")
    return Constant(str(node.target), spec_of(tensor), tuple(tensor.flatten().tolist()))


def _flops(node: torch.fx.Node) -> int:
    """Floating-point operations by PyTorch's formulas; its attention formula serves all attention ops."""
    assert torch_adapter.is_dispatched(node.target)
    packet = node.target.overloadpacket

    def shape(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            found = value.meta.get("val")
            return found.shape if isinstance(found, torch.Tensor) else found
        return value

    name = packet.__name__
    if packet in flop_registry:
        kwargs = {key: shape(value) for key, value in node.kwargs.items()}
        out = node.meta["val"]
        out_shape = (
            tuple(o.shape if isinstance(o, torch.Tensor) else None for o in out)
            if isinstance(out, (tuple, list))
            else out.shape
        )
        raw = getattr(flop_registry[packet], "_get_raw", False)
        if not raw:
            shapes = [shape(a) for a in node.args]
            formula = getattr(flop_registry[packet], "__wrapped__", flop_registry[packet])
            return int(formula(*shapes, out_shape=out_shape, **kwargs))
    if "scaled_dot_product" in name:
        shapes = [s for s in map(shape, node.args) if isinstance(s, torch.Size) and len(s) == 4]
        if name.endswith("backward"):
            return int(sdpa_backward_flop_count(*shapes[:4]))  # type: ignore[no-untyped-call]
        return int(sdpa_flop_count(*shapes[:3]))  # type: ignore[no-untyped-call]
    return 0


def _live(ops: list[TracedOp], roots: set[str]) -> list[TracedOp]:
    """Step 4: ops from which a root can be reached, in order."""
    needed = set(roots)
    kept: list[TracedOp] = []
    for traced in reversed(ops):
        if traced.op.name in needed:
            needed.update(traced.op.uses)
            kept.append(traced)
    return kept[::-1]
