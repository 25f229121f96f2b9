"""Which part of a layout makes a step compute something else than the plain model.

A wrong style changes every number after it, so what differs does not show where the mistake is. Parts of the
layout do, each by itself:

    1. Without sequence parallelism: if that is right, a module mixes tokens and sees a slice of them.
    2. Without tensor parallelism: if that is wrong, too, the plan of tensor parallelism is not to blame.
    3. Each group of modules of the plan that are in one module (attention, MLP) sharded by itself: what is
       wrong then is at fault.

Knows plans and names of modules; its caller tries a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from stretto.config import ParallelSettings
from stretto.parallelize.styles import given_plan, parse_style

Trial = Callable[[ParallelSettings, Mapping[str, Any] | None], bool | None]
"""Whether a layout is right; None where it cannot be tried."""

VOCABULARY = "embedding and head"
SINGLE_RANK = {
    key: ParallelSettings.model_fields[key].default
    for key in (
        *("pp", "dp", "ep", "ep_buffer", "ep_overflow", "ampipe_degree", "ampipe_capacity"),
        *("pipe_experts", "pipe_experts_multi_data", "tp"),
    )
}
"""Settings of a step on one rank that is cut in nothing but microbatches."""


def bisect_layout(
    model: nn.Module, parallel: ParallelSettings, tp_plan: Mapping[str, Any] | None, right: Trial
) -> list[str]:
    """Lines that name the part of the layout that is wrong, and what to do."""
    if parallel.tp == 1:
        return _without_tp(parallel, right)
    if parallel.sequence_parallel:
        full = parallel.model_copy(update={"sequence_parallel": False})
        if right(full, tp_plan):
            return _mixing(model, tp_plan if tp_plan is not None else parallel.tp_plan)
        parallel = full
    without = parallel.model_copy(update={"tp": 1, "tp_plan": None})
    if right(without, None) is False:
        return ["with tp = 1 it differs, too", *_without_tp(without, right)]
    plan = given_plan(model, tp_plan if tp_plan is not None else parallel.tp_plan)
    groups = _groups(plan)
    wrong = {name: part for name, part in groups.items() if right(parallel, part) is False}
    if not wrong:
        return [
            "each part of the tensor-parallel plan is right when it is sharded by itself, but not all "
            "together: look at what one sharded module hands to another"
        ]
    lines: list[str] = []
    for name, part in wrong.items():
        styles = ", ".join(f"{pattern!r}: {style!r}" for pattern, style in part.items())
        lines.append(f"{name} is wrong when it is sharded by itself, as the plan has it: {{{styles}}}")
    return [
        *lines,
        "a matrix that packs K others side by side (query, key, value; gate, up) is 'packed_colwise:K'; code "
        "that splits or counts features by an attribute needs 'attributes:NAME'; what adds up over features "
        "(a norm over all heads, a softmax over experts) cannot see a part of them: 'colwise_gather_output'",
    ]


def _without_tp(parallel: ParallelSettings, right: Trial) -> list[str]:
    used = {key: value for key, value in SINGLE_RANK.items() if getattr(parallel, key) != value}
    one = parallel.model_copy(update={**used, "split": "auto"})
    one = one.model_copy(update={"microbatches": parallel.microbatches * parallel.dp})
    if used and right(one, None):
        differing = " or ".join(f"{key} = {getattr(parallel, key)!r}" for key in used)
        return [f"on one rank it is right: {differing} makes the difference"]
    return [
        "on one rank it differs, too: the model computes something else when it runs again (a state of its "
        "own that is no buffer, a value kept from one call to the next), or the capture is at fault"
    ]


def _mixing(model: nn.Module, tp_plan: Mapping[str, Any] | None) -> list[str]:
    plan = given_plan(model, tp_plan)
    sequence = [pattern for pattern, style in plan.items() if parse_style(style, pattern).kind == "sequence"]
    named = f" Modules that the plan calls 'sequence': {', '.join(sequence)}." if sequence else ""
    return [
        "without sequence_parallel it is right: something between the matrices of a block mixes tokens (a "
        f"shift, a mean, a convolution along the sequence) and sees a slice of them.{named} Move it into a "
        "module with colwise matrices, which sees full sequences, or set sequence_parallel = false"
    ]


def _groups(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Step 3: the module of the patterns -> the patterns that shard anything.

    Embedding and head stay together, as one tensor may be both.
    """
    groups: dict[str, dict[str, Any]] = {}
    for pattern, style in plan.items():
        kind = parse_style(style, pattern).kind
        if kind in ("sequence", "replicated"):
            continue
        name = pattern if kind == "attributes" else pattern.rpartition(".")[0]
        if kind == "vocabulary" or (kind == "colwise_gather_output" and "*" not in pattern):
            name = VOCABULARY
        groups.setdefault(name or "the model", {})[pattern] = style
    return groups
