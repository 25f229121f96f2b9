"""Which stage an op belongs to: cut the forward into contiguous stages, and let the backward follow.

1. Segments (see `torch_adapter`) number the forward in execution order; a cut is a segment that begins a
   stage: where a named module is entered, or a layer of a text of stages (of stages that begin with one
   segment all but the last are empty), or as even as can be, a message counted as part of its stage.
2. A forward op is in the stage of its segment, a backward op in that of the forward op that it derives, a sum
   of gradients in the lowest of its parts' stages.
3. What neither depends on parameters nor draws at random, and is cheap beside a message (masks, rotary
   tables), belongs to every stage that uses it.

Layers are the members of the model's lists (`ModuleList`, `Sequential`) that have modules of their own; of a
Sequential those whose class is there more than once. A list in a list is looked into. Where there are none,
members with parameters are layers. A layer counts as often as the forward calls it. What runs between two
belongs to the one before, "embedding" is what runs before the first, "loss" what runs after the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

from torch import nn

from stretto.capturing.graph import GRAD, UPDATE, Traced
from stretto.config.stage_text import EMBEDDING, LAYER, LOSS, Stages, evenly, read_stages
from stretto.errors import UsageError, meant
from stretto.ir.balance import cut_chain, even_ranks
from stretto.ir.program import STARTS, WAIT, Op

BYTE_FLOPS = 10.0
"""Flops that take as long as moving one byte of memory. Assumed: between a CPU core (80 GFLOP/s over
10 GB/s) and an accelerator (990 TFLOP/s over 3.35 TB/s is 300); only the balance of stages depends on it."""

MESSAGE_BYTE_FLOPS = 1000.0
"""The same for a byte sent to another rank. Assumed: 80 GFLOP/s over 1 Gbit/s is 640, 990 TFLOP/s over
400 Gbit/s is 20,000, most of it hidden. It keeps cuts at places where little crosses."""

FREE_FLOPS_PER_BYTE = 50.0
"""A value is made again in each stage that uses it when that costs fewer flops for each of its bytes."""

MAX_CANDIDATES = 512
"""Places to cut considered by the automatic cut, the ones with the least traffic first; the search is
quadratic."""

_LISTS = (nn.ModuleList, nn.Sequential)

Placement = Mapping[str, tuple[int, ...]]
"""Op name -> the stages that compute it (several for cheap shared values)."""


def op_cost(op: Op) -> float:
    """A rough cost in flops: arithmetic, or memory traffic of the result (a read and a write)."""
    return 0.0 if op.alias is not None else max(float(op.flops), BYTE_FLOPS * 2.0 * op.nbytes)


def split(
    traced: Traced, stages: int, how: str | Sequence[str] = "auto", ranks: Sequence[int] | None = None
) -> Placement:
    """Assign every op to a stage.

    how: "auto"; the names of the modules that begin stages 1, 2, ... in the order of execution; or a text of
    stages (`stretto.config.stage_text`).
    ranks: the pipeline rank of each stage, where that is known; "auto" gives ranks with several even work.

    Raises UsageError for names that do not exist, are never called, are out of order, or do not make
    `stages` stages, and for a text that has other layers than the model.
    """
    if stages < 1:
        raise UsageError(f"a model needs at least one stage, not {stages}")
    if how == "auto":
        cuts = _auto_cuts(traced, stages, _free(traced), ranks)
    elif isinstance(how, str):
        cuts = _cuts_of_text(traced, stages, how)
    else:
        cuts = _named_cuts(traced, stages, how)
    return place(traced, stages, cuts)


def check_split(model: nn.Module, how: str | Sequence[str]) -> None:
    """Before the model is traced: raises UsageError for a name that none of its modules has."""
    names = () if isinstance(how, str) else how
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in modules:
            near = meant(name, modules, "; {}")
            raise UsageError(f"split names the module {name!r}, which the model does not have{near}")


def place(traced: Traced, stages: int, cuts: Sequence[int], *, buffers: bool = True) -> Placement:
    """Steps 2 and 3, for given cuts: the segments that begin stages 1, 2, ..., ascending.

    buffers: whether every stage has all buffers, so that what is made of them can be made anywhere.
    """
    free = _free(traced, buffers)
    assert len(cuts) == stages - 1, "each stage but the first has where it begins"
    placed: dict[str, int] = {}
    backward: set[str] = set()
    last = bisect_right(cuts, len(traced.segments) - 1)  # that has any op
    for op, origin in traced.program.ops:
        stage = last if origin.segment is None else bisect_right(cuts, origin.segment)
        if origin.backward:
            # A gradient flows down the stages; what sums parts of several waits for the lowest.
            stage = min([stage, *(placed[name] for name in op.uses if name in backward)])
            backward.add(op.name)
        placed[op.name] = stage
    return _share(traced, placed, free)


def _named_cuts(traced: Traced, stages: int, names: Sequence[str]) -> list[int]:
    first: dict[str, int] = {}
    for segment, module in enumerate(traced.segments):
        first.setdefault(module, segment)
    result: list[int] = []
    for name in names:
        if name not in first:
            hint = meant(name, first, "; {}")
            raise UsageError(f"split names the module {name!r}, which the forward never enters{hint}")
        result.append(first[name])
    if result != sorted(set(result)):
        raise UsageError(f"split must name modules in the order of execution, each once: {', '.join(names)}")
    if len(result) != stages - 1:
        raise UsageError(
            f"split names {len(names)} modules, which makes {len(result) + 1} stages, but the pipeline has "
            f"{stages}: name the modules that begin stages 1 to {stages - 1}"
        )
    return result


def _cuts_of_text(traced: Traced, stages: int, text: str) -> list[int]:
    try:
        result = read_stages(text)
    except ValueError as error:
        raise UsageError(f"split = {error}") from None
    if len(result.of) != stages:
        raise UsageError(f"split = {text!r} has {len(result.of)} stages, but the pipeline has {stages}")
    return _layer_cuts(traced.job.name, traced.segments, traced.layers, result)


def _auto_cuts(traced: Traced, stages: int, free: frozenset[str], ranks: Sequence[int] | None) -> list[int]:
    """Step 1, automatic: stages, and ranks with several, of as equal cost as places to cut allow."""
    if stages == 1:
        return []
    count = len(traced.segments)
    load = [0.0] * count
    last_use: dict[str, int] = {}
    for op, (segment, backward) in traced.program.ops:
        if segment is not None:
            load[segment] += op_cost(op)
            if not backward:
                for name in op.uses:
                    last_use[name] = max(last_use.get(name, 0), segment)
    # Bytes that cross a cut before segment k: values made before it and used at it or after.
    change = [0] * (count + 1)
    roots: dict[str, str] = {}
    crossing_until: dict[str, int] = {}
    made: dict[str, int] = {}
    size: dict[str, int] = {}
    for op, (segment, backward) in traced.program.ops:
        if backward or segment is None or op.name in free:
            continue
        roots[op.name] = op.alias if op.alias is not None and op.alias in made else op.name
        root = roots[op.name]
        made.setdefault(root, segment)
        size.setdefault(root, sum(spec.nbytes for spec in op.outputs if spec is not None))
        crossing_until[root] = max(crossing_until.get(root, 0), last_use.get(op.name, 0))
    for root, segment in made.items():
        if crossing_until[root] > segment:
            change[segment + 1] += size[root]
            change[crossing_until[root] + 1] -= size[root]
    crossing = list(accumulate(change))
    total = list(accumulate(load, initial=0.0))
    places = [k for k in range(1, count) if 0.0 < total[k] < total[count] and crossing[k] > 0]
    # Of places with the same work before them, the last is the one where a module begins.
    places = list({total[k]: k for k in places}.values())
    if len(places) < stages - 1:
        raise UsageError(
            f"the model has {len(places) + 1} parts that can be stages, fewer than the {stages} asked for; "
            "use fewer pipeline stages"
        )
    if len(places) > MAX_CANDIDATES:
        places = sorted(sorted(places, key=lambda k: crossing[k])[: max(MAX_CANDIDATES, stages)])
    ends = [0, *places, count]
    until = [total[end] for end in ends]
    border = [0.0, *(MESSAGE_BYTE_FLOPS * crossing[place] for place in places), 0.0]

    def stage_cost(first: int, end: int, _: int) -> float:
        return until[end] - until[first] + border[first] + border[end]

    cuts = cut_chain(until, stages, stage_cost)
    assert cuts is not None, "there are enough places"
    if ranks is not None and len(set(ranks)) < stages:
        cuts = even_ranks(cuts, until, border, ranks)
    return [ends[cut] for cut in cuts]


def _free(traced: Traced, buffers: bool = True) -> frozenset[str]:
    free: set[str] = set()
    spent: dict[str, float] = {}
    # A buffer that the model writes is up to date in one stage only.
    names = (one.name for one in traced.job.buffers if buffers)
    given = {f"buffer/{name}" for name in names if f"{UPDATE}{name}" not in traced.program.roots}
    for op, origin in traced.program.ops:
        inputs = [n for n in op.uses if not n.startswith(("batch/", "const/")) and n not in given]
        if (
            origin.backward
            or op.random
            or op.target in (*STARTS, WAIT)
            or any(name not in free for name in inputs)
        ):
            continue
        flops = float(op.flops) + sum(spent[name] for name in inputs)
        if flops <= FREE_FLOPS_PER_BYTE * sum(s.nbytes for s in op.outputs if s is not None):
            free.add(op.name)
            spent[op.name] = flops
    return frozenset(free)


def _share(traced: Traced, placed: Mapping[str, int], free: frozenset[str]) -> Placement:
    stages: dict[str, set[int]] = defaultdict(set)
    kept = {value for root, value in traced.program.roots.items() if not root.startswith(GRAD)}
    for op, _ in reversed(traced.program.ops):
        if op.name not in free or op.name in kept or not stages[op.name]:
            stages[op.name].add(placed[op.name])
        for used in op.uses:
            if used in free:
                stages[used] |= stages[op.name]
    return {op.name: tuple(sorted(stages[op.name])) for op, _ in traced.program.ops}


# --- layers ------------------------------------------------------------------------------------------------


def layer_names(model: nn.Module) -> frozenset[str]:
    """The names of the model's layers; none where it has no lists."""
    members = [
        member for module in model.modules() if isinstance(module, _LISTS) for member in module.children()
    ]
    classes = Counter(type(member) for member in members if _has_parts(member))

    def repeats(module: nn.Module, member: nn.Module) -> bool:
        return _has_parts(member) and (isinstance(module, nn.ModuleList) or classes[type(member)] > 1)

    def has_parameters(module: nn.Module, member: nn.Module) -> bool:
        return any(True for _ in member.parameters())

    return frozenset(_found("", model, repeats) or _found("", model, has_parameters))


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _found(name: str, module: nn.Module, is_layer: Callable[[nn.Module, nn.Module], bool]) -> list[str]:
    result: list[str] = []
    for child, member in module.named_children():
        full = f"{name}.{child}" if name else child
        layer = isinstance(module, _LISTS) and is_layer(module, member)
        inside = [] if layer and not isinstance(member, _LISTS) else _found(full, member, is_layer)
        result += inside or ([full] if layer else [])
    return result


def _layer_cuts(name: str, segments: Sequence[str], layers: Collection[str], stages: Stages) -> list[int]:
    """Step 1, by a text of stages; an empty stage begins where the next one does.

    name: of the model, for messages. segments: the module that runs in each. Raises UsageError for a model
    without layers, and for another number of layers than it has.
    """
    begins, ends = _calls(segments, layers)
    if not begins:
        raise UsageError(
            f"split = {stages.text!r} speaks of layers, and {name} has no list of modules (ModuleList, "
            "Sequential) that its forward calls: name the modules that begin stages, as split = "
            '["blocks.4"], or give split = "auto"'
        )
    if stages.layers != len(begins):
        first, last = segments[begins[0]], segments[begins[-1]]
        raise UsageError(
            f"split = {stages.text!r} has {stages.layers} layers, and the forward of {name} calls "
            f"{len(begins)}, {first} to {last}: write {evenly(len(begins), len(stages.of)).text!r}"
        )
    cuts: list[int] = []
    before: list[str] = []
    for words in stages.of[:-1]:
        before += words
        count = before.count(LAYER)
        if LOSS in before:
            cuts.append(len(segments))
        elif count == len(begins):
            cuts.append(ends[-1])
        elif count or EMBEDDING in before:
            cuts.append(begins[count])
        else:
            cuts.append(0)
    return cuts


def _calls(segments: Sequence[str], layers: Collection[str]) -> tuple[list[int], list[int]]:
    begins: list[int] = []
    ends: list[int] = []
    inside: str | None = None
    for at, name in enumerate(segments):
        # A module that a layer shares with others has their name, so only the layer's owners end it.
        if inside is not None and (name in layers or not name or inside.startswith(f"{name}.")):
            if name == inside:
                continue
            ends.append(at)
            inside = None
        if inside is None and name in layers:
            begins.append(at)
            inside = name
    return begins, ends + [len(segments)] * (inside is not None)
