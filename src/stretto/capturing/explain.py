"""Why a model or a batch cannot be captured, in the words of its author: the line of code, and the reason.

`check_model` and `check_batch` look before anything is traced, so that no tensor without a shape, or without
strides, comes further; `explained` turns the errors of a trace into `CaptureError`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from stretto.batch import tree
from stretto.capturing.state import PythonState
from stretto.errors import CaptureError, StrettoError, UsageError, listed

WHERE = "stretto_where"
"""Attribute of an exception: the module that was running."""

CONTROL_FLOW = (
    "control flow operators (torch.cond, while_loop, scan) and compiled regions cannot be captured: compute "
    "both sides and choose with torch.where, write a loop as one of Python, or call the body directly"
)

COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py", "distributed/nn/functional.py")
"""Files of PyTorch in which code is that communicates by itself."""

INTERNAL = "INTERNAL ASSERT"

WRAPPERS = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel)


def check_model(model: nn.Module) -> None:
    """Raises CaptureError that names the module, parameter or buffer."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise _refused(model, "it has a TorchScript module: give the Python module that was scripted")
        if isinstance(module, WRAPPERS):
            kind = type(module).__name__
            raise _refused(
                model,
                f"{name or 'the model'} is a {kind}, which communicates by itself: give the module in it "
                "(model.module), and dp to Parallel",
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _check_tensor(model, f"parameter {name!r}", parameter)
        if not parameter.is_leaf:
            raise _refused(
                model,
                f"parameter {name!r} is the result of a computation, and would never change: make it a "
                "parameter of its own (nn.Parameter(value.detach())), or compute it in the forward",
            )
    for name, buffer in model.named_buffers(remove_duplicate=False):
        _check_tensor(model, f"buffer {name!r}", buffer)


def check_batch(leaves: Mapping[str, Tensor]) -> None:
    """Raises UsageError that names the leaf."""
    for name, leaf in leaves.items():
        if leaf.is_nested or leaf.layout is not torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
            raise UsageError(
                f"batch leaf {name!r} is a {kind} tensor, which a plan does not have: give a dense one "
                "(to_dense(), to_padded_tensor(0.0) with a mask)"
            )
        tree.check_no_gradient(name, leaf)


def _check_tensor(model: nn.Module, what: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise _refused(
            model,
            f"{what} has no shape before the module's first call: call the model once with a batch like "
            "those that it will be given",
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise _refused(
            model,
            f"{what} is a sparse or nested tensor, which a plan does not have: make it dense (to_dense()), "
            "or keep its indices and values in two dense ones, and compute with index_select and index_add",
        )


def _refused(model: nn.Module, why: str) -> CaptureError:
    return CaptureError(f"cannot capture {type(model).__name__}\n  {why}")


def at_fault(error: Exception, running: str) -> None:
    """Note on an exception which module was running when it was raised."""
    if not hasattr(error, WHERE):
        setattr(error, WHERE, running)


@contextlib.contextmanager
def explained(
    model: nn.Module,
    passed: tuple[type[Exception], ...] = (StrettoError,),
    loss: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """While the context lasts, errors are `explain`ed, but those that are `passed`."""
    try:
        yield
    except passed:
        raise
    except Exception as error:
        raise explain(model, error, loss) from error


def explain(model: nn.Module, error: Exception, loss: Callable[..., Any] | None = None) -> CaptureError:
    """The line of the user's code at which tracing failed, and the reason. loss: the function that may have
    parameters of its own."""
    own = Path(__file__).parent.parent
    rooms = (str(own / room) for room in ("backend", "batch", "capturing", "parallelize", "tensor"))
    ours = (str(Path(torch.__file__).parent), str(contextlib.__file__), *rooms)
    passed = traceback.extract_tb(error.__traceback__)
    frames = [f for f in passed if not f.filename.startswith((*ours, "<"))]
    where = ""
    if frames:
        where = f"{frames[-1].filename}:{frames[-1].lineno}: {(frames[-1].line or '').strip()}"
    running = getattr(error, WHERE, "")
    at = f" at {where}" if where else f", in module {running}" if running else ""
    reason = _reason(error, [f.filename for f in passed])
    if LOOSE in reason:
        reason += _of_the_loss(model, loss)
    if frames and Path(frames[-1].filename).parts[-3:] in CANNOT_EDIT:
        reason += f"\n  {CANNOT_EDIT[Path(frames[-1].filename).parts[-3:]]}"
    return CaptureError(f"cannot capture {type(model).__name__}{at}\n  {reason}")


CANNOT_EDIT: dict[tuple[str, ...], str] = {
    ("transformers", "integrations", "moe.py"): (
        "this is how transformers multiplies groups of tokens by experts, and no tracer follows what older "
        "releases do: set model.config.experts_implementation = 'batched_mm', or update transformers"
    )
}
"""Lines of a library's file that cannot be captured, and how a user goes around them."""

LOOSE = (
    "the code uses a tensor that is neither a parameter, nor a buffer, nor in the batch: give it to the "
    "module with register_buffer"
)

COMMUNICATES = (
    "the code communicates by torch.distributed, which a plan does not have: leave it out, and give dp, tp "
    "or ep to Parallel, which sums losses, gradients and what is sharded over ranks"
)

_REASONS = {
    "DataDependentOutputException": "the code asks for the value of a tensor",
    "GuardOnDataDependentSymNode": "the code asks for the value of a tensor",
    "DynamicOutputShapeException": "a tensor's shape depends on values",
}


def _of_the_loss(model: nn.Module, loss: Callable[..., Any] | None) -> str:
    own = {id(parameter) for parameter in model.parameters()}
    tensors = {} if loss is None else PythonState(("", loss)).named_tensors()
    loose = [name for name, x in tensors.items() if isinstance(x, nn.Parameter) and id(x) not in own]
    if not loose:
        return ""
    return (
        f"\n  the loss has parameters that the model does not have ({listed(loose)}): put model and loss "
        "into one module, capture that, and let loss(model, microbatch) call both, as in "
        'both = nn.ModuleDict({"model": model, "criterion": criterion}), '
        'loss=lambda m, mb: m["criterion"](m["model"](mb["x"]), mb["y"]); or, if they are not to be trained, '
        "give their values as a buffer of the model"
    )


def _reason(error: Exception, files: Sequence[str] = ()) -> str:
    kind = type(error).__name__
    try:
        text = (str(error).strip().splitlines() or [""])[0]
    except Exception:  # of an exception of the user's that cannot print itself
        text = ""
    asked = _REASONS.get(kind)
    if asked is None and "Tensor.__format__" in text:
        asked = "the code writes the value of a tensor into a text"
    if asked is None and text.startswith(".numpy()"):
        asked = "the code asks for the values of a tensor (.numpy())"
    if isinstance(error, AttributeError) and isinstance(error.obj, dict) and error.name in error.obj:
        return (
            f"{kind}: {text}: what the batch has there is a dict in model and loss, as all mappings are that "
            f"cannot be written: read it by keys, [{error.name!r}]"
        )
    if asked is not None:
        return (
            f"{asked}, and at capture there are none: replace `.item()`, `if tensor:`, "
            "boolean indexing and their like by tensor operations such as torch.where"
        )
    if "convert all Tensors to FakeTensors" in text:
        return LOOSE
    inside = bool(files) and files[-1].startswith(str(Path(torch.__file__).parent))
    if inside and any(file.endswith(COLLECTIVES) for file in files):
        return COMMUNICATES
    operators = any("_higher_order_ops" in file for file in files) and kind != "NotImplementedError"
    if kind == "UncapturedHigherOrderOpError" or (inside and operators):
        return CONTROL_FLOW
    if isinstance(error, StrettoError):
        return text
    if text.startswith("'dict' object has no attribute"):
        return f'{kind}: {text}. Read a microbatch of dicts by keys: mb["name"]'
    if INTERNAL in text:
        return (
            "PyTorch's tracer cannot take this call; of torch.func it takes grad, vmap, jvp, vjp, jacfwd, "
            "jacrev and hessian"
        )
    return f"{kind}: {text}" if text else kind
