"""The room of capture that knows PyTorch's private corners (2.11 to 2.13), with `torch_state_adapter`.

What it uses, so that the next release breaks this file alone, with a test for each:

    torch._functorch.aot_autograd.aot_export_joint_with_descriptors   forward and backward as one graph
    torch._functorch._aot_autograd.descriptors                        what each input and output means
    torch._subclasses.fake_tensor.FakeTensorMode                      tensors without storage
    torch.fx.traceback.current_meta                                   marks that reach the backward nodes
    torch._ops.OpOverload and its _schema                             what is an op, which results are views
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._functorch._aot_autograd import descriptors as described
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode

from stretto.backend.observe_adapter import observe, watched
from stretto.batch.loss import Loss, loss_and_count, metrics_of
from stretto.capturing.calls_adapter import OpsSeen, buffers_in_place, replaced
from stretto.capturing.carried import ForwardCalls
from stretto.capturing.equal import NotRepeatedError
from stretto.capturing.explain import at_fault
from stretto.capturing.graph import COUNT, GRAD, LOSS, UPDATE, JointGraph
from stretto.capturing.known import Known
from stretto.capturing.masks_adapter import masks_recognised
from stretto.capturing.mesh_program import MeshProgram, OnMeshes
from stretto.capturing.read import Reads
from stretto.capturing.repeat import Layers
from stretto.capturing.substitutes import PyTorchCalls, in_float32, losses_in_float32
from stretto.capturing.torch_state_adapter import hooks_that_change, tracing_state
from stretto.errors import CaptureError

SEGMENT = "stretto_segment"
"""The annotation's key. Its value counts how often execution entered or left a module so far."""


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shape, dtype and device, and no storage."""
    return FakeTensorMode()


def fake_state(
    module: nn.Module,
    mode: FakeTensorMode,
    device: torch.device,
    param_dtype: torch.dtype | None,
    parts: Mapping[int, tuple[int, ...]] | None = None,
) -> AbstractContextManager[None]:
    """Put fake tensors on `device` in the place of all parameters and buffers while the context lasts.

    Ties stay ties. The originals, of whatever device ("meta" too), are put back untouched.
    param_dtype: dtype of the fake floating-point parameters; None keeps theirs.
    parts: id of a parameter -> the shape of a rank's part of it.
    """
    shapes = parts or {}

    def fake(_name: str, tensor: torch.Tensor) -> torch.Tensor:
        parameter, dtype = isinstance(tensor, nn.Parameter), tensor.dtype
        if parameter and param_dtype is not None and dtype.is_floating_point:
            dtype = param_dtype
        with mode:
            if id(tensor) in shapes:
                made = torch.empty(shapes[id(tensor)], dtype=dtype, device=device)
            else:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
            return nn.Parameter(made, requires_grad=tensor.requires_grad) if parameter else made

    return replaced(module, fake)


class _Segments:
    """Numbers the stretches of execution between entering and leaving modules, as annotations on nodes.

    The annotation is written straight into the tracer's current metadata: segments follow one another and
    do not nest, so `annotate` contexts would have to be left and entered at every module's door.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.borders: dict[int, int] = {}
        self._running: list[str] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """One run of the forward, from segment 0; nothing outside it is annotated."""
        self.names.clear()
        self.borders.clear()
        self._running.clear()
        try:
            self._switch()
            yield
        except Exception as error:
            at_fault(error, self._running[-1] if self._running else "")
            raise
        finally:
            fx_traceback.current_meta.pop("custom", None)

    @contextmanager
    def hooks(self, module: nn.Module) -> Iterator[None]:
        handles = []
        for name, sub in module.named_modules():

            def enter(_module: nn.Module, _args: Any, name: str = name) -> None:
                self._running.append(name)
                self._switch()

            def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
                self._running.pop()
                self._switch()

            handles.append(sub.register_forward_pre_hook(enter, prepend=True))
            handles.append(sub.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def follow(self, names: Sequence[str]) -> None:
        """Number stretches in which nothing is executed, and go on in the last of them."""
        self.names.extend(names)
        self._mark()

    def border(self, place: int) -> None:
        """Execution goes on at another mesh."""
        self._switch()
        self.borders.setdefault(place, len(self.names) - 1)

    def _switch(self) -> None:
        self.names.append(self._running[-1] if self._running else "")
        self._mark()

    def _mark(self) -> None:
        fx_traceback.current_meta["custom"] = {SEGMENT: len(self.names) - 1}


Leaves = Sequence[torch.Tensor]


class _ModelAndLoss(nn.Module):
    """Model and loss as one module whose inputs are the microbatch's tensors. run: (buffers, leaves) -> its
    results."""

    def __init__(self, model: nn.Module, run: Callable[[Mapping[str, Any], Leaves], Any]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self, *leaves: torch.Tensor) -> Any:
        return self._run(self._buffers, leaves)


def _check_loss(loss: torch.Tensor, function: Loss) -> None:
    code = getattr(function, "__code__", None)
    where = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
    if loss.is_complex():
        raise CaptureError(f"the loss{where} is a complex number: return a real one")
    if not loss.requires_grad:
        raise CaptureError(
            f"the loss{where} does not depend on any parameter that requires a gradient (all are "
            "frozen, or it is computed under torch.no_grad, of detached values or of integers)"
        )


def export_joint(
    model: nn.Module,
    loss: Loss,
    rebuild: Callable[[Sequence[torch.Tensor]], Any],
    leaves: Sequence[torch.Tensor],
    mode: FakeTensorMode,
    layers: Layers | None = None,
    meshes: OnMeshes | None = None,
    float32_losses: bool = False,
) -> tuple[JointGraph, Reads]:
    """Forward, loss and backward of one microbatch as one functional graph, and what of Python they read. All
    tensors are fake.

    layers: the equal layers that are not all traced; `stretto.capturing.expand` then gives the full graph.
    meshes: where a program on several meshes lies.
    float32_losses: whether losses of half precision are taken in float32 (`stretto.capturing.substitutes`).
    """
    segments = _Segments()
    program = None if meshes is None else MeshProgram(meshes, segments.border)
    calls = ForwardCalls(model, loss, () if layers is None else layers.calls)
    values = Known()
    number: float | None = None

    def run(left: Mapping[str, Any], given: Leaves) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        nonlocal number
        if layers is not None:
            layers.begin(segments, values, calls.reads)
        with (
            calls.one(left),
            nullcontext() if program is None else program.state(model),
            segments.forward(),
            watched(),
            buffers_in_place(model),
            PyTorchCalls(losses_in_float32) if float32_losses else nullcontext(),
            masks_recognised(values, calls.substitutes(left)),
            OpsSeen() as seen,
        ):
            returned = loss(model, rebuild(given))
            value, count = loss_and_count(returned, loss)
            for name, one in metrics_of(returned, loss):
                observe(name, one)
            if seen.infos and layers is not None:
                raise NotRepeatedError("a layer asks for more than it returns")
            value = seen.not_a_number(in_float32(value) if float32_losses else value)
            if program is not None:
                value = program.loss(value)
                count = program.loss(count) if isinstance(count, torch.Tensor) else count
        _check_loss(value, loss)
        if isinstance(count, torch.Tensor):
            return value.reshape(()), count.reshape(()) if count.dim() else count
        number = count
        return value.reshape(())

    step = _ModelAndLoss(model, run)

    def export(left: Mapping[str, torch.Tensor]) -> JointGraph:
        for name, tensor in left.items():
            step.register_buffer(name, tensor)
        return replace(_exported(step, leaves, segments), count=number)

    with (
        _exporting(mode),
        segments.hooks(model),
        nullcontext() if layers is None else layers.installed(),
        nullcontext() if program is None else program.installed(),
        hooks_that_change(model),
        calls,
    ):
        joint = export({})
        known = [] if layers is None else list(layers.calls)
        calls.check(joint, export, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype))
        if layers is not None:
            layers.calls[:] = known
    return joint, calls.reads


def export_call(module: nn.Module, leaves: Sequence[torch.Tensor], mode: FakeTensorMode) -> JointGraph:
    """A module's forward, and its backward as one graph with it. All tensors are fake; gradients are those of
    its parameters, and of leaves that require one."""

    def run(_buffers: Mapping[str, Any], given: Leaves) -> Any:
        with watched():
            return module(*given)

    with _exporting(mode):
        return _exported(_ModelAndLoss(module, run), leaves, _Segments())


@contextmanager
def _exporting(mode: FakeTensorMode) -> Iterator[None]:
    with (
        torch.enable_grad(),  # whatever the caller switched off, there is a backward to capture
        mode,
        tracing_state(),
        fx_traceback.preserve_node_meta(),
        warnings.catch_warnings(),
    ):
        # PyTorch traces the backward in anomaly mode. Whatever is raised there, Ctrl-C too, it then calls an
        # error of an op "with the traceback of its forward", which here is empty.
        warnings.filterwarnings("ignore", "Error detected in ")
        yield


def _exported(step: nn.Module, leaves: Leaves, segments: _Segments) -> JointGraph:
    with ExitStack() as stack:
        module = aot_export_joint_with_descriptors(stack, step, tuple(leaves)).graph_module
    inputs = {node: _input(node.meta["desc"]) for node in module.graph.find_nodes(op="placeholder")}
    (output,) = module.graph.find_nodes(op="output")
    pairs = zip(output.meta["desc"], output.args[0], strict=True)
    outputs = {_output(desc): node for desc, node in pairs if desc is not None}
    made = {root: node for root, node in outputs.items() if node is not None}
    return JointGraph(module, inputs, made, list(segments.names), dict(segments.borders))


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def _input(desc: Any) -> str:
    if isinstance(desc, described.ParamAOTInput):
        return f"param/{_plain(desc.target)}"
    if isinstance(desc, described.BufferAOTInput):
        return f"buffer/{_plain(desc.target)}"
    if isinstance(desc, described.PlainAOTInput):
        return f"batch/{desc.idx}"
    if isinstance(desc, described.TangentAOTInput):
        return "tangent"
    raise CaptureError(f"the graph has an input of a kind that is not supported: {desc}")


def _output(desc: Any) -> str:
    if isinstance(desc, described.PlainAOTOutput):
        return (LOSS, COUNT)[desc.idx]
    if isinstance(desc, described.GradAOTOutput):
        return f"{GRAD}{_input(desc.grad_of).removeprefix('param/')}"
    if isinstance(desc, described.InputMutationAOTOutput):
        kind, _, name = _input(desc.mutated_input).partition("/")
        if kind == "batch":
            raise CaptureError(
                f"the model writes into the batch in place (tensor {int(name) + 1} of it); "
                "let it write into a copy (x = x.clone())"
            )
        if kind != "buffer":
            raise CaptureError(
                f"the model writes into its {kind} {name!r} in the forward (nn.Embedding with max_norm does "
                "so, too): write into a copy, or into a buffer"
            )
        return f"{UPDATE}{name}"
    raise CaptureError(f"the graph has an output of a kind that is not supported: {desc}")


def mark_of(node: torch.fx.Node, key: str) -> Any:
    """What the node, forward or backward, is marked with; None where it is not. key: `SEGMENT` (sums of
    gradients have none)."""
    return (node.meta.get("custom") or {}).get(key)
