"""Along which dims of its tensors an op can be computed part by part.

A dim is free if what the op gives at one index of it depends on nothing at another: of `cumsum(x, dim)` all
dims but `dim`. Which they are follows from the op's rule in the one table of rules (`stretto.ir.dims`): a
label that need not be whole is one. Of a sum over a label each rank has an addend.

Ops are taken from a list: those whose arguments do not say sizes, which would be those of the whole. An op
without free dims is computed on whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stretto.ir.dim_labels import SUMMED, Dims, broadcast, labels_of, results_along
from stretto.ir.dims import POOLS, dims_of
from stretto.ir.program import Op, Ref, TensorSpec
from stretto.tensor.dtensor_adapter import Meta
from stretto.tensor.losses import BACKWARD_OF_ELEMENTS, NONE, OF_ELEMENTS, reduction_of

IN_PARTS = frozenset(
    f"""cumsum cumprod logcumsumexp cummax cummin sort topk kthvalue median nanmedian mode argsort argmax
    argmin max min index_select index_fill index_add index_copy index_reduce gather scatter scatter_add
    scatter_reduce index index_put _index_put_impl constant_pad_nd flip roll tril triu nll_loss_forward
    nll_loss_backward nll_loss2d_forward nll_loss2d_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward {POOLS}""".split()
)
"""Ops by name, all of their overloads that have a rule, and those in place."""


CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
"""Their batch is free: of a weight's and a bias' gradient each rank has an addend."""


@dataclass(frozen=True, slots=True)
class FreeDim:
    """One free dim of an op. arguments: which dim it is of each argument that is on a mesh, in their order;
    None: not a dim of that one. results: the same for each result, or `SUMMED`."""

    arguments: tuple[int | None, ...]
    results: tuple[int | str | None, ...]


def free_dims(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Meta | None]
) -> list[FreeDim]:
    """The free dims of a call; none if the op is not in the list."""
    if any(argument.is_out for argument in op._schema.arguments):
        return []
    name, _, overload = str(op).removeprefix("aten.").partition(".")
    name = name if name in IN_PARTS else name.removesuffix("_")
    given: list[torch.Tensor] = []
    call = Op(
        "call",
        f"aten.{name}.{overload}",
        _written(args, given),
        tuple((key, _written(value, given)) for key, value in kwargs.items()),
        tuple(None if made is None else _spec(made) for made in results),
    )
    if name in CONVOLUTIONS:
        return _of_batch(name, given, results)
    specs = [_spec(x) for x in given]
    of_elements = op in OF_ELEMENTS | BACKWARD_OF_ELEMENTS and reduction_of(op, args, kwargs) == NONE
    if name in IN_PARTS:
        rule = dims_of(call, specs)
    elif of_elements or torch.Tag.pointwise in op.tags:
        shape = torch.broadcast_shapes(*(x.shape for x in given))  # type: ignore[no-untyped-call]
        labels = labels_of(len(shape))
        rule = Dims(tuple(broadcast(spec, shape) for spec in specs), (labels,) * len(results))
    else:
        return []
    on_mesh = [at for at, x in enumerate(given) if isinstance(x, DTensor)]
    return [] if rule is None else _free(rule, [rule.inputs[at] for at in on_mesh])


def _of_batch(name: str, given: Sequence[torch.Tensor], results: Sequence[Meta | None]) -> list[FreeDim]:
    """The batch of a convolution: of its image and its result, or of its image and the result's gradient."""
    images = 2 if name == "convolution_backward" else 1
    along = [0 if at < images else None for at, x in enumerate(given) if isinstance(x, DTensor)]
    made = [0 if at == 0 else SUMMED for at in range(len(results))]
    return [FreeDim(tuple(along), tuple(made))]


# No function within the one above, which would refer to itself, and keep the tensors until Python looks for
# cycles.
def _written(value: Any, given: list[torch.Tensor]) -> Any:
    """An argument as programs write it; its tensors come to `given`."""
    if isinstance(value, torch.Tensor):
        given.append(value)
        return Ref(str(len(given)))
    return tuple(_written(item, given) for item in value) if isinstance(value, (list, tuple)) else value


def _spec(x: torch.Tensor | Meta) -> TensorSpec:
    return TensorSpec(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def _free(rule: Dims, inputs: Sequence[tuple[int | None, ...]]) -> list[FreeDim]:
    """inputs: labels of the tensors on a mesh."""
    named = dict.fromkeys(label for labels in inputs for label in labels if label is not None)
    found = []
    for label in sorted(named.keys() - rule.whole):
        results = results_along(rule, label)
        if results is not None and not (SUMMED in results and rule.added):
            arguments = tuple(labels.index(label) if label in labels else None for labels in inputs)
            found.append(FreeDim(arguments, results))
    return found
