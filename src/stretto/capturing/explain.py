"""Why a model cannot be captured, in the words of its author: the line of code, and the reason."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stretto.capturing.state import State
from stretto.errors import CaptureError, StrettoError
from stretto.parallelize.tensor import TensorParallel

WHERE = "stretto_where"
"""Attribute of an exception: the module that was running, and those that had been called."""

SHAPE_WORDS = ("size", "shape", "dim", "broadcast", "must match", "expanded", "out of bounds", "out of range")
"""What PyTorch says where tensors do not fit together."""

WHOLE = ("sequence", "replicated", "attributes")
"""Styles that leave a module's parameters whole."""

CONTROL_FLOW = (
    "control flow operators (torch.cond, while_loop, scan) and compiled regions cannot be captured: compute "
    "both sides and choose with torch.where, write a loop as one of Python, or call the body directly"
)

COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py", "distributed/nn/functional.py")
"""Files of PyTorch in which code is that communicates by itself."""

INTERNAL = "INTERNAL ASSERT"
"""What PyTorch says where it has failed itself."""

NAMED = 4
"""How many modules or parameters a message names."""


def at_fault(error: Exception, running: str, called: Collection[str]) -> None:
    """Note on an exception which module was running when it was raised."""
    if not hasattr(error, WHERE):
        setattr(error, WHERE, (running, frozenset(called)))


@contextlib.contextmanager
def explained(
    model: nn.Module,
    tensor: TensorParallel | None = None,
    passed: tuple[type[Exception], ...] = (StrettoError,),
    loss: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """While the context lasts, errors are `explain`ed, but those that are `passed`."""
    try:
        yield
    except passed:
        raise
    except Exception as error:
        raise explain(model, error, tensor, loss) from error


def explain(
    model: nn.Module,
    error: Exception,
    tensor: TensorParallel | None = None,
    loss: Callable[..., Any] | None = None,
) -> CaptureError:
    """Name the line of the user's code at which tracing failed, and say why in plain words. tensor: how the
    model is spread, which may be why; loss: the function that may hold parameters of its own."""
    own = Path(__file__).parent.parent
    rooms = (str(own / room) for room in ("backend", "capturing", "parallelize", "tensor", "loss.py"))
    ours = (str(Path(torch.__file__).parent), str(contextlib.__file__), *rooms)
    passed = traceback.extract_tb(error.__traceback__)
    frames = [f for f in passed if not f.filename.startswith((*ours, "<"))]
    where = ""
    if frames:
        where = f"{frames[-1].filename}:{frames[-1].lineno}: {(frames[-1].line or '').strip()}"
    running, called = getattr(error, WHERE, ("", frozenset()))
    at = f" at {where}" if where else f", in module {running}" if running else ""
    reason = _reason(error, [f.filename for f in passed])
    if LOOSE in reason:
        reason += _of_the_loss(model, loss)
    if frames and Path(frames[-1].filename).parts[-3:] in CANNOT_EDIT:
        reason += f"\n  {CANNOT_EDIT[Path(frames[-1].filename).parts[-3:]]}"
    if tensor is not None and not isinstance(error, StrettoError):
        reason += _spread_words(model, reason, tensor, running, called)
    return CaptureError(f"cannot capture {type(model).__name__}{at}\n  {reason}")


def _spread_words(
    model: nn.Module, reason: str, tensor: TensorParallel, running: str, called: Collection[str]
) -> str:
    """Where shapes do not fit: what is spread there, what is whole beside it, what to write into tp_plan.

    A number for each head, or a table of them, is whole on each rank, whose heads are a part of all.
    """
    if not any(word in reason.lower() for word in SHAPE_WORDS):
        return ""
    kinds = {name: style.kind for name, style in tensor.modules.items() if style.kind not in WHOLE}
    spread, size = list(kinds), tensor.size
    place = running.rpartition(".")[0] if running in kinds else running
    while place and not any(name.startswith(f"{place}.") for name in spread):
        place = place.rpartition(".")[0]
    if not place:
        skipped = [name for name in spread if name not in called]
        ends = list(dict.fromkeys((*skipped, *(n for n in spread if kinds[n] == "vocabulary"))))
        never = f" ({_listed(skipped)}: never called)" if skipped else ""
        return (
            f"\n  {_listed(ends or spread)} spread over tp = {size}{never}: code that uses such a module by "
            "its weight has a part of it, and makes a part of the features. Call the module, or write "
            f"{_entries(ends or spread)} into tp_plan, which keeps it whole"
        )
    inside = [name for name in spread if name.startswith(f"{place}.")]
    own = [name for name, _ in model.named_parameters() if name.startswith(f"{place}.")]
    whole = [name for name in own if name.rpartition(".")[0] not in kinds]
    beside = (
        f" {_listed(whole)} in it, whole on every rank, would have to be spread with them." if whole else ""
    )
    counts = "" if whole else _counts(model, place, reason, size)
    return (
        f"\n  {place} is computed in parts: {_listed(inside)}, spread over tp = {size}.{beside} Numbers "
        "for each head, and sizes of all heads in the code, do not fit a rank's part of them: take sizes "
        f"from tensors (x.shape), {counts}or write {_entries(inside)} into "
        "tp_plan, which keeps these modules whole"
    )


def _counts(model: nn.Module, place: str, reason: str, size: int) -> str:
    """What to write for integers of a module that are sizes in an error: they may count all heads."""
    sizes = set(map(int, re.findall(r"(?<![-\d.])\d+(?![\d.])", reason)))
    values = vars(model.get_submodule(place)).items()
    names = [n for n, v in values if type(v) is int and v in sizes and v > 1 and v % size == 0]
    return (
        f"write {_entries([place], 'attributes:' + ','.join(names))} if they count heads, " if names else ""
    )


def _entries(names: Sequence[str], style: str = "replicated") -> str:
    """Entries of a tp_plan, for all layers."""
    patterns = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return "{" + ", ".join(f"{pattern!r}: {style!r}" for pattern in patterns) + "}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


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
"""What the exporter's errors say, in plain words."""


def _of_the_loss(model: nn.Module, loss: Callable[..., Any] | None) -> str:
    """The parameters that the loss holds beside the model's, and how they are trained."""
    own = {id(parameter) for parameter in model.parameters()}
    held = {} if loss is None else State(("", loss)).named_tensors()
    loose = [name for name, x in held.items() if isinstance(x, nn.Parameter) and id(x) not in own]
    if not loose:
        return ""
    return (
        f"\n  the loss holds parameters that the model does not have ({_listed(loose)}): put model and loss "
        "into one module, capture that, and let loss(model, microbatch) call both, as in "
        'both = nn.ModuleDict({"model": model, "criterion": criterion}), '
        'loss=lambda m, mb: m["criterion"](m["model"](mb["x"]), mb["y"]); or, if they are not to be trained, '
        "give their values as a buffer of the model"
    )


def _reason(error: Exception, files: Sequence[str] = ()) -> str:
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
    if isinstance(error, AttributeError) and isinstance(error.obj, dict) and error.name in error.obj:
        return (
            f"{kind}: {text}: the batch's mappings are plain dicts in model and loss, whatever class they "
            f"were: read them by keys, [{error.name!r}]"
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
        return f'{kind}: {text}. A microbatch is of plain dicts, whatever classes the batch is of: mb["name"]'
    if INTERNAL in text:
        return (
            "PyTorch's tracer cannot take this call; of torch.func it takes grad, vmap, jvp, vjp, jacfwd, "
            "jacrev and hessian"
        )
    return f"{kind}: {text}" if text else kind
