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
        yield from _of_sharing(model, parallel)
        yield from _of_words(model, parallel)
        yield from _of_slots(model, parallel, degree, length, max(rows, 1))


def _of_sharing(model: MoESettings, parallel: ParallelSettings) -> Iterator[str]:
    experts, ep, dp = model.experts, parallel.ep, parallel.dp
    if experts % ep:
        most = min(ep, experts)
        fits = next(n for n in range(most, 0, -1) if experts % n == 0)
        beside = "" if dp % fits == 0 else f" and parallel.dp = {fits * max(round(dp / fits), 1)}"
        yield (
            f"parallel.ep = {ep} must divide model.experts = {experts}: give parallel.ep = {fits}{beside}, "
            f"or model.experts = {ep * ceil(experts / ep)}"
        )
    elif parallel.pipe_experts and experts == ep:
        fewer = next(n for n in range(ep - 1, 0, -1) if ep % n == 0)
        other = f", or parallel.ep = {fewer}" if fewer > 1 else ""
        yield (
            f"parallel.pipe_experts sends each expert's tokens by themselves, and a rank has only one of "
            f"model.experts = {experts}: cut them with parallel.pipe_experts_multi_data = 2{other}"
        )


def _of_words(model: MoESettings, parallel: ParallelSettings) -> Iterator[str]:
    """Settings that would do nothing, for routing of the other kind."""
    factor = model.capacity_factor
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
    if parallel.ep > 1 and not factor and parallel.ep_overflow == "drop" and parallel.ep_buffer is None:
        yield (
            "parallel.ep_overflow = 'drop' is about what finds no room in parallel.ep_buffer; without one "
            "there is room for all: drop it, or give parallel.ep_buffer = 2.0"
        )
    if parallel.pipe_experts and not factor:
        yield (
            "parallel.pipe_experts sends each expert's tokens by themselves, and with model.capacity_factor "
            "= 0 it is not known where these begin: cut them with parallel.pipe_experts_multi_data = 2, "
            "or give model.capacity_factor = 1.25"
        )


def _of_slots(
    model: MoESettings, parallel: ParallelSettings, degree: int, length: int, rows: int
) -> Iterator[str]:
    """Capacities and buffers too small for what they are cut into. Of the shortest chunk."""
    factor, slices = model.capacity_factor, parallel.pipe_experts_multi_data
    tokens = length // (degree if parallel.ampipe_capacity == "chunk" or not factor else 1) * rows
    share = tokens * model.top_k / model.experts
    if factor and factor * share < 1:
        fits = [
            n
            for n in range(degree - 1, 0, -1)
            if factor * (length // n * rows) * model.top_k >= model.experts
        ]
        other = f"parallel.ampipe_degree = {fits[0]}, or " if tokens < length * rows and fits else ""
        yield (
            f"model.capacity_factor = {factor} of the {tokens} tokens that share an expert's slots is less "
            f"than one slot: give {other}model.capacity_factor = {_above(1 / share)} or more"
        )
    choices = tokens * model.top_k
    room = min(tokens, ceil(factor * share)) if factor else choices
    if not factor and parallel.ep_buffer is not None:
        room = min(choices, ceil(parallel.ep_buffer * choices / parallel.ep))
    if slices > room:
        what = "slots of an expert" if factor else "rows of a rank's buffer"
        yield (
            f"parallel.pipe_experts_multi_data = {slices} cuts the {room} {what}, which are fewer: give "
            f"{room} or less"
        )


def _above(value: float) -> float:
    """Rounded up to four places, so that it works when it is given."""
    return ceil(value * 1e4) / 1e4
