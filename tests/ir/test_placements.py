"""Placements are what ranks keep: each op of a list, on parts and partial sums, against the same op on the
full values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto.backend.grouped_adapter  # noqa: F401  its ops
from stretto.backend.specs import spec_of
from stretto.ir.dims import dims_of, operands
from stretto.ir.op_names import POINTWISE, names
from stretto.ir.placement import EQUAL, LOCAL, SUM, NeedsEqualError, Placement, RefusedError, part
from stretto.ir.placements import Placer
from stretto.ir.program import Op, Ref, TensorSpec
from tests.cells import slow

RANKS = 2


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def indices(*shape: int, below: int = 4) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(3))


A, B, V, W = tensor(4, 6, 8), tensor(4, 6, 8, seed=1), tensor(8), tensor(8, 4)
Q, K = tensor(2, 4, 6, 8), tensor(2, 4, 6, 8, seed=2)
Z = torch.complex(A, B)
ENDS = torch.tensor([2, 2, 5, 8])  # of groups of rows, one of them empty
GAIN, MEANS = tensor(8, seed=4), tensor(4, 6, 1)

EVERY = [True, True, True]
ROW_MEANS = tensor(4, 1)  # the kernel takes them as they are in memory
ROWS_OF_A_NORM = (A[:, 0], B[:, 0], [8], ROW_MEANS, ROW_MEANS.exp(), V, GAIN, EVERY)

CALLS: list[tuple[str, tuple[Any, ...]]] = [
    *((f"aten.{name}.default", (A,)) for name in ("neg", "exp", "relu", "sigmoid", "gelu", "clone", "abs")),
    *(
        (f"aten.{name}.Tensor", (A, B))
        for name in ("add", "sub", "mul", "div", "lt", "maximum")
        if name != "maximum"
    ),
    *((f"aten.{name}.Tensor", (A, V)) for name in ("add", "mul", "div")),
    ("aten.mul.Scalar", (A, 3.0)),
    ("aten.add.Scalar", (A, 3.0)),
    ("aten.where.self", (A > 0, A, B)),
    ("aten.masked_fill.Scalar", (A, B > 0, 0)),
    ("aten.masked_fill.Scalar", (A, B > 0, 5.0)),
    ("aten.silu_backward.default", (A, B)),
    ("aten.threshold_backward.default", (A, B, 0)),
    ("aten.mm.default", (tensor(6, 8), W)),
    ("aten.bmm.default", (A, tensor(4, 8, 6))),
    ("aten.addmm.default", (tensor(4), tensor(6, 8), W)),
    ("aten.addmm.default", (tensor(6, 4), tensor(6, 8), W)),
    ("aten.mv.default", (tensor(6, 8), V)),
    ("aten.dot.default", (V, GAIN)),
    ("aten.sum.dim_IntList", (A, [1])),
    ("aten.sum.dim_IntList", (A, [0, 2], True)),
    ("aten.sum.default", (A,)),
    ("aten.mean.dim", (A, [1], True)),
    ("aten.amax.default", (A, [2])),
    ("aten.max.dim", (A, 1)),
    ("aten.argmax.default", (A, 2)),
    ("aten.logsumexp.default", (A, [1])),
    ("aten.var.correction", (A, [2])),
    ("aten.linalg_vector_norm.default", (A, 2, [1])),
    ("aten.any.dim", (A > 0, 1)),
    ("aten._softmax.default", (A, 2, False)),
    ("aten._log_softmax.default", (A, 1, False)),
    ("aten._softmax_backward_data.default", (A, B, 2, torch.float64)),
    ("aten._log_softmax_backward_data.default", (A, B, 1, torch.float64)),
    *((f"aten.{name}.default", (A, 1)) for name in ("cumsum", "cumprod", "logcumsumexp")),
    ("aten.sort.default", (A, 1)),
    ("aten.topk.default", (A, 2, 1)),
    ("aten.permute.default", (A, [2, 0, 1])),
    ("aten.transpose.int", (A, 1, 2)),
    ("aten.t.default", (W,)),
    ("aten.slice.Tensor", (A, 1, 2, 6)),
    ("aten.slice_backward.default", (tensor(4, 4, 8), [4, 6, 8], 1, 2, 6, 1)),
    ("aten.select.int", (A, 1, 3)),
    ("aten.select_backward.default", (tensor(4, 8), [4, 6, 8], 1, 3)),
    ("aten.flip.default", (A, [1])),
    ("aten.roll.default", (A, [1], [1])),
    ("aten.tril.default", (A,)),
    ("aten.constant_pad_nd.default", (A, [1, 1])),
    ("aten.view_as_complex.default", (tensor(4, 6, 2),)),
    ("aten.view_as_real.default", (Z,)),
    *((f"aten.{name}.default", (Z,)) for name in ("_conj", "conj_physical", "real", "angle", "abs")),
    *((f"aten.{name}.default", (A, B)) for name in ("complex", "polar")),
    ("aten.mul.Tensor", (Z, Z[:, :1])),
    ("aten.expand.default", (tensor(4, 1, 8), [4, 6, 8])),
    ("aten.repeat.default", (A, [1, 2, 1])),
    ("aten.stack.default", ([A, B], 1)),
    ("aten.cat.default", ([A, B], 1)),
    ("aten.split.Tensor", (A, 3, 1)),
    ("aten.unbind.int", (A, 1)),
    ("aten.view.default", (A, [4, 2, 3, 8])),
    ("aten.view.default", (A, [24, 8])),
    ("aten.view.default", (A, [4, 48])),
    ("aten.unsqueeze.default", (A, 1)),
    ("aten.slice_scatter.default", (A, tensor(4, 2, 8), 1, 0, 2)),
    ("aten.select_scatter.default", (A, tensor(4, 8), 1, 0)),
    ("aten.embedding.default", (W, indices(4, 6))),
    ("aten.embedding_dense_backward.default", (A, indices(4, 6), 10, -1, False)),
    ("aten.gather.default", (A, 1, indices(4, 6, 8))),
    ("aten.scatter_add.default", (A, 1, indices(4, 6, 8), B)),
    ("aten.index_select.default", (A, 1, indices(3))),
    ("aten.index.Tensor", (A, [None, indices(3)])),
    ("aten.index_put.default", (A, [None, indices(3)], tensor(4, 3, 8), True)),
    ("stretto_moe.grouped_mm.default", (tensor(8, 6), tensor(4, 6, 8), ENDS)),
    ("stretto_moe.grouped_mm_t.default", (tensor(8, 6), tensor(8, 4), ENDS)),
    ("aten.native_layer_norm.default", (A, [8], V, GAIN, 1e-5)),
    ("aten.native_layer_norm_backward.default", ROWS_OF_A_NORM),
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", (Q, K, K)),
    ("aten.zeros_like.default", (A,)),
    ("aten.nll_loss_forward.default", (tensor(6, 4), indices(6), None, 0, -100)),
]
"""Calls of ops, with all their operands unsharded."""


def op_of(target: str, args: Sequence[Any], result: Any) -> tuple[Op, dict[str, Tensor]]:
    """The call as an op whose operands have names."""
    given: dict[str, Tensor] = {}

    def arg(value: Any) -> Any:
        if isinstance(value, Tensor):
            given[f"x{len(given)}"] = value
            return Ref(f"x{len(given) - 1}")
        return tuple(arg(item) for item in value) if isinstance(value, list) else value

    made = tuple(arg(value) for value in args)
    results = result if isinstance(result, (tuple, list)) else (result,)
    outputs = tuple(spec_of(r) if isinstance(r, Tensor) else None for r in results)
    return Op("y", target, made, (), outputs), given


def called(target: str, args: Sequence[Any]) -> Any:
    library, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, library), name), overload)(*args)


def kept(full: Tensor, placement: Placement, rank: int) -> Tensor:
    """What a rank has of an operand."""
    if placement.kind == "part":
        dim, blocks = placement.at[0]
        return torch.cat([b.chunk(RANKS, dim)[rank] for b in full.chunk(blocks, dim)], dim)
    if placement.kind == "sum":
        return full * 0.25 if rank == 0 else full * 0.75
    return full


def local_args(args: Sequence[Any], placements: Sequence[Placement], rank: int) -> list[Any]:
    """The call on one rank; sizes that are arguments are those of its part."""
    left = iter(placements)

    def arg(value: Any) -> Any:
        if isinstance(value, Tensor):
            return kept(value, next(left), rank)
        return [arg(item) for item in value] if isinstance(value, list) else value

    return [arg(value) for value in args]


def sized(target: str, args: list[Any], full: Sequence[Any]) -> list[list[Any]]:
    """Calls with the sizes that a rank's code could give: one of them halved, or none."""
    at = {"aten.view.default": 1, "aten.expand.default": 1, "aten.slice_backward.default": 1}
    at["aten.select_backward.default"] = 1
    if target not in at:
        return [args]
    sizes = full[at[target]]
    found = [args]
    for dim in range(len(sizes)):
        halved = [n // RANKS if d == dim else n for d, n in enumerate(sizes)]
        found.append([*args[: at[target]], halved, *args[at[target] + 1 :]])
    return found


def on_meta(args: Sequence[Any]) -> list[Any]:
    """The call without elements."""

    def arg(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to("meta")
        return [arg(item) for item in value] if isinstance(value, list) else value

    return [arg(value) for value in args]


def stands_for(parts: list[Tensor], placement: Placement, full: Tensor) -> bool:
    """Whether what ranks have is the value."""
    if placement.kind == "sum":
        return torch.allclose(sum(parts[1:], parts[0]), full)
    if placement.kind == "part":
        return any(
            part_is(parts, dim, blocks, full)
            for dim, blocks in placement.at
            if parts[0].shape[dim] % blocks == 0
        )
    return parts[0].shape != full.shape or all(torch.allclose(p, full) for p in parts)


def part_is(parts: list[Tensor], dim: int, blocks: int, full: Tensor) -> bool:
    pieces = [p.chunk(blocks, dim) for p in parts]
    made = torch.cat([piece[b] for b in range(blocks) for piece in pieces], dim)
    return made.numel() == full.numel() and torch.allclose(
        made.reshape(full.shape).to(torch.complex128), full.to(torch.complex128)
    )


LARGER = ("aten.native_layer_norm_backward.default", (A, B, [8], MEANS, MEANS.exp(), V, GAIN, EVERY))
"""Of more dims: three thousand placements."""


@pytest.mark.parametrize(
    ("target", "args"),
    [*CALLS, slow(*LARGER)],
    ids=[f"{k}-{t}" for k, (t, _) in enumerate([*CALLS, LARGER])],
)
def test_an_op_on_what_ranks_hold_is_the_op_on_the_whole(target: str, args: tuple[Any, ...]) -> None:
    result = called(target, args)
    results = result if isinstance(result, (tuple, list)) else (result,)
    _, given = op_of(target, args, result)
    choices = [
        [
            EQUAL,
            *([SUM] if x.is_floating_point() or x.is_complex() else []),
            *(part(d) for d, n in enumerate(x.shape) if n % 2 == 0),
        ]
        for x in given.values()
    ]
    placed = 0
    for placements in itertools.product(*choices):
        for calls in zip(
            *(sized(target, local_args(args, placements, rank), args) for rank in range(RANKS)), strict=True
        ):
            # Kernels trust the shapes that they get: only what is placed is computed.
            try:
                shaped = called(target, on_meta(calls[0]))
            except (RuntimeError, IndexError, AssertionError):  # the last of decompositions of PyTorch 2.11
                continue  # shapes that no rank could have together
            here, names = op_of(target, calls[0], shaped)
            placer = Placer("tp", RANKS, dict(zip(names, placements, strict=True)))
            try:
                placer.place(here, {name: spec_of(x) for name, x in names.items()})
            except (NeedsEqualError, RefusedError):
                continue
            if len(here.outputs) != len(results):
                continue  # so many pieces of a part: the shapes of the model alone show
            try:
                made = [called(target, call) for call in calls]
            except (RuntimeError, IndexError):
                continue  # sizes that do not fit, which shapes alone do not show
            for at, full in enumerate(results):
                if not isinstance(full, Tensor) or not full.numel():
                    continue
                parts = [m[at] if isinstance(m, (tuple, list)) else m for m in made]
                several = placer._tuples.get("y")
                found = several[at] if several is not None else placer.of("y")
                if found.kind == "equal" and found.uniform and parts[0].shape != full.shape:
                    continue  # one number everywhere, of a part's size: the shape of the model alone shows
                if target == "aten.expand.default" and parts[0].shape != kept(full, found, 0).shape:
                    continue  # so many repetitions as a rank needs: likewise
                if found.kind == "local":
                    continue  # of which nothing is said
                assert stands_for(parts, found, full), (placements, found)
            placed += 1
    assert placed > 1 or target == "aten.nll_loss_forward.default", "more than what is full is placed"


UNSAID = names(
    """_conj _to_copy alias bernoulli bernoulli.p binary_cross_entropy complex contiguous copy detach
    elu_backward floor_divide floor_divide.Scalar hardshrink_backward hardsigmoid_backward hardswish
    hardswish_backward hardtanh_backward huber_loss isclose leaky_relu leaky_relu_backward
    lift_fresh_copy log_sigmoid_backward log_sigmoid_forward masked_fill.Tensor mish_backward
    mse_loss native_dropout polar rand_like randn_like real rsub.Tensor smooth_l1_loss
    softplus_backward softshrink_backward to.dtype where.Scalar where.ScalarOther where.ScalarSelf"""
)
"""Of PyTorch 2.13; 2.11 does not tag leaky_relu either."""


def test_pointwise_ops_are_those_that_pytorch_calls_so() -> None:
    """Or ops of which PyTorch does not say it, and which are so by their definition."""
    unsaid = set()
    for target in sorted(POINTWISE):
        _, name, overload = target.split(".")
        packet = getattr(torch.ops.aten, name, None)
        op = getattr(packet, overload, None) if packet is not None else None
        assert op is not None, target
        if torch.Tag.pointwise not in op.tags:
            unsaid.add(target)
    assert unsaid <= UNSAID, sorted(unsaid - UNSAID)


def test_every_rule_has_labels_for_all_dims() -> None:
    for target, args in CALLS:
        result = called(target, args)
        op, given = op_of(target, args, result)
        specs = [spec_of(given[name]) for name in operands(op)]
        rule = dims_of(op, specs)
        if rule is None:
            continue
        assert [len(labels) for labels in rule.inputs] == [len(spec.shape) for spec in specs], target
        outs = [len(s.shape) for s in op.outputs if s is not None]
        assert [len(o) for o, s in zip(rule.outputs, op.outputs, strict=True) if s is not None] == outs, (
            target
        )


def test_what_reads_the_rank_is_the_rank_s_own() -> None:
    spec = TensorSpec((4,), "int64")
    placer = Placer("tp", 2, {"w": part(0)})
    placer.place(Op("at", "axis.index", ("tp", 2), (), (TensorSpec((), "int64"),)), {})
    placer.place(
        Op("y", "aten.sub.Tensor", (Ref("ids"), Ref("at")), (), (spec,)),
        {"ids": spec, "at": TensorSpec((), "int64")},
    )
    assert placer.of("at") == placer.of("y") == LOCAL


def test_an_addend_is_summed_before_ranks_mask_it_by_their_own_numbers() -> None:
    x, mask, ids = (TensorSpec((4, 6), kind) for kind in ("float64", "bool", "int64"))
    specs = {"x": x, "y": x, "mine": x, "mask": mask, "at": ids, "table": TensorSpec((8, 2), "float64")}
    given = {"y": SUM, "mine": LOCAL, "mask": LOCAL, "at": LOCAL}

    def placed(target: str, *names: str) -> Placement:
        placer = Placer("tp", 2, given)
        placer.place(Op("z", target, tuple(map(Ref, names)), (), (x,)), specs)
        return placer.of("z")

    assert placed("aten.where.self", "mask", "x", "mine") == LOCAL
    assert placed("aten.add.Tensor", "y", "mine") == LOCAL, "still to be added up over ranks"
    for target, read in (("where.self", ("mask", "x", "y")), ("mul.Tensor", ("y", "mine"))):
        with pytest.raises(NeedsEqualError, match="y"):
            placed(f"aten.{target}", *read)
    with pytest.raises(RefusedError, match="table is full, and meets a rank's own rows"):
        placed("aten.embedding.default", "table", "at")


def test_a_slice_that_may_be_of_another_dim_is_a_sum_where_that_one_is_summed() -> None:
    """By its place in the order of elements a slice may be of columns, or one row of each of 7 blocks."""
    specs = {"x": TensorSpec((7, 4), "float64"), "full": TensorSpec((7,), "float64")}
    placer = Placer("tp", 2, {"x": Placement("part", ((1, 1), (0, 7))), "full": SUM})

    def placed(name: str, target: str, args: tuple[Any, ...], *shape: int) -> Placement:
        specs[name] = TensorSpec(shape, "float64")
        placer.place(Op(name, target, args, (), (specs[name],)), specs)
        return placer.of(name)

    y = placed("y", "aten.sum.dim_IntList", (Ref("x"), (1,)), 7)
    assert (y.kind, y.at, y.or_sum) == ("part", ((0, 7),), True)
    assert placed("mean", "aten.mean.default", (Ref("y"),)) == SUM
    assert placed("viewed", "aten.view.default", (Ref("y"), (7, 1)), 7, 1).or_sum
    assert placed("added", "aten.add.Tensor", (Ref("y"), Ref("full")), 7) == SUM
    with pytest.raises(RefusedError, match="all of that dim"):
        placed("softmax", "aten._softmax.default", (Ref("y"), 0, False), 7)
