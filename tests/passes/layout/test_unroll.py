"""An axis of time: what passes shard over its members is the same step when these are one behind another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.backend.dispatch_adapter import resolve
from stretto.capturing.trace import trace
from stretto.ir.program import GETITEM, Const, Op, Ref, TensorSpec
from stretto.passes.layout.attention import rules_of_chunks, shared
from stretto.passes.layout.context_steps import in_steps
from stretto.passes.layout.kernels import CUDNN, FLASH, backward_of
from stretto.passes.layout.placement import sharded
from stretto.passes.layout.program import Origin, StepProgram
from stretto.passes.layout.shard import AxisRules, shard
from stretto.passes.layout.unroll import unroll


def computed(program: StepProgram, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the roots are."""
    values: dict[str, Any] = dict(given)

    def of(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return values[arg.name]
        if isinstance(arg, Const):
            return torch.device("cpu") if arg.kind == "device" else getattr(torch, arg.text)
        return [of(item) for item in arg] if isinstance(arg, tuple) else arg

    for op, _ in program.ops:
        if op.target == GETITEM:
            values[op.name] = values[op.args[0].name][op.args[1]]
        else:
            named = {key: of(value) for key, value in op.kwargs}
            values[op.name] = resolve(op.target)(*map(of, op.args), **named)
    return {root: values[value] for root, value in program.roots.items()}


class Windows(nn.Module):
    """Rows (12, 8), each by itself, then their variance."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.down(self.norm(self.up(x)).view(12, 2, 3).transpose(1, 2).reshape(12, 6).relu())
        return rows.var(dim=0).sum() + rows.square().sum()


@pytest.mark.parametrize("members", [(1, 1, 1, 1), (2, 1, 1), (1, 3)], ids=str)
def test_members_of_a_made_up_axis_one_behind_another_are_the_step(members: Sequence[int]) -> None:
    model, x = Windows().double(), torch.randn(12, 8).double()
    program = trace(model, x, lambda m, rows: m(rows)).program
    stream = next(op.name for op, _ in program.ops if op.target == "aten.addmm.default")
    made = shard(program, "turns", sum(members), {}, {stream: sharded(0)}, own=AxisRules(of_time=True))
    unrolled = unroll(made, "turns", members)
    (leaf,) = (name for name in program.given if name.startswith("batch/"))
    given = {leaf: x, "tangent": torch.ones(()).double()}
    given |= {f"param/{name}": p.detach() for name, p in model.named_parameters()}
    expected, found = computed(program, given), computed(unrolled.program, given)
    for root, value in expected.items():
        assert torch.allclose(found[root], value, rtol=1e-12), root
    count = [sum(op.target == "aten.relu.default" for op, _ in p.ops) for p in (program, unrolled.program)]
    assert count == [1, len(members)]


def test_what_draws_is_drawn_once_and_keeps_its_name() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    program = trace(model, torch.zeros(12, 8), lambda m, rows: m(rows).square().sum()).program
    stream = next(op.name for op, _ in program.ops if op.target == "aten.addmm.default")
    made = shard(program, "turns", 3, {}, {stream: sharded(0)}, own=AxisRules(of_time=True))
    one, other = (
        [(op.name, op.outputs) for op, _ in p.ops if op.random]
        for p in (program, unroll(made, "turns", (1, 1, 1)).program)
    )
    assert one == other != []


def test_behind_the_first_chunk_cudnns_attention_is_flash_attention() -> None:
    """Whose `is_causal` means that the last query sees all keys."""
    spec, rows = TensorSpec((2, 4, 12, 8), "bfloat16"), TensorSpec((2, 4, 12, 1), "float32")
    number = TensorSpec((), "int64")
    q, k, v = map(Ref, ("batch/q", "batch/k", "batch/v"))
    forward = (spec, rows, None, None, None, None, number, number, None)
    ops = [
        *(Op(name, "aten.relu.default", (Ref(f"batch/{name}"),), (), (spec,)) for name in "qkv"),
        Op("made", CUDNN, (*map(Ref, "qkv"), None, True, 0.0, True), (), forward),
        *(
            Op(f"made_{at}", GETITEM, (Ref("made"), at), (), (forward[at],))
            for at in (0, 1, 6, 7)
        ),
        Op(
            "grads",
            backward_of(CUDNN),
            (
                *map(Ref, ("made_0", "q", "k", "v", "made_0", "made_1", "made_6", "made_7")),
                *(None, None, None, 12, 12, 0.0, True),
            ),
            (),
            (spec, spec, spec),
        ),
        *(Op(f"grad_{name}", GETITEM, (Ref("grads"), at), (), (spec,)) for at, name in enumerate("qkv")),
    ]  # fmt: skip
    program = StepProgram(
        tuple((op, Origin(0, op.name.startswith("grad"))) for op in ops),
        dict.fromkeys((one.name for one in (q, k, v)), spec),
        {f"update/{name}": f"grad_{name}" for name in "qkv"},
        {},
    )
    wishes = {name: sharded(2) for name in "qkv"}
    own = AxisRules(rules=rules_of_chunks((4, 4, 4), 1), of_time=True)
    made = shard(shared(program), "chunk", 3, {}, wishes, own=own)
    targets = [op.target for op, _ in in_steps(unroll(made, "chunk", (1, 1, 1)).program).ops]
    kernels = [target for target in targets if "attention" in target]
    both = (CUDNN, FLASH, FLASH)
    assert kernels == [*both, *map(backward_of, both)]
