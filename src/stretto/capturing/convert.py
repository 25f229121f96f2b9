"""From nodes of the exported graph to `Op`s: arguments, results, views, draws, flops.

Knows one node at a time, and nothing of what the step is for. Touches PyTorch by way of `torch_adapter`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from stretto.backend.dispatch_adapter import draws, returns_view
from stretto.backend.specs import dtype_name, spec_of
from stretto.capturing.calls_adapter import constant_value, is_dispatched
from stretto.capturing.explain import CONTROL_FLOW
from stretto.capturing.graph import JointGraph
from stretto.capturing.torch_adapter import SEGMENT, mark_of
from stretto.errors import CaptureError
from stretto.ir.axes import TENSOR
from stretto.ir.collectives import ALL_TO_ALL
from stretto.ir.program import CHUNK, GETITEM, INDEX, WAIT, Arg, Const, Constant, Op, Ref, TensorSpec
from stretto.parallelize.ops import NAMESPACE
from stretto.passes.layout.program import Origin

PYTORCHS_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d")
"""Namespaces of PyTorch's own. DTensor changes placements by those of plans, but a few ops call these."""

PYTORCHS_ALL_TO_ALL = "_c10d_functional.all_to_all_single.default"
PYTORCHS_WAIT = "_c10d_functional.wait_tensor.default"
"""Those of them that programs have. The gradient of an all-to-all is one."""

SAME_AS = {"aten._efficientzerotensor.default": "aten.zeros.default"}
"""Ops that others replace: forward-mode derivatives make zeros that have no storage."""


def convert(
    joint: JointGraph,
    names: dict[torch.fx.Node, str],
    ranks: int = 1,
) -> tuple[list[tuple[Op, Origin]], list[Constant]]:
    """All nodes in order; puts the ops' names into `names`. ranks: of each
    mesh that the program is on.

    Everything after the first op that depends on the tangent belongs to the backward. Raises CaptureError
    that names the module of what cannot be written down.
    """
    ops: list[tuple[Op, Origin]] = []
    constants: list[Constant] = []
    roots: dict[str, str] = {}
    backward = False
    tainted = {node for node, (kind, _) in joint.inputs.items() if kind == "tangent"}
    for node in joint.module.graph.nodes:
        segment = mark_of(node, SEGMENT)
        module = joint.segments[segment] if segment is not None else ""
        try:
            if node.op == "get_attr":
                constants.append(_constant(joint.module, node))
                names[node] = f"const/{node.target}"
                continue
            if node.op != "call_function" or ("val" not in node.meta and not node.users):
                continue  # an assertion on values makes nothing that anyone needs
            names[node] = node.name
            op = _op(node, names, roots, ranks)
        except CaptureError as error:
            raise CaptureError(f"cannot capture {module or 'the model'}: {error}") from None
        backward = backward or any(source in tainted for source in node.all_input_nodes)
        roots[op.name] = op.alias if op.alias is not None else op.name
        ops.append((replace(op, module=module), Origin(segment, backward)))
    return ops, constants


LAZY = {"aten._conj.default": "aten.conj_physical.default", "aten._neg_view.default": "aten.neg.default"}
"""Views that PyTorch computes when they are read, which kernels behind the dispatcher's autograd refuse, and
what computes them at once."""


def _op(node: torch.fx.Node, names: Mapping[torch.fx.Node, str], roots: Mapping[str, str], ranks: int) -> Op:
    args = tuple(_arg(a, names, node) for a in node.args)
    kwargs = tuple((key, _arg(value, names, node)) for key, value in node.kwargs.items())
    value = node.meta["val"]
    parts = value if isinstance(value, (tuple, list)) else (value,)
    for part in parts:
        if isinstance(part, torch.Tensor) and part.layout is not torch.strided:
            raise CaptureError(
                f"{node.target} makes a sparse tensor ({str(part.layout).removeprefix('torch.')}), which a "
                "plan does not have: give sparse=False to an embedding (sparse_grad=False to gather), whose "
                "gradient is then dense, or dense tensors"
            )
    mask = node.args[-1] if node.args and isinstance(node.args[-1], (tuple, list)) else ()
    asked = mask if len(mask) == len(parts) and all(type(m) is bool for m in mask) else [True] * len(parts)
    outputs = tuple(
        spec_of(part) if isinstance(part, torch.Tensor) and wanted else None
        for part, wanted in zip(parts, asked, strict=True)
    )  # of gradients that no one asks for, kernels give none, whatever they give without elements
    first = next((a.name for a in args if isinstance(a, Ref)), None)
    if node.target is operator.getitem:
        # A part of a tuple of views is a view; a part of a tuple of new tensors owns its bytes.
        assert first is not None
        root = roots[first]
        alias = root if root != first else None
        return Op(node.name, GETITEM, args, kwargs, outputs, alias)
    if str(node.target).startswith(f"{NAMESPACE}."):
        return _communication(node, args, outputs, roots)
    if not is_dispatched(node.target):
        raise CaptureError(
            f"the model calls {node.target}, which is not an op of the dispatcher: {CONTROL_FLOW}"
        )
    if str(node.target) == PYTORCHS_ALL_TO_ALL:
        _check_parts(node, ranks)
        return Op(node.name, ALL_TO_ALL.target, (args[0], TENSOR, ranks), (), outputs)
    if str(node.target) == PYTORCHS_WAIT:
        return Op(node.name, WAIT, args, (), outputs, args[0].name)
    if str(node.target).partition(".")[0] in PYTORCHS_COLLECTIVES:
        raise CaptureError(
            f"the code communicates in a way of its own ({node.target}), which a plan does not have: leave "
            "it out, and give dp, tp or ep to Parallel; before an op on a sharded tensor that does so, "
            "reshard its tensors to [Replicate()]"
        )
    alias, target = None, LAZY.get(str(node.target), str(node.target))
    if first is not None and target == str(node.target) and returns_view(node.target):
        alias = roots.get(first, first)
    return Op(
        name=node.name,
        target=SAME_AS.get(target, target),
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        alias=alias,
        random=draws(node.target, node.args, node.kwargs),
        flops=_flops(node),
    )


def _check_parts(node: torch.fx.Node, ranks: int) -> None:
    parts = [tuple(sizes) for sizes in node.args[1:3] if isinstance(sizes, (list, tuple))]
    if {len(sizes) for sizes in parts} != {ranks}:
        raise CaptureError(
            f"an all-to-all is of {len(parts[0]) if parts else 'unknown'} ranks, and the model is sharded "
            f"over {TENSOR} = {ranks}: exchange between the ranks of a stage's mesh"
        )
    if len({size for sizes in parts for size in sizes}) > 1:
        raise CaptureError(
            f"an all-to-all has parts of different sizes, {list(parts[1])} rows to send and {list(parts[0])} "
            "to receive; a captured program has one shape on all ranks: pad the parts to one size"
        )


def _communication(
    node: torch.fx.Node,
    args: tuple[Arg, ...],
    outputs: tuple[TensorSpec | None, ...],
    roots: Mapping[str, str],
) -> Op:
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
        # Plans are free of any machine: "job" is the device on which the rank computes.
        return Const("device", "job")
    if isinstance(value, torch.layout):
        return Const("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Const("memory_format", str(value).removeprefix("torch."))
    if isinstance(value, torch.SymInt):
        raise CaptureError("an op's argument depends on data; shapes must be known")
    if isinstance(value, complex):
        raise CaptureError(
            f"{node.target} is called with the number {value!r}, and a plan has no complex numbers outside "
            "of tensors: multiply by torch.complex(real, imag); in the place of torch.polar(r, a), whose "
            "gradient has such a number, write torch.complex(r * a.cos(), r * a.sin())"
        )
    raise CaptureError(f"cannot write down the argument {value!r} of {node.target}")


def _constant(module: torch.fx.GraphModule, node: torch.fx.Node) -> Constant:
    result: Any = module
    for part in str(node.target).split("."):
        result = getattr(result, part)
    tensor = constant_value(result) if isinstance(result, torch.Tensor) else None
    if isinstance(result, torch.fx.GraphModule):
        raise CaptureError(CONTROL_FLOW)
    if tensor is None:
        raise CaptureError("the model's code has a constant whose elements are not known")
    return Constant(str(node.target), spec_of(tensor), tuple(tensor.flatten().tolist()))


def _flops(node: torch.fx.Node) -> int:
    assert is_dispatched(node.target)
    packet = node.target.overloadpacket
    formula = flop_registry.get(packet)

    def value(of: Any) -> Any:
        return of.meta.get("val") if isinstance(of, torch.fx.Node) else of

    args = [value(arg) for arg in node.args]
    if "scaled_dot_product" in packet.__name__:
        shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor) and x.dim() == 4]
        # PyTorch 2.11 counts equal heads only; one that several heads of queries share counts for each.
        heads = shapes[0][1]
        shapes = [(batch, heads, *rest) for batch, _, *rest in shapes]
        if packet.__name__.endswith("backward"):
            return int(sdpa_backward_flop_count(*shapes[:4]))  # type: ignore[no-untyped-call]
        return int(sdpa_flop_count(*shapes[:3]))  # type: ignore[no-untyped-call]
    if formula is not None and not getattr(formula, "_get_raw", False):
        kwargs = {key: value(arg) for key, arg in node.kwargs.items()}
        return int(formula(*args, **kwargs, out_val=node.meta["val"]))
    return 0
