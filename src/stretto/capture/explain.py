"""Why a model cannot be captured, in the words of its author: the line of code, and the reason."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path

import torch
from torch import nn

from stretto.errors import CaptureError, StrettoError


def explain(model: nn.Module, error: Exception) -> CaptureError:
    """Name the line of the user's code at which tracing failed, and say why in plain words."""
    own = Path(__file__).parent.parent
    rooms = (str(own / room) for room in ("capture", "parallelize", "tensor"))
    ours = (str(Path(torch.__file__).parent), str(contextlib.__file__), *rooms)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    where = ""
    if frames:
        where = f"{frames[-1].filename}:{frames[-1].lineno}: {(frames[-1].line or '').strip()}"
    at = f" at {where}" if where else ""
    return CaptureError(f"cannot capture {type(model).__name__}{at}\n  {_reason(error)}")


OURS = ("loss(model, microbatch)", "the loss", "the model writes", "the graph has")
"""How the texts begin that `torch_adapter` raises."""

_REASONS = {
    "DataDependentOutputException": "the code asks for the value of a tensor",
    "GuardOnDataDependentSymNode": "the code asks for the value of a tensor",
    "DynamicOutputShapeException": "a tensor's shape depends on values",
}
"""What the exporter's errors say, in plain words."""


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    try:
        text = (str(error).strip().splitlines() or [""])[0]
    except Exception:  # of an exception of the user's that cannot tell itself
        text = ""
    asked = _REASONS.get(kind)
    if asked is None and "Tensor.__format__" in text:
        asked = "the code writes the value of a tensor into a text"
    if asked is None and text.startswith(".numpy()"):
        asked = "the code asks for the values of a tensor (.numpy())"
    if asked is not None:
        return (
            f"{asked}, and at capture there are none: replace `.item()`, `if tensor:`, "
            "boolean indexing and their like by tensor operations such as torch.where"
        )
    if "convert all Tensors to FakeTensors" in text:
        return (
            "the code uses a tensor that is neither a parameter, nor a buffer, nor in the batch: "
            "give it to the module with register_buffer"
        )
    if kind == "UncapturedHigherOrderOpError":
        return "control flow operators cannot be captured: compute both sides and choose with torch.where"
    if isinstance(error, StrettoError) or text.startswith(OURS):
        return text
    return f"{kind}: {text}" if text else kind
