"""What of a model and a batch cannot be captured whatever the code does, each with what to do instead.

Looked at before anything is traced, so that no tensor without a shape, or without strides, comes further.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stretto.batch import tree
from stretto.errors import CaptureError, UsageError

WRAPPERS = (nn.parallel.DistributedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel)


def check_model(model: nn.Module) -> None:
    """Raises CaptureError that names the module, parameter or buffer."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise _refused(model, "it holds a TorchScript module: give the Python module that was scripted")
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
            "or hold its indices and values in two dense ones, and compute with index_select and index_add",
        )


def _refused(model: nn.Module, why: str) -> CaptureError:
    return CaptureError(f"cannot capture {type(model).__name__}\n  {why}")
