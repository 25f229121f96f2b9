"""What does not fit between a model with experts and how they are shared and cut, with the nearest that does.

Only Stretto's own models are checked here. Those of others are checked when they are distributed.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from stretto.config.model import GPTSettings, HuggingFaceSettings, MoESettings
from stretto.config.parallel import ParallelSettings


def faults_of_experts(
    model: GPTSettings | MoESettings | HuggingFaceSettings, parallel: ParallelSettings, length: int, rows: int
) -> Iterator[str]:
    """A line for each fault. length, rows: of a microbatch's sequences."""
    degree = 1 if parallel.ampipe_degree == "auto" else parallel.ampipe_degree
    if degree > 1 and length < 2 * degree:
        yield (
            f"parallel.ampipe_degree = {degree} cuts data.sequence_length = {length} into chunks of less "
            f"than two tokens: give {max(length // 2, 1)} or less"
        )
        return
    if isinstance(model, GPTSettings):
        if parallel.ep > 1:
            yield (
                f"parallel.ep = {parallel.ep} shares experts, which a model of kind 'gpt' does not have: "
                "give model.kind = 'moe', or ep = 1"
            )
        for key in ("ampipe_capacity", "ep_plan"):
            if getattr(parallel, key) != ParallelSettings.model_fields[key].default:
                yield (
                    f"parallel.{key} = {getattr(parallel, key)!r} is about experts, which a model of kind "
                    "'gpt' does not have: drop it, or give model.kind = 'moe'"
                )
    elif isinstance(model, MoESettings):
        yield from _of_own(model, parallel, degree, length, max(rows, 1))


def _of_own(
    model: MoESettings, parallel: ParallelSettings, degree: int, length: int, rows: int
) -> Iterator[str]:
    experts, ep, factor = model.experts, parallel.ep, model.capacity_factor
    if experts % ep:
        yield (
            f"parallel.ep = {ep} must divide model.experts = {experts}: give less, or model.experts = "
            f"{ep * ceil(experts / ep)}"
        )
    # Settings that would do nothing, for routing of the other kind.
    of_dropless = ("ep_buffer", "ep_overflow")
    for key in of_dropless if factor else ("ampipe_capacity",):
        given = getattr(parallel, key)
        if given != ParallelSettings.model_fields[key].default:
            what = "dropless experts" if key in of_dropless else "experts with a capacity"
            other = "0" if key in of_dropless else "1.25"
            yield (
                f"parallel.{key} = {given!r} is about {what}, and model.capacity_factor = {factor}: drop it, "
                f"or give model.capacity_factor = {other}"
            )
    # Of the shortest chunk.
    tokens = length // (degree if parallel.ampipe_capacity == "chunk" else 1) * rows
    share = tokens * model.top_k / experts
    if factor and factor * share < 1:
        # Rounded up to four places, so that it works when it is given.
        yield (
            f"model.capacity_factor = {factor} of the {tokens} tokens that share an expert's slots is less "
            f"than one slot: give model.capacity_factor = {ceil(1e4 / share) / 1e4} or more"
        )
